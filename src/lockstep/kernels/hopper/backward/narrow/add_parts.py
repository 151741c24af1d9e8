"""Warps that add parts of dQ to its sums, in the order of `dq_sums.py`."""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.dq_sums import add_part, await_sums
from lockstep.kernels.hopper.backward.narrow.last_part import finish_part
from lockstep.kernels.hopper.backward.narrow.tiles import CONSUMERS_AND_WARP, DQ_FULL, PARTS
from lockstep.kernels.hopper.backward.turns import await_count
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, mbarrier, tma_store, tma_store_wait
from lockstep.kernels.hopper.common.named_barriers import await_all
from lockstep.kernels.hopper.common.tensor_maps import coordinates


@gluon.jit
def store_part(dq_desc, tile, sizes, dq_sums, W: gl.constexpr):
    """Have the copy engine store a part that is all of dQ of a tile: halves of its rows or, where
    BLOCK_Q is 64, of its columns."""
    head = tile // sizes.q_slots
    row = (tile - head * sizes.q_slots) * sizes.BLOCK_Q
    Hq = sizes.H * sizes.heads_per_kv
    batch = head // Hq
    head -= batch * Hq
    DOWN: gl.constexpr = sizes.BLOCK_Q - 64
    ASIDE: gl.constexpr = 64 - DOWN
    for half in gl.static_range(2):
        at = coordinates(batch, 0, 0, head, row + half * DOWN, half * ASIDE, False)
        tma_store(dq_desc, at, dq_sums.parts_smem.index(2 * W + half))


@gluon.jit
def send_part(W: gl.constexpr, n, tile, turn, dq_sums, sums_desc, turn_ptr, COLUMNS: gl.constexpr):
    """A part that others follow: added to the sums of a tile, then counted."""
    add_part(sums_desc, tile, dq_sums.parts_smem.index(W), turn == 0, COLUMNS)
    tma_store_wait(0)
    mbarrier.arrive(dq_sums.empty_bar.index(W), count=1)
    await_sums(n)
    gl.atomic_add(turn_ptr + tile, 1, sem="release", scope="gpu")


@gluon.jit
def add_parts(W: gl.constexpr, queue, dq_sums, dq_desc, sums_desc, turn_ptr, COLUMNS: gl.constexpr):
    """Partition of one warp: adds every PARTS-th part, once it is there and all parts before it
    have been added."""
    calls = 0
    begin = 0
    n_back = 0
    while queue.has(calls):
        rows = queue.rows(calls, dq_sums.FINISHED)
        loop, _ = queue.read(calls)
        tile = loop.first_tile
        t = loop.first_number()
        head = tile * 0
        for n in range(begin, begin + loop.n_steps):
            if n % PARTS == W:
                if dq_sums.WHOLE:
                    await_all(DQ_FULL + W, CONSUMERS_AND_WARP)
                    store_part(sums_desc, tile, queue.sizes, dq_sums, W)
                    tma_store_wait(0)
                    mbarrier.arrive(dq_sums.empty_bar.index(W), count=1)
                else:
                    turn = loop.turn(t)
                    await_count(turn_ptr + tile, turn)
                    await_all(DQ_FULL + W, CONSUMERS_AND_WARP)
                    if not dq_sums.FINISHED:
                        send_part(W, n, tile, turn, dq_sums, sums_desc, turn_ptr, COLUMNS)
                    elif loop.is_last(t):
                        n_back = finish_part(
                            W, n, n_back, tile, t, turn, rows, queue.sizes, dq_sums, dq_desc,
                            sums_desc, COLUMNS,
                        )  # fmt: skip
                    else:
                        send_part(W, n, tile, turn, dq_sums, sums_desc, turn_ptr, COLUMNS)
            tile, t, head = loop.next_in_group(tile, t, head)
        begin += loop.n_steps
        calls += 1
