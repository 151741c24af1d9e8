"""The kernel of medium heads: five matrix products per pair of tiles, each computed once.

It differs from that of narrow heads (`narrow/kernel.py`) in its steps (`consumer.py`), in the
pieces of q and k, and in where dk and dv are staged.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.backward.groups import ScoreNumbers, SizeNumbers
from lockstep.kernels.hopper.backward.medium.consumer import consume
from lockstep.kernels.hopper.backward.medium.dq_sums import DqSums, add_halves
from lockstep.kernels.hopper.backward.medium.tiles import MAIN, STAGES, Tiles
from lockstep.kernels.hopper.backward.narrow.tile_queue import TileQueue
from lockstep.kernels.hopper.backward.nonfinite import has_nonfinite, overwrite_nonfinite, rewrite
from lockstep.kernels.hopper.backward.query_loop import KeyTile, assign_keys
from lockstep.kernels.hopper.backward.scores import Scores
from lockstep.kernels.hopper.backward.sizes import Sizes, with_slots
from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.launch import unspecialized


@gluon.jit
def rest_of(coordinates):
    """Where the second piece of a row begins whose first one begins at `coordinates`."""
    a, b, head, row, _ = coordinates
    return a, b, head, row, MAIN


@gluon.jit
def load_queries(
    n, tile, t, head, key_tile, is_inspected, tiles, q_desc, q_rest_desc, dout_desc, stats_desc
):
    """The query tiles of the n-th step, into a slot that is free."""
    slot = n % STAGES
    row = key_tile.q_coordinates(head, (key_tile.first_q_tile + t) * q_desc.block_shape[3])
    full = tiles.full_bar.index(gl.where(is_inspected, STAGES, slot))
    of_q: gl.constexpr = q_desc.block_type.nbytes + q_rest_desc.block_type.nbytes
    mbarrier.expect(full, of_q + dout_desc.block_type.nbytes + stats_desc.block_type.nbytes)
    tma_load(q_desc, row, full, tiles.q_smem.index(slot))
    tma_load(q_rest_desc, rest_of(row), full, tiles.q_rest_smem.index(slot))
    tma_load(stats_desc, [tile * stats_desc.block_shape[0]], full, tiles.stats_smem.index(slot))
    tma_load(dout_desc, row, full, tiles.dout_smem.index(slot))


@gluon.jit
def load_keys(key_tile, tiles, k_desc, k_rest_desc):
    """k of a loop."""
    row = key_tile.kv_coordinates()
    full = tiles.k_full_bar
    mbarrier.expect(full, k_desc.block_type.nbytes + k_rest_desc.block_type.nbytes)
    tma_load(k_desc, row, full, tiles.k_smem.index(0))
    tma_load(k_rest_desc, rest_of(row), full, tiles.k_rest_smem.index(0))


@gluon.jit
def load_values(key_tile, tiles, v_desc):
    """v of a loop."""
    mbarrier.expect(tiles.v_full_bar, v_desc.block_type.nbytes)
    tma_load(v_desc, key_tile.kv_coordinates(), tiles.v_full_bar, tiles.v_smem.index(0))


@gluon.jit
def inspect_queries(n, n_inspected, tiles, CONSTANT_TIME: gl.constexpr):
    """Let consumers have the query tiles of the n-th step once they are clean: what is not finite
    is replaced if any row is marked NONFINITE, in CONSTANT_TIME in every tile. `n_inspected` steps
    were inspected before."""
    slot = n % STAGES
    mbarrier.wait(tiles.full_bar.index(STAGES), n_inspected & 1)
    q, q_rest, dout = tiles.queries(slot)
    if CONSTANT_TIME:
        rewrite(q, 0, 1, 0)
        rewrite(q_rest, 0, 1, 0)
        rewrite(dout, 0, 1, 0)
    elif has_nonfinite(tiles.stats_smem.index(slot), q.shape[0]):
        overwrite_nonfinite(q, 0, 1, 0)
        overwrite_nonfinite(q_rest, 0, 1, 0)
        overwrite_nonfinite(dout, 0, 1, 0)
    fence_async_shared()
    mbarrier.arrive(tiles.full_bar.index(slot), count=1)


@gluon.jit
def store_keys(n, key_tile, tiles, dk_desc, dk_rest_desc, dv_desc):
    """dk and dv of a loop that ends after `n` steps in all, when they are there."""
    tiles.wait_dkv()
    for W in gl.static_range(2):
        dk, dk_rest = tiles.dk_tiles((n + 1) % STAGES, W)
        row = key_tile.dkv_coordinates(W * ROWS)
        tma_store(dk_desc, row, dk)
        tma_store(dk_rest_desc, rest_of(row), dk_rest)
    tma_store(dv_desc, key_tile.dkv_coordinates(), tiles.v_smem.index(0))
    tma_store_wait(0)
    mbarrier.arrive(tiles.dkv_stored_bar, count=1)


@gluon.jit
def produce(
    queue, tiles, q_desc, q_rest_desc, dout_desc, stats_desc, k_desc, k_rest_desc, v_desc, dk_desc,
    dk_rest_desc, dv_desc, ticket_ptr, kv_slots, n_heads, heads_at_once,
):  # fmt: skip
    """Partition of one warp: draws tickets, loads keys and queries, and stores dk and dv.

    Queries and k of the next loop come while the last dk and dv are made and leave. Query tiles
    that a mask cuts are cleaned (`nonfinite.py`) before consumers may read them."""
    sizes = queue.sizes
    MASKED: gl.constexpr = sizes.HAS_LEFT or sizes.HAS_RIGHT
    n_loops = 0
    n = 0
    n_inspected = 0
    last_steps = 0
    # A program that draws a ticket has done all its earlier ones, or is at them.
    ticket = gl.atomic_add(ticket_ptr, 1)
    none = ticket * 0
    last = KeyTile((none, none, none, none, none, none), (none, none, none, none), sizes.LAYOUT)
    while ticket < kv_slots * n_heads:
        key_tile, loop = assign_keys(ticket, kv_slots, n_heads, heads_at_once, sizes)
        queue.post(n_loops, loop, key_tile, n_loops * 0)
        tile = loop.first_tile
        t = loop.first_number()
        head = tile * 0
        is_cut = loop.cuts(t) if MASKED else False
        if loop.n_steps > 0:
            load_queries(
                n, tile, t, key_tile.q_head, key_tile, is_cut, tiles, q_desc, q_rest_desc,
                dout_desc, stats_desc,
            )  # fmt: skip
        if last_steps > 0:
            tiles.wait_empty((n + 1) % STAGES)
        if loop.n_steps > 0:
            load_keys(key_tile, tiles, k_desc, k_rest_desc)
        if n_loops > 0:
            store_keys(n, last, tiles, dk_desc, dk_rest_desc, dv_desc)
        if loop.n_steps > 0:
            load_values(key_tile, tiles, v_desc)
            if is_cut:
                inspect_queries(n, n_inspected, tiles, sizes.CONSTANT_TIME)
                n_inspected += 1
        for i in range(1, loop.n_steps):
            tile, t, head = loop.next_in_group(tile, t, head)
            if i >= STAGES:
                tiles.wait_empty((n + i) % STAGES)
            is_cut = loop.cuts(t) if MASKED else False
            load_queries(
                n + i, tile, t, key_tile.q_head + head, key_tile, is_cut, tiles, q_desc,
                q_rest_desc, dout_desc, stats_desc,
            )  # fmt: skip
            if is_cut:
                inspect_queries(n + i, n_inspected, tiles, sizes.CONSTANT_TIME)
                n_inspected += 1
        n += loop.n_steps
        if loop.n_steps >= STAGES:
            # That of the last step but one: the next loop begins there.
            tiles.wait_empty(n % STAGES)
        last = key_tile
        last_steps = loop.n_steps
        n_loops += 1
        ticket = gl.atomic_add(ticket_ptr, 1)
    queue.close(n_loops)
    if last_steps > 0:
        tiles.wait_empty((n + 1) % STAGES)
    if n_loops > 0:
        store_keys(n, last, tiles, dk_desc, dk_rest_desc, dv_desc)


@unspecialized(gluon.jit, any_address=("turn_ptr", "ticket_ptr", "bounds_ptr", "kv_lens_ptr"))
def medium_kernel(
    q_desc, q_rest_desc, dout_desc, stats_desc, k_desc, k_rest_desc, v_desc, dk_desc, dk_rest_desc,
    dv_desc, chunk_desc, middle_desc, turn_ptr, ticket_ptr, bounds_ptr, kv_lens_ptr,
    of_scores: ScoreNumbers, kv_slots, q_slots, n_heads, heads_at_once, numbers: SizeNumbers,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr, CONSTANT_TIME: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        with_slots(q_slots, numbers), bounds_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT,
        HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3], CONSTANT_TIME,
    )  # fmt: skip
    scores = Scores(of_scores.scale, of_scores.unit, of_scores.softcap, CAPPED, HIDES_SCORES)
    queue = TileQueue.create(4, sizes)
    tiles = Tiles.create(q_desc, q_rest_desc, dout_desc, stats_desc, k_desc, k_rest_desc, v_desc)
    dq_sums = DqSums.create(chunk_desc, middle_desc)
    # What the kernel before has written, from here on: this one starts before it ends.
    gdc_wait()
    # The next kernel may start as soon as there is room: counters are 0.
    gdc_launch_dependents()
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    gl.warp_specialize(
        [
            (consume, (0, queue, tiles, dq_sums, scores)),
            (consume, (1, queue, tiles, dq_sums, scores)),
            (produce, (queue, tiles, q_desc, q_rest_desc, dout_desc, stats_desc, k_desc,
                       k_rest_desc, v_desc, dk_desc, dk_rest_desc, dv_desc, ticket_ptr, kv_slots,
                       n_heads, heads_at_once)),
            (add_halves, (0, queue, dq_sums, chunk_desc, middle_desc, turn_ptr)),
            (add_halves, (1, queue, dq_sums, chunk_desc, middle_desc, turn_ptr)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
