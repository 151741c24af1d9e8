"""The backward kernel: five matrix products per pair of tiles, each computed once.

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    Pᵀ = exp2((Sᵀ - m)·unit) / l    dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ += dS·K

There is one program to an SM. It draws tickets (`query_loop.py`), each of which stands for
BLOCK_KV = 128 keys and a loop over the query tiles that see them. Two warpgroups of 64 keys hold dK
and dV in registers. Only dQ sums over all 128 keys: for it dSᵀ goes through shared memory, and each
warpgroup multiplies one half of the tile of dQ, which is then added to sums in global memory
(`dq_sums.py`). How the two go about it depends on the head dim: `together.py`,
`apart.py`. One more warp draws tickets, loads tiles and stores dK and dV; two add to dQ.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.backward.groups import (
    CutNumbers,
    LoopPointers,
    ScoreNumbers,
    ShareNumbers,
    SizeNumbers,
)
from lockstep.kernels.hopper.backward.narrow.add_parts import add_parts
from lockstep.kernels.hopper.backward.narrow.apart import consume_apart
from lockstep.kernels.hopper.backward.narrow.dq_sums import DqSums
from lockstep.kernels.hopper.backward.narrow.tile_queue import TileQueue
from lockstep.kernels.hopper.backward.narrow.tiles import STAGES, Tiles
from lockstep.kernels.hopper.backward.narrow.together import consume_together
from lockstep.kernels.hopper.backward.nonfinite import has_nonfinite, overwrite_nonfinite, rewrite
from lockstep.kernels.hopper.backward.query_loop import KeyTile, assign_keys
from lockstep.kernels.hopper.backward.scores import Scores
from lockstep.kernels.hopper.backward.sizes import Sizes, with_slots
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
def load_queries(
    n, tile, t, head, key_tile, is_inspected, tiles, q_desc, dout_desc, stats_desc,
    CONSTANT_TIME: gl.constexpr,
):  # fmt: skip
    """The query tiles of the n-th step, into a slot that is free."""
    slot = n % STAGES
    row = key_tile.q_coordinates(head, (key_tile.first_q_tile + t) * q_desc.block_shape[3])
    full = tiles.full_bar.index(gl.where(is_inspected, STAGES, slot))
    STATS: gl.constexpr = tiles.STATS
    IN_MEMORY: gl.constexpr = 2 if CONSTANT_TIME else 1
    mbarrier.expect(full, 2 * q_desc.block_type.nbytes + STATS * stats_desc.block_type.nbytes)
    tma_load(q_desc, row, full, tiles.q_smem.index(slot))
    for i in gl.static_range(STATS):
        at = (tile * IN_MEMORY + i) * stats_desc.block_shape[0]
        tma_load(stats_desc, [at], full, tiles.stats_smem.index(slot * STATS + i))
    tma_load(dout_desc, row, full, tiles.dout_smem.index(slot))


@gluon.jit
def clean_queries(tiles, slot, CONSTANT_TIME: gl.constexpr):
    """A warp: replace what is not finite in q and dO of a query tile that has landed, if any of its
    rows is marked NONFINITE; in CONSTANT_TIME, in every tile."""
    q, dout = tiles.matrix(tiles.q_smem.index(slot)), tiles.matrix(tiles.dout_smem.index(slot))
    if CONSTANT_TIME:
        rewrite(q, 0, 1, 0)
        rewrite(dout, 0, 1, 0)
    elif has_nonfinite(tiles.stats_smem.index(slot), q.shape[0]):
        overwrite_nonfinite(q, 0, 1, 0)
        overwrite_nonfinite(dout, 0, 1, 0)
    fence_async_shared()


@gluon.jit
def inspect_queries(n, n_inspected, tiles, CONSTANT_TIME: gl.constexpr):
    """Let consumers have the query tiles of the n-th step once they are clean; `n_inspected` steps
    were inspected before."""
    mbarrier.wait(tiles.full_bar.index(STAGES), n_inspected & 1)
    clean_queries(tiles, n % STAGES, CONSTANT_TIME)
    mbarrier.arrive(tiles.full_bar.index(n % STAGES), count=1)


@gluon.jit
def store_keys(n, key_tile, tiles, dk_desc, dv_desc, sizes):
    """dk and dv of a loop that ends after `n` steps in all, when they are there; those of one share
    of several, or of a span that another one follows, are in memory by then."""
    BLOCK_Q: gl.constexpr = dk_desc.block_shape[3]
    tiles.wait_dkv()
    is_whole = key_tile.share < 0 if sizes.SHARED else True
    if sizes.CUT:
        is_whole = (key_tile.share < 0) | ((key_tile.share + 1) % sizes.spans == 0)
    if is_whole:
        for i in gl.static_range(tiles.k_smem.shape[4] // BLOCK_Q):
            dk, dv = tiles.dkv((n + 1) % STAGES, i)
            tma_store(dk_desc, key_tile.dkv_coordinates(i * BLOCK_Q), dk)
            tma_store(dv_desc, key_tile.dkv_coordinates(i * BLOCK_Q), dv)
        tma_store_wait(0)
    mbarrier.arrive(tiles.dkv_stored_bar, count=1)


@gluon.jit
def has_large_scores(flags_ptr, loop, key_tile, CUT: gl.constexpr):
    """A warp: 1 if any query tile of a loop has them, else 0. A span counts as its loop does."""
    last_tile, n_tiles = loop.first_tile, loop.n_tiles
    if CUT:
        n_tiles = loop.tiles_per_head
        last_tile += n_tiles - (key_tile.first_q_tile + loop.n_tiles)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 128, layout)
    found = gl.full([128], 0, gl.int32, layout)
    for head in range(loop.heads_per_kv):
        last = last_tile + head * loop.tiles_per_head
        for first in range(0, n_tiles, 128):
            is_tile = first + i < n_tiles
            found = found | gl.load(flags_ptr + last - first - i, mask=is_tile, other=0)
    return gl.max(found, 0)


@gluon.jit
def has_any_large_scores(flags_ptr, n_tiles):
    """A program: 1 if any query tile of the call has them, else 0."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 2048, layout)
    found = gl.full([2048], 0, gl.int32, layout)
    for first in range(0, n_tiles, 2048):
        found = found | gl.load(flags_ptr + first + i, mask=first + i < n_tiles, other=0)
    return gl.max(found, 0)


@gluon.jit
def produce(
    queue, tiles, q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, flags_ptr,
    ticket_ptr, kv_slots, n_heads, heads_at_once, MAY_BE_LARGE: gl.constexpr,
):  # fmt: skip
    """Partition of one warp: draws tickets, loads keys and queries, and stores dk and dv.

    Keys of the next loop come while the last dk and dv leave. Query tiles that a mask cuts are
    cleaned (`nonfinite.py`) before consumers may read them; the next one has to wait for room in
    any case."""
    sizes = queue.sizes
    MASKED: gl.constexpr = sizes.HAS_LEFT or sizes.HAS_RIGHT
    SIZE: gl.constexpr = sizes.BLOCK_KV * (tiles.D_COLUMNS + tiles.DV_COLUMNS)
    n_loops = 0
    n_keys = 0  # how often keys have been loaded: a loop of no tile has none
    n = 0
    n_inspected = 0
    # A program that draws a ticket has done all its earlier ones, or is at them.
    ticket = gl.atomic_add(ticket_ptr, 1)
    none = ticket * 0
    last = KeyTile((none, none, none, none, none, none), (none, none, none, none), sizes.LAYOUT)
    n_tickets = kv_slots * n_heads
    if sizes.CUT:
        n_tickets += sizes.n_cut * (sizes.spans - 1)
    while ticket < n_tickets:
        key_tile, loop = assign_keys(ticket, kv_slots, n_heads, heads_at_once, sizes)
        if MAY_BE_LARGE:
            is_large = has_large_scores(flags_ptr, loop, key_tile, sizes.CUT)
            queue.post(n_loops, loop, key_tile, is_large, SIZE)
        else:
            queue.post(n_loops, loop, key_tile, n_loops * 0, SIZE)
        tile = loop.first_tile
        t = loop.first_number()
        head = tile * 0
        is_cut = loop.cuts(t) if MASKED else False
        if loop.n_steps > 0:
            load_queries(
                n, tile, t, key_tile.q_head, key_tile, is_cut, tiles, q_desc, dout_desc, stats_desc,
                sizes.CONSTANT_TIME,
            )  # fmt: skip
            if n_keys > 0:
                tiles.wait_keys_empty()
            mbarrier.expect(tiles.kv_full_bar, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(v_desc, key_tile.kv_coordinates(), tiles.kv_full_bar, tiles.v_smem.index(0))
            tma_load(k_desc, key_tile.kv_coordinates(), tiles.kv_full_bar, tiles.k_smem.index(0))
            n_keys += 1
            if is_cut:
                inspect_queries(n, n_inspected, tiles, sizes.CONSTANT_TIME)
                n_inspected += 1
        if n_loops > 0:
            store_keys(n, last, tiles, dk_desc, dv_desc, sizes)
        for i in range(1, loop.n_steps):
            tile, t, head = loop.next_in_group(tile, t, head)
            if i >= STAGES:
                tiles.wait_empty((n + i) % STAGES)
            is_cut = loop.cuts(t) if MASKED else False
            load_queries(
                n + i, tile, t, key_tile.q_head + head, key_tile, is_cut, tiles, q_desc, dout_desc,
                stats_desc, sizes.CONSTANT_TIME,
            )  # fmt: skip
            if is_cut:
                inspect_queries(n + i, n_inspected, tiles, sizes.CONSTANT_TIME)
                n_inspected += 1
        n += loop.n_steps
        if loop.n_steps >= STAGES:
            # That of the last step but one: the next loop begins there.
            tiles.wait_empty(n % STAGES)
        last = key_tile
        n_loops += 1
        ticket = gl.atomic_add(ticket_ptr, 1)
    queue.close(n_loops)
    if n_keys > 0:
        tiles.wait_keys_empty()
    if n_loops > 0:
        store_keys(n, last, tiles, dk_desc, dv_desc, sizes)


@gluon.jit
def consume(W: gl.constexpr, queue, tiles, dq_sums, scores, large_ptr, MAY_BE_LARGE: gl.constexpr):
    """Partition of four warps: the keys from W·ROWS on, and one half of every tile of dQ."""
    if tiles.TOGETHER:
        consume_together(W, queue, tiles, dq_sums, scores, large_ptr, MAY_BE_LARGE)
    else:
        consume_apart(W, queue, tiles, dq_sums, scores, large_ptr, MAY_BE_LARGE)


@gluon.jit
def start_warps(
    queue, tiles, dq_sums, dq_desc, scores, q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc,
    dv_desc, sums_desc, pointers, kv_slots, n_heads, heads_at_once, MAY_BE_LARGE: gl.constexpr,
):  # fmt: skip
    """All warps of a program. Unless a call MAY_BE_LARGE in some of its scores, no flag is read,
    and consumers have one loop: with two, ptxas spills what all loops need."""
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    gl.warp_specialize(
        [
            (consume, (0, queue, tiles, dq_sums, scores, pointers.large_ptr, MAY_BE_LARGE)),
            (consume, (1, queue, tiles, dq_sums, scores, pointers.large_ptr, MAY_BE_LARGE)),
            (produce, (queue, tiles, q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc,
                       dv_desc, pointers.flags_ptr, pointers.ticket_ptr, kv_slots, n_heads,
                       heads_at_once, MAY_BE_LARGE)),
            (add_parts, (0, queue, dq_sums, dq_desc, sums_desc, pointers.turn_ptr,
                         tiles.D_COLUMNS)),
            (add_parts, (1, queue, dq_sums, dq_desc, sums_desc, pointers.turn_ptr,
                         tiles.D_COLUMNS)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


@unspecialized(
    gluon.jit,
    any_address=("large_ptr", "flags_ptr", "turn_ptr", "ticket_ptr", "bounds_ptr", "kv_lens_ptr"),
)
def backward_kernel(
    q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, dq_desc,
    pointers: LoopPointers, of_scores: ScoreNumbers, kv_slots, q_slots, n_heads, heads_at_once,
    numbers: SizeNumbers, shares: ShareNumbers, cuts: CutNumbers, LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr, CONSTANT_TIME: gl.constexpr, D_COLUMNS: gl.constexpr,
    DV_COLUMNS: gl.constexpr, TOGETHER: gl.constexpr, SHARED: gl.constexpr, WHOLE_DQ: gl.constexpr,
    CUT: gl.constexpr, FINISHED: gl.constexpr,
):  # fmt: skip
    """`sums_desc` is that of dq where there are no sums: WHOLE_DQ. `dq_desc` is needed where dq is
    FINISHED here."""
    n_tiles = q_slots * n_heads * numbers.heads_per_kv
    sizes = Sizes(
        with_slots(q_slots, numbers), pointers.bounds_ptr, pointers.kv_lens_ptr, LAYOUT, HAS_LEFT,
        HAS_RIGHT, HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3], CONSTANT_TIME,
        (pointers.shares_ptr, shares.share_heads, shares.span_tiles, shares.spans, shares.n_shares)
        if SHARED or CUT else None,
        pointers.plan_ptr,
        (cuts.n_cut, cuts.first_cut, cuts.cut_from, pointers.turn_ptr + n_tiles) if CUT else None,
    )  # fmt: skip
    scores = Scores(of_scores.scale, of_scores.unit, of_scores.softcap, CAPPED, HIDES_SCORES)
    queue = TileQueue.create(4, sizes)
    # What shared memory has room for.
    STATS: gl.constexpr = 2 if CONSTANT_TIME and q_desc.block_shape[3] == 64 else 1
    tiles = Tiles.create(
        q_desc, dout_desc, stats_desc, k_desc, v_desc, D_COLUMNS, DV_COLUMNS, TOGETHER, STATS
    )
    dq_sums = DqSums.create(sums_desc, of_scores.scale, WHOLE_DQ, FINISHED)
    # What the kernel before has written, from here on: this one starts before it ends.
    gdc_wait()
    # The next kernel may start as soon as there is room: counters are 0.
    gdc_launch_dependents()
    if SHARED and LAYOUT == "varlen":
        kv_slots = sizes.counted_slots()
    is_any_large = 0
    if not CONSTANT_TIME:
        is_any_large = has_any_large_scores(pointers.flags_ptr, n_tiles)
    if not CONSTANT_TIME and is_any_large != 0:
        start_warps(
            queue, tiles, dq_sums, dq_desc, scores, q_desc, dout_desc, stats_desc, k_desc, v_desc,
            dk_desc, dv_desc, sums_desc, pointers, kv_slots, n_heads, heads_at_once, True,
        )  # fmt: skip
    else:
        start_warps(
            queue, tiles, dq_sums, dq_desc, scores, q_desc, dout_desc, stats_desc, k_desc, v_desc,
            dk_desc, dv_desc, sums_desc, pointers, kv_slots, n_heads, heads_at_once, False,
        )  # fmt: skip
