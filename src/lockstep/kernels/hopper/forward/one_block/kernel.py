"""The forward of heads whose keys are one block: short sequences, and cross-attention to a prompt.

A program is one warpgroup, and an SM has room for several of them. It works on tiles of 64 queries
one after the other (`tiles.py`). The keys and values of a tile stay for the next one if it has
the same, else the next ones come while this tile is at work: keys when its scores are there, values
when they are multiplied. Keys are multiplied in steps of 16. The maximum of every row is known
before its first weight (`rows.py`), so the code of a tile is short. Under a mask, values
that a row does not see may not be finite: tiles with results that are not are computed again when
all others are done.

Packed sequences have lengths that only the device knows. A program has one sequence and some of its
heads then, and those with more keys than are multiplied are left to the kernel for all calls
(`scheduling/sequence_order.py`).

A row has the bits that `consumer.py` would give it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.pieces import (
    multiply_all,
    n_pieces,
    piece_width,
    store_pieces,
)
from lockstep.kernels.hopper.common.scores import LOG2E
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers
from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.common.softmax import thread_sums
from lockstep.kernels.hopper.forward.one_block.rows import (
    clean_products,
    close,
    compute_scores,
    failures,
    hide,
    issue_products,
    weights_and_maxima,
)
from lockstep.kernels.hopper.forward.one_block.shares import Shares
from lockstep.kernels.hopper.forward.one_block.tiles import HeadTiles
from lockstep.kernels.hopper.forward.program import Results
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import await_stores
from lockstep.kernels.launch import unspecialized

columns_of = gluon.constexpr_function(columns)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def flat(tile):
    """A tile [1, 1, 1, rows, columns] in shared memory as [rows, columns]."""
    return tile.reshape([tile.shape[3], tile.shape[4]])


@gluon.jit
def load(desc, at, tile, full, pred=True):
    """Send a tile to shared memory."""
    mbarrier.expect(full, desc.block_type.nbytes, pred=pred)
    tma_load(desc, at, full, tile, pred=pred)


@aggregate
class Block:
    """What all tiles of a program share."""

    tiles: HeadTiles
    results: Results
    scale: gl.tensor
    right: gl.tensor
    SCALED: gl.constexpr  # scores are multiplied by a scale that is not positive
    HAS_RIGHT: gl.constexpr
    HAS_SINKS: gl.constexpr
    D: gl.constexpr  # columns that are multiplied
    DV: gl.constexpr
    KEYS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, results, scale, right, SCALED, HAS_RIGHT, HAS_SINKS, D, DV, KEYS):
        self.tiles = tiles
        self.results = results
        self.scale = scale
        self.right = right
        self.SCALED = gl.constexpr(SCALED)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.KEYS = gl.constexpr(KEYS)

    @gluon.jit
    def unit(self):
        """The factor that turns final scores into log2 units."""
        if self.SCALED:
            return LOG2E
        else:  # noqa: RET505, Gluon would go on and return both
            return self.scale

    @gluon.jit
    def rows_of(self, tile):
        """The queries of a tile [ROWS], and the first key behind those that each of them sees."""
        layout: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(self.KEYS, 0)))
        q_idx = tile.q_tile * ROWS + gl.arange(0, ROWS, layout)
        return q_idx, self.tiles.key_end(q_idx, self.right, self.HAS_RIGHT)

    @gluon.jit
    def weights_of(self, scores, end, EXACT: gl.constexpr):
        """`weights_and_maxima` of scores as they are multiplied, hidden keys aside."""
        # Without a mask, the keys that do not exist are in the last piece.
        FIRST: gl.constexpr = 0 if self.HAS_RIGHT else n_pieces(self.KEYS) - 1
        LAYOUT: gl.constexpr = end.type.layout
        if self.SCALED:
            scores = multiply_all(scores, self.scale)
        return weights_and_maxima(hide(scores, end, self.KEYS, FIRST), self.unit(), LAYOUT, EXACT)

    @gluon.jit
    def close(self, tile, acc, weights, m, is_large, dtype: gl.constexpr):
        """Pieces of out, lse, m and l; acc may be under way."""
        sink = None
        if self.HAS_SINKS:
            sink = gl.load(self.results.sinks_ptr + self.tiles.head_of(tile))
        return close(acc, weights, m, is_large, self.unit(), sink, dtype)

    @gluon.jit
    def store_statistics(self, tile, q_idx, lse, m, l):
        results = self.results
        row = tile.batch * results.stride_b + self.tiles.head_of(tile) * results.stride_h
        row += (self.tiles.q_start + q_idx) * results.stride_s
        results.store_statistics(row, lse, m, l, q_idx < self.tiles.Sq)


@gluon.jit
def first_pass(block, descs, memory, bars):
    """Compute all tiles; bit i % 32 of the result is set if rows of the i-th of them failed. The
    first queries, keys and values are under way."""
    # Without a mask no row fails.
    EXACT: gl.constexpr = not block.HAS_RIGHT
    q_desc, k_desc, v_desc, o_desc = descs
    q_smem, k_smem, v_smem = memory
    q_full, kv_full = bars
    tiles = block.tiles
    tile = tiles.first
    wrong = thread_sums(zeros(piece_width(block.KEYS, 0))).to(gl.int32)
    phase = tiles.count * 0
    for i in range(tiles.count):
        slot = i & 1
        q = flat(q_smem.index(slot))
        mbarrier.wait(q_full.index(slot), (i >> 1) & 1)
        mbarrier.wait(kv_full.index(0), phase)
        scores = compute_scores(q, flat(k_smem.index(0)), block.KEYS, block.D)
        # The results of the tile before have left the place of the next queries.
        tma_store_wait(0)
        await_warps()
        after = tiles.behind(tile)
        goes_on = i + 1 < tiles.count
        changes = goes_on & after.is_first_of_keys()
        load(q_desc, tiles.q_at(after), q_smem.index(slot ^ 1), q_full.index(slot ^ 1), goes_on)
        load(k_desc, tiles.kv_at(after), k_smem.index(0), kv_full.index(0), changes)
        q_idx, end = block.rows_of(tile)
        weights, m, is_large = block.weights_of(scores, end, EXACT)
        mbarrier.wait(kv_full.index(1), phase)
        acc = issue_products(weights, flat(v_smem.index(0)), block.KEYS, block.DV)
        have_other_weights = None
        if EXACT:
            have_other_weights = is_large
        out, lse, m, l = block.close(tile, acc, weights, m, have_other_weights, q_desc.dtype)
        if block.HAS_RIGHT:
            wrong |= failures(out, is_large, q_idx < tiles.Sq, wrong) << (i & 31)
        store_pieces(out, q, block.DV)
        fence_async_shared()
        await_warps()
        tma_store(o_desc, tiles.q_at(tile), q_smem.index(slot))
        load(v_desc, tiles.kv_at(after), v_smem.index(0), kv_full.index(1), changes)
        block.store_statistics(tile, q_idx, lse, m, l)
        phase = phase ^ changes.to(gl.int32)
        tile = after
    tma_store_wait(0)
    return gl.reduce(gl.reduce(wrong, 1, _either), 0, _either)


@gluon.jit
def second_pass(block, descs, memory, full, wrong):
    """Compute tiles again whose bits are set. Keys and values are loaded for each of them: it
    writes to them."""
    q_desc, k_desc, v_desc, o_desc = descs
    q_smem, k_smem, v_smem = memory
    tiles = block.tiles
    tile = tiles.first
    done = tiles.count * 0
    for i in range(tiles.count):
        if (wrong >> (i & 31)) & 1:
            q = flat(q_smem.index(0))
            fence_async_shared()
            await_warps()
            load(q_desc, tiles.q_at(tile), q_smem.index(0), full)
            load(k_desc, tiles.kv_at(tile), k_smem.index(0), full)
            load(v_desc, tiles.kv_at(tile), v_smem.index(0), full)
            mbarrier.wait(full, done & 1)
            scores = compute_scores(q, flat(k_smem.index(0)), block.KEYS, block.D)
            q_idx, end = block.rows_of(tile)
            weights, m, is_large = block.weights_of(scores, end, True)
            acc = clean_products(weights, end, flat(v_smem.index(0)), block.KEYS, block.DV)
            out, lse, m, l = block.close(tile, acc, weights, m, is_large, q_desc.dtype)
            await_warps()
            store_pieces(out, q, block.DV)
            fence_async_shared()
            await_warps()
            tma_store(o_desc, tiles.q_at(tile), q_smem.index(0))
            block.store_statistics(tile, q_idx, lse, m, l)
            tma_store_wait(0)
            done += 1
        tile = tiles.behind(tile)


@unspecialized(gluon.jit, any_address=("sinks_ptr", "sequence_order_ptr"))
def one_block_kernel(
    q_desc,  # tiles [ROWS, D] of q [B, Hq, Sq, D]
    k_desc,  # all keys of k [B, Hkv, Skv, D]
    v_desc,  # and of v [B, Hkv, Skv, Dv]
    o_desc,  # tiles [ROWS, Dv] of out [B, Hq, Sq, Dv]
    lse_ptr,  # contiguous [B, Hq, Sq] fp32, packed [Tq, Hq]
    statistics_ptr,  # [*lse, 2]
    sinks_ptr,  # [Hq]
    sequence_order_ptr,  # see sequence_order.py
    scale,
    row_stride_b,  # of lse
    row_stride_h,
    row_stride_s,
    shares: Shares,  # of programs in the tiles of a dense call
    heads_of_program,  # of packed sequences
    n_q_tiles,
    Hq,
    heads_per_kv,
    B,
    Sq,
    Skv,
    right,
    keys,  # that are multiplied, one of WIDTHS
    PACKED: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    WIDTHS: gl.constexpr,  # one of packed sequences and under a mask
):
    SCALED: gl.constexpr = SCORES == "scaled"
    if PACKED:
        heads = (Hq, heads_per_kv, heads_of_program)
        work = HeadTiles.of_sequence(sequence_order_ptr, B, heads, WIDTHS[0])
    else:
        work = HeadTiles.of_all(shares, n_q_tiles, Hq, heads_per_kv, Sq, Skv)
    results = Results(
        (lse_ptr, lse_ptr, statistics_ptr, sinks_ptr), row_stride_b, row_stride_h, row_stride_s, Sq
    )
    block = Block(
        work, results, scale, right, SCALED, HAS_RIGHT, HAS_SINKS, columns_of(D), columns_of(DV),
        WIDTHS[0],
    )  # fmt: skip
    # Queries come to one of two places, and the results leave from there.
    q_full = barriers(2, 1)
    kv_full = barriers(2, 1)
    k_smem = allocate_tiles(k_desc, 1)
    v_smem = allocate_tiles(v_desc, 1)
    q_smem = allocate_tiles(q_desc, 2)
    any_tile = work.count > 0
    load(q_desc, work.q_at(work.first), q_smem.index(0), q_full.index(0), any_tile)
    load(k_desc, work.kv_at(work.first), k_smem.index(0), kv_full.index(0), any_tile)
    load(v_desc, work.kv_at(work.first), v_smem.index(0), kv_full.index(1), any_tile)
    descs = (q_desc, k_desc, v_desc, o_desc)
    memory = (q_smem, k_smem, v_smem)
    if len(WIDTHS) == 1:
        wrong = first_pass(block, descs, memory, (q_full, kv_full))
    else:
        for i in gl.static_range(len(WIDTHS)):
            if keys == WIDTHS[i]:
                block_of_width = Block(
                    work, results, scale, right, SCALED, HAS_RIGHT, HAS_SINKS, columns_of(D),
                    columns_of(DV), WIDTHS[i],
                )  # fmt: skip
                first_pass(block_of_width, descs, memory, (q_full, kv_full))
    if HAS_RIGHT:
        again = barriers(1, 3)
        if wrong != 0:
            await_stores(work.count)
            second_pass(block, descs, memory, again.index(0), wrong)
        mbarrier.invalidate(again.index(0))
    for i in gl.static_range(2):
        mbarrier.invalidate(q_full.index(i))
        mbarrier.invalidate(kv_full.index(i))
