"""The last part of a query tile: its sums come back from memory, and leave as dQ.

One warp does it (`add_parts.py`), with few registers, in the memory of the part. A step takes
longer than products do where every part is the last of its tile.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.narrow.dq_sums import add_part, await_sums, rest_width
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.tensor_maps import coordinates


@gluon.jit
def bring_back(sums_desc, tile, part_smem, bar, phase, COLUMNS: gl.constexpr):
    """Have the copy engine bring the sums of a tile back, and wait for it."""
    ROWS: gl.constexpr = sums_desc.block_shape[0]
    N: gl.constexpr = (64 + rest_width(COLUMNS)) // (4 * ROWS)
    shape: gl.constexpr = [32 // ROWS, ROWS, 256]
    blocks = reinterpret(part_smem, gl.float32, shape, sums_desc.layout)
    mbarrier.expect(bar, N * ROWS * 1024)
    for i in gl.static_range(N):
        tma_load(sums_desc, [(tile * N + i) * ROWS, 0], bar, blocks.index(i))
    mbarrier.wait(bar, phase)


@gluon.jit
def eight_columns(x):
    """Four registers of each thread of two warps, [1, 256], as [32, 8] of their accumulators."""
    return x.reshape([2, 8, 4, 2, 2]).permute((0, 3, 1, 2, 4)).reshape([32, 8])


@gluon.jit
def make_boxes(boxes, part_smem, scale, sums_desc, N: gl.constexpr):
    """dQ from sums in the order of registers, in boxes [64, 16], of which each lies where sums have
    been read before."""
    one_warp: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    shape: gl.constexpr = [32, 1, 256]
    sums = reinterpret(part_smem, gl.float32, shape, sums_desc.layout)
    for i in range(N):
        box = boxes.index(i).reshape([64, 16])
        for half in gl.static_range(2):
            left = eight_columns(sums.index(4 * i + half).load(one_warp))
            right = eight_columns(sums.index(4 * i + 2 + half).load(one_warp))
            x = gl.join(left, right).permute((0, 2, 1)).reshape([32, 16])
            # Whatever is not finite is NaN.
            x = (x + x * 0.0) * scale
            box.slice(half * 32, 32, dim=0).store(x.to(box.dtype))
    fence_async_shared()


@gluon.jit
def store_dq(dq_desc, tile, t, rows, part_smem, scale, sizes, sums_desc, COLUMNS: gl.constexpr):
    """dQ of a tile from its sums to memory; the tile is number t of its loop (`TileQueue.rows`)."""
    N: gl.constexpr = (64 + rest_width(COLUMNS)) // 16
    shape: gl.constexpr = [16] + dq_desc.block_shape  # noqa: RUF005, Gluon does not unpack
    boxes = reinterpret(part_smem, dq_desc.dtype, shape, dq_desc.layout)
    make_boxes(boxes, part_smem, scale, sums_desc, N)
    first_q_tile, q_start, len_q = rows
    IS_PACKED: gl.constexpr = sizes.LAYOUT == "varlen"
    head = tile // sizes.q_slots
    batch = tile * 0
    q_tile = first_q_tile + t
    if not IS_PACKED:
        q_tile = tile - head * sizes.q_slots
        Hq = sizes.H * sizes.heads_per_kv
        batch = head // Hq
        head -= batch * Hq
    DOWN: gl.constexpr = sizes.BLOCK_Q - 64
    ASIDE: gl.constexpr = 64 - DOWN
    for i in gl.static_range(N):
        row = q_tile * sizes.BLOCK_Q + i // 4 * DOWN
        column = i // 4 * ASIDE + i % 4 * 16
        at = coordinates(batch, q_start, len_q, head, row, column, IS_PACKED)
        tma_store(dq_desc, at, boxes.index(i))
    tma_store_wait(0)


@gluon.jit
def finish_part(
    W: gl.constexpr, n, n_back, tile, t, turn, rows, sizes, dq_sums, dq_desc, sums_desc,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """The last part of a tile, which is there: added to the sums of those before, if any, which
    come back and become dQ. `n_back` tiles of this warp came back before; how many have, then."""
    part_smem = dq_sums.parts_smem.index(W)
    if turn > 0:
        add_part(sums_desc, tile, part_smem, False, COLUMNS)
        await_sums(n)
        bring_back(sums_desc, tile, part_smem, dq_sums.back_bar.index(W), n_back & 1, COLUMNS)
    store_dq(dq_desc, tile, t, rows, part_smem, dq_sums.scale, sizes, sums_desc, COLUMNS)
    mbarrier.arrive(dq_sums.empty_bar.index(W), count=1)
    return gl.where(turn > 0, n_back + 1, n_back)
