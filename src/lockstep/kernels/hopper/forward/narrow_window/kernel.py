"""The forward of narrow windows, in which all scores of a row fit into registers at once.

A program is one warpgroup, and an SM has room for several. It works on a chunk of queries, of which
it keeps all keys and values in shared memory, in tiles of 64 rows (`tiles.py`). The maximum
of a row is known before its first weight, so one pass is enough but for two kinds of rows: with a
maximum too large for `exp2_weights`, or with values that are not finite, in themselves or in what
the row does not see. Tiles that have such rows are computed again at the end of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
)
from lockstep.kernels.hopper.common.pages import PageTable
from lockstep.kernels.hopper.common.pieces import await_all, multiply_all, piece_width
from lockstep.kernels.hopper.common.scores import LOG2E
from lockstep.kernels.hopper.common.shared_memory import barriers
from lockstep.kernels.hopper.common.softmax import thread_sums
from lockstep.kernels.hopper.forward.kernel import (
    ANY_ADDRESS,
    PageNumbers,
    RowStrides,
    SequencePointers,
)
from lockstep.kernels.hopper.forward.narrow_window.chunk import Chunk, send_keys, send_queries
from lockstep.kernels.hopper.forward.narrow_window.memory import (
    STEP,
    allocate_keys,
    allocate_queries,
    log2,
)
from lockstep.kernels.hopper.forward.narrow_window.tiles import (
    clean_products,
    close,
    compute_scores,
    either,
    failures,
    issue_products,
    large,
    mask_scores,
    piece_weights,
    seen_keys,
    store_tile,
    sum_in_order,
    take_queries,
)
from lockstep.kernels.hopper.forward.one_block.rows import row_maxima
from lockstep.kernels.hopper.forward.program import Results
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import await_stores
from lockstep.kernels.hopper.forward.scheduling.schedule import BAD, Schedule
from lockstep.kernels.launch import unspecialized


@aggregate
class Build:
    """What is decided when the kernel is compiled."""

    SCALED: gl.constexpr  # scores are multiplied by a scale that is not positive
    HAS_SINKS: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    KEYS: gl.constexpr
    BEFORE: gl.constexpr
    FROM: gl.constexpr
    STAY: gl.constexpr  # queries do, in shared memory, and results have a place of their own

    @gluon.constexpr_function
    def __init__(self, SCALED, HAS_SINKS, D, DV, KEYS, BEFORE, FROM, STAY):
        self.SCALED = gl.constexpr(SCALED)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.D = gl.constexpr(D)
        self.DV = gl.constexpr(DV)
        self.KEYS = gl.constexpr(KEYS)
        self.BEFORE = gl.constexpr(BEFORE)
        self.FROM = gl.constexpr(FROM)
        self.STAY = gl.constexpr(STAY)

    @gluon.jit
    def final_scores(self, chunk, n, scores, scale):
        """Scores of tile n in their final units, -inf where a row does not see a key."""
        if self.SCALED:
            scores = multiply_all(scores, scale)
        return mask_scores(chunk, n, scores, self.KEYS, self.BEFORE, self.FROM)

    @gluon.jit
    def sinks(self, chunk, results):
        """The sink of each row [ROWS], in natural units."""
        rows: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(self.KEYS, 0)))
        head = chunk.head + (gl.arange(0, ROWS, rows) >> log2(chunk.POSITIONS))
        return gl.load(results.sinks_ptr + head)


@gluon.jit
def first_pass(chunk, results, descs, memory, q_full, sink, numbers, build):
    """Compute all tiles; bit i of the result is set if rows of the i-th of them failed."""
    KEYS: gl.constexpr = build.KEYS
    D: gl.constexpr = build.D
    DV: gl.constexpr = build.DV
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(KEYS, 0)))
    STAY: gl.constexpr = build.STAY
    q_desc, _k_desc, _v_desc, o_desc = descs
    q, o, k, v = memory
    scale, unit, nan_if_bad, o_start = numbers
    first = chunk.first_tile()
    count = chunk.n_tiles()
    wrong = thread_sums(zeros(piece_width(KEYS, 0))).to(gl.int32)
    mbarrier.wait(q_full, 0)
    queries = take_queries(q, KEYS, D, STAY)
    for i in range(count):
        n = first + i
        at = (chunk.first_key(n) - chunk.first_key(first)) // STEP
        if STAY:
            mbarrier.wait(q_full, i & 1)
        scores = compute_scores(queries, k, at, KEYS, D, STAY)
        # The results of the tile before have left their place, or that of the next queries.
        tma_store_wait(0)
        await_warps()
        send_queries(chunk, q_desc, n + 1, q, q_full, D, i + 1 < count)
        scores = build.final_scores(chunk, n, scores, scale)
        m = row_maxima(scores, LAYOUT)
        weights = piece_weights(scores, m, unit, None)
        acc = issue_products(weights, v, at, KEYS, DV)
        sums = sum_in_order(weights)
        is_large = large(m, unit)
        out, lse, m, l = close(await_all(acc), sums, m, unit, sink, None, nan_if_bad, q.dtype)
        wrong |= failures(chunk, n, out, is_large, wrong) << i
        if not STAY:
            # The next queries go to registers, and these results to their place.
            mbarrier.wait(q_full, (i + 1) & 1, pred=i + 1 < count)
            queries = take_queries(q, KEYS, D, STAY)
            await_warps()
        store_tile(chunk, n, results, out, lse, m, l, o, o_desc, o_start, DV)
    tma_store_wait(0)
    return gl.reduce(gl.reduce(wrong, 1, either), 0, either)


@gluon.jit
def second_pass(chunk, results, pages, descs, memory, full, sink, numbers, wrong, build):
    """Compute tiles again whose bits are set. Values are loaded for each of them: it writes to
    them."""
    KEYS: gl.constexpr = build.KEYS
    D: gl.constexpr = build.D
    DV: gl.constexpr = build.DV
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(KEYS, 0)))
    STAY: gl.constexpr = build.STAY
    q_desc, _k_desc, v_desc, o_desc = descs
    q, o, k, v = memory
    scale, unit, nan_if_bad, o_start = numbers
    first = chunk.first_tile()
    done = first * 0
    for i in range(chunk.n_tiles()):
        if (wrong >> i) & 1:
            n = first + i
            fence_async_shared()
            await_warps()
            send_queries(chunk, q_desc, n, q, full, D)
            send_keys(chunk, pages, v_desc, v, full, KEYS, DV)
            mbarrier.wait(full, done & 1)
            at = (chunk.first_key(n) - chunk.first_key(first)) // STEP
            queries = take_queries(q, KEYS, D, STAY)
            scores = compute_scores(queries, k, at, KEYS, D, STAY)
            scores = build.final_scores(chunk, n, scores, scale)
            m = row_maxima(scores, LAYOUT)
            is_large = large(m, unit)
            weights = piece_weights(scores, m, unit, is_large)
            acc = clean_products(
                weights, seen_keys(chunk, n, KEYS, build.BEFORE, build.FROM), v, at, KEYS, DV
            )
            sums = sum_in_order(weights)
            out, lse, m, l = close(acc, sums, m, unit, sink, is_large, nan_if_bad, q.dtype)
            await_warps()
            store_tile(chunk, n, results, out, lse, m, l, o, o_desc, o_start, DV)
            tma_store_wait(0)
            done += 1


@gluon.jit
def attend(chunk, results, pages, descs, memory, full, scale, o_batch_rows, build):
    """A chunk that exists. `full` are the barriers of queries, keys, values, and of all that is
    loaded again."""
    q_desc, k_desc, v_desc, _o_desc = descs
    q, _o, k, v = memory
    q_full, k_full, v_full, again = full
    send_queries(chunk, q_desc, chunk.first_tile(), q, q_full, build.D)
    send_keys(chunk, pages, k_desc, k, k_full, build.KEYS, build.D)
    send_keys(chunk, pages, v_desc, v, v_full, build.KEYS, build.DV)
    unit = scale
    if build.SCALED:
        unit = LOG2E
    sink = None
    if build.HAS_SINKS:
        sink = build.sinks(chunk, results)
    nan_if_bad = gl.where(chunk.len_kv == BAD, float("nan"), 0.0)
    o_start = chunk.q_start + chunk.batch * o_batch_rows
    numbers = (scale, unit, nan_if_bad, o_start)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    wrong = first_pass(chunk, results, descs, memory, q_full, sink, numbers, build)
    if wrong != 0:
        await_stores(chunk.len_q)
        second_pass(chunk, results, pages, descs, memory, again, sink, numbers, wrong, build)


class RowPointers(NamedTuple):
    """Statistics of each row, and the sinks."""

    lse_ptr: Any  # [B, Hq, Sq] fp32
    statistics_ptr: Any  # [*lse, 2]
    sinks_ptr: Any  # [Hq]


class Numbers(NamedTuple):
    """The sizes of `schedule.Schedule`, which has chunks of groups of heads as tiles of heads."""

    order: Any
    n_chunks: Any  # of a head
    groups: Any  # of heads: in all sequences together, or in one of those that are packed
    groups_of_sequence: Any
    groups_per_kv: Any
    B: Any
    Sq: Any
    Skv: Any
    left: Any  # keys of a window beside the diagonal
    right: Any
    kv_batch_rows: Any
    l2_keys: Any


@unspecialized(gluon.jit, any_address=ANY_ADDRESS)
def narrow_window_kernel(
    q_desc,  # boxes [HEADS, POSITIONS, PANEL] of q [B, Hq, Sq, D], or clipped to a sequence
    k_desc,  # boxes [STEP, PANEL] of k [B, Hkv, Skv, D], clipped, or of pages
    v_desc,  # and of v
    o_desc,  # boxes of out, as of q, clipped
    pointers: RowPointers,
    sequences: SequencePointers,
    page_table_ptr,  # [B, ·]
    scale,
    strides: RowStrides,  # of lse
    numbers: Numbers,
    parts,  # of a chunk, for a program each
    o_batch_rows,  # from one batch to the next in a ragged map of out
    page_numbers: PageNumbers,
    LAYOUT: gl.constexpr,
    PAGED: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D: gl.constexpr,  # columns that are multiplied
    DV: gl.constexpr,
    POSITIONS: gl.constexpr,  # queries of a tile
    CHUNK: gl.constexpr,  # queries of a program
    KEYS: gl.constexpr,  # that a tile is multiplied with
    KV_ROWS: gl.constexpr,  # in shared memory
    BEFORE: gl.constexpr,  # of the keys of a tile, all rows see those from BEFORE to FROM
    FROM: gl.constexpr,
    STAY: gl.constexpr,  # queries are multiplied where they are in shared memory
):
    build = Build(SCORES == "scaled", HAS_SINKS, D, DV, KEYS, BEFORE, FROM, STAY)
    schedule = Schedule(numbers, sequences, LAYOUT, True, True, CHUNK, STEP)
    if LAYOUT == "varlen" and PAGED:
        # The kernel that lists the sequences lets this one start before it ends.
        gdc_wait()
    chunk = Chunk.of_program(schedule, parts, POSITIONS)
    lse_ptr, statistics_ptr, sinks_ptr = pointers
    results = Results((lse_ptr, lse_ptr, statistics_ptr, sinks_ptr), *strides, numbers.Sq)
    pages = PageTable(page_table_ptr, *page_numbers, STEP if PAGED else 0)
    q_full = barriers(1, 1)
    kv_full = barriers(2, 1)
    again = barriers(1, 2)
    # Queries come here, and when they are in registers, results leave from here.
    q = allocate_queries(q_desc, D if STAY else max(D, DV))
    o = q
    if STAY:
        o = allocate_queries(q_desc, DV)
    k = allocate_keys(k_desc, KV_ROWS, D)
    v = allocate_keys(v_desc, KV_ROWS, DV)
    if chunk.exists:
        attend(
            chunk, results, pages, (q_desc, k_desc, v_desc, o_desc), (q, o, k, v),
            (q_full.index(0), kv_full.index(0), kv_full.index(1), again.index(0)), scale,
            o_batch_rows, build,
        )  # fmt: skip
    mbarrier.invalidate(q_full.index(0))
    mbarrier.invalidate(kv_full.index(0))
    mbarrier.invalidate(kv_full.index(1))
    mbarrier.invalidate(again.index(0))
