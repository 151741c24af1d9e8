"""The forward of heads whose keys are one block, as in cross-attention to a prompt.

A program is one warpgroup. It loads the keys and values of a head once, and then works on one tile
of 64 queries after the other; an SM has room for four programs. Keys are multiplied in steps of 16.
Every row sees every key, and its maximum is known before its first weight. So no row has to be
computed again, as in `second_pass.py`, and the code of a tile is short.

Packed sequences have lengths that only the device knows. A program has one sequence and head then,
and those with more keys than are multiplied are left to the kernel for all calls
(`scheduling/sequence_order.py`).

A row has the bits that `consumer.py` would give it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, add_product, zeros
from lockstep.kernels.hopper.common.coordinates import coordinates
from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
)
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    empty_sums,
    n_pieces,
    piece_of,
    piece_start,
    piece_width,
    scale_rows,
)
from lockstep.kernels.hopper.common.scores import LOG2E
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers
from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    close_rows,
    hide_from,
    max_rounding_error,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.forward.few_keys import Work
from lockstep.kernels.hopper.forward.program import Results
from lockstep.kernels.hopper.forward.scheduling.schedule import ORDER_HEAD
from lockstep.kernels.launch import unspecialized

columns_of = gluon.constexpr_function(columns)


@gluon.jit
def flat(tile):
    """A tile [1, 1, 1, rows, columns] in shared memory as [rows, columns]."""
    return tile.reshape([tile.shape[3], tile.shape[4]])


@gluon.jit
def keys_of(tile, KEYS: gl.constexpr, p: gl.constexpr):
    """The p-th piece of the first KEYS rows of a tile."""
    WIDTH: gl.constexpr = piece_width(KEYS, p)
    return tile if tile.shape[0] == WIDTH else tile.slice(piece_start(KEYS, p), WIDTH, dim=0)


@gluon.jit
def compute_scores(q, k, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Tiles q [ROWS, ·] and k [·, ·], transposed, multiplied over COLUMNS columns: [ROWS, KEYS] in
    pieces."""
    scores = ()
    for p in gl.static_range(n_pieces(KEYS)):
        keys = keys_of(k, KEYS, p)
        acc = zeros(piece_width(KEYS, p))
        for c in gl.static_range(n_pieces(COLUMNS)):
            right = piece_of(keys, COLUMNS, c).permute((1, 0))
            acc = warpgroup_mma(piece_of(q, COLUMNS, c), right, acc, use_acc=c > 0, is_async=True)
        scores = scores + (acc,)  # noqa: RUF005, Gluon does not unpack
    return await_all(scores)


@gluon.jit
def issue_products(weights, v, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Pieces of weights [ROWS, KEYS] times values [·, ·]: pieces [ROWS, COLUMNS], under way."""
    sums = empty_sums(COLUMNS)
    for p in gl.static_range(n_pieces(KEYS)):
        values = keys_of(v, KEYS, p)
        rounded = round_pairs(weights[p], v.dtype)
        added = ()
        for c in gl.static_range(n_pieces(COLUMNS)):
            acc = add_product(sums[c], rounded, piece_of(values, COLUMNS, c))
            added = added + (acc,)  # noqa: RUF005
        sums = added
    return sums


@gluon.jit
def thread_maxima(s):
    """`thread_sums`, but the largest."""
    pairs = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    return gl.max(gl.max(pairs, 3), 1)


@gluon.jit
def row_maxima(scores, LAYOUT: gl.constexpr):
    """The largest score of each row [ROWS] in all pieces."""
    top = thread_maxima(scores[0])
    for p in gl.static_range(1, len(scores)):
        of_piece = thread_maxima(scores[p])
        top = gl.maximum(top, gl.convert_layout(of_piece, top.type.layout, assert_trivial=True))
    return gl.convert_layout(gl.max(top, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def halves(x):
    """x [ROWS, n, 4] as two [ROWS, n / 2, 4]."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)).split()


@gluon.jit
def add_one(l, x):
    """l [ROWS, 4] + x [ROWS, 1, 4]."""
    x = x.reshape([x.shape[0], 4])
    return l + gl.convert_layout(x, l.type.layout, assert_trivial=True)


@gluon.jit
def add_in_order(l, x):
    """l [ROWS, 4] + x [ROWS, n, 4], one after the other, where n is 2 or 4."""
    left, right = halves(x)
    if x.shape[1] == 4:
        first, second = halves(left)
        l = add_one(add_one(l, first), second)
        first, second = halves(right)
        return add_one(add_one(l, first), second)
    else:  # noqa: RET505, Gluon would go on and return both
        return add_one(add_one(l, left), right)


@gluon.jit
def sum_pieces(weights):
    """`thread_sums` of all pieces, in the order that it has in one block: pairs of columns, one
    after the other."""
    l = thread_sums(weights[0])
    for p in gl.static_range(1, len(weights)):
        w = weights[p]
        pairs = w.reshape([w.shape[0], w.shape[1] // 8, 4, 2])
        l = add_in_order(l, gl.sum(pairs, 3))
    return l


@gluon.jit
def weights_of(s, origin, offset, unit):
    """exp2((s - origin)·unit + offset) of scores [ROWS, ·]. Where origin [ROWS] is 0, these are the
    bits of `exp2_weights`, and where offset is, of `exp2_weights_exact`."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    s = s - gl.expand_dims(gl.convert_layout(origin, rows, assert_trivial=True), 1)
    offset = gl.expand_dims(gl.convert_layout(offset, rows, assert_trivial=True), 1)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    return gl.exp2(gl.fma(s, zero + unit, zero + offset))


@gluon.jit
def weigh(scores, Skv, scale, unit, SCALED: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pieces of weights [ROWS, KEYS], their maximum [ROWS], and whether it is too large for
    `exp2_weights`."""
    LAST: gl.constexpr = n_pieces(KEYS) - 1
    masked = ()
    for p in gl.static_range(LAST + 1):
        s = scores[p]
        if SCALED:
            s = s * scale
        if p == LAST:
            end = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s.type.layout))
            s = hide_from(s, end + (Skv - piece_start(KEYS, p)))
        masked = masked + (s,)  # noqa: RUF005
    m = row_maxima(masked, LAYOUT)
    is_large = (gl.abs(m) * unit >= LARGE_MAX) & (m > -float("inf"))
    origin = gl.where(is_large, m, 0.0)
    offset = gl.where(is_large | (m == -float("inf")), 0.0, -m * unit)
    weights = ()
    for p in gl.static_range(LAST + 1):
        weights = weights + (weights_of(masked[p], origin, offset, unit),)  # noqa: RUF005
    return weights, m, is_large


@gluon.jit
def close(acc, weights, m, is_large, unit, sink, dtype: gl.constexpr):
    """Pieces of out, lse, m and l, as `program.normalize` has them; acc is under way."""
    layout: gl.constexpr = m.type.layout
    sums = sum_pieces(weights)
    error = gl.where(is_large, 0.0, max_rounding_error(m, unit))
    factor = gl.exp2(-error)
    top = gl.exp2(error)
    l = gl.convert_layout(gl.sum(sums, 1), layout, assert_trivial=True)
    r = gl.where(l == 0.0, l, l + (top.to(dtype).to(gl.float32) - top))
    if dtype == gl.bfloat16 and sink is None:
        l = gl.convert_layout(gl.sum(scale_rows(sums, factor), 1), layout, assert_trivial=True)
        factor = gl.full([ROWS], 1.0, gl.float32, layout)
    acc = await_all(acc)
    return close_rows(acc, m, l, r, factor, unit, sink, 0.0, BRIEF=True)


@gluon.jit
def packed_work(order_ptr, B, Hq, heads_per_kv, KEYS: gl.constexpr):
    """The tiles of a program that has one packed sequence and head: none, if the sequence has more
    than KEYS keys, or none."""
    place = gl.program_id(0) // Hq
    head = gl.program_id(0) % Hq
    at = order_ptr + ORDER_HEAD + (B + 1) + place * 4
    len_q = gl.load(at + 1)
    len_kv = gl.load(at + 3)
    none = B * 0
    count = gl.where((len_kv > 0) & (len_kv <= KEYS), gl.cdiv(len_q, ROWS), 0)
    return Work(
        none, head, head // heads_per_kv, none, count, gl.load(at), gl.load(at + 2), len_q, len_kv
    )


@gluon.jit
def load(desc, at, tile, full, pred=True):
    """Send a tile to shared memory."""
    mbarrier.expect(full, desc.block_type.nbytes, pred=pred)
    tma_load(desc, at, full, tile, pred=pred)


@gluon.jit
def q_at(work, row, PACKED: gl.constexpr):
    """Where a row of queries lies in their tensor map, and in that of the results."""
    return coordinates(work.batch, work.q_start, work.Sq, work.head, row, 0, PACKED)


@gluon.jit
def kv_at(work, PACKED: gl.constexpr):
    """Where the keys begin in their tensor map, and the values in theirs."""
    return coordinates(work.batch, work.kv_start, work.Skv, work.kv_head, 0, 0, PACKED)


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
    n_q_tiles,
    tiles_per_program,
    Hq,
    heads_per_kv,
    B,
    Sq,
    Skv,
    PACKED: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    KEYS: gl.constexpr,  # that are multiplied
):
    SCALED: gl.constexpr = SCORES == "scaled"
    DV_COLUMNS: gl.constexpr = columns_of(DV)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator(piece_width(KEYS, 0)))
    if PACKED:
        work = packed_work(sequence_order_ptr, B, Hq, heads_per_kv, KEYS)
    else:
        work = Work.of_program(n_q_tiles, tiles_per_program, Hq, heads_per_kv, Sq, Skv)
    results = Results(
        (lse_ptr, lse_ptr, statistics_ptr, sinks_ptr), row_stride_b, row_stride_h, row_stride_s, Sq
    )
    # Queries come to one of two places, and the results leave from there.
    q_full = barriers(2, 1)
    kv_full = barriers(2, 1)
    k_smem = allocate_tiles(k_desc, 1)
    v_smem = allocate_tiles(v_desc, 1)
    q_smem = allocate_tiles(q_desc, 2)
    any_tile = True
    if PACKED:
        any_tile = work.count > 0
    load(q_desc, q_at(work, work.q_idx, PACKED), q_smem.index(0), q_full.index(0), any_tile)
    load(k_desc, kv_at(work, PACKED), k_smem.index(0), kv_full.index(0), any_tile)
    load(v_desc, kv_at(work, PACKED), v_smem.index(0), kv_full.index(1), any_tile)
    unit = scale
    if SCALED:
        unit = LOG2E
    sink = None
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + work.head)
    mbarrier.wait(kv_full.index(0), 0, pred=any_tile)
    mbarrier.wait(kv_full.index(1), 0, pred=any_tile)
    for i in range(work.count):
        tile = work.tile(i)
        slot = i & 1
        q = flat(q_smem.index(slot))
        mbarrier.wait(q_full.index(slot), (i >> 1) & 1)
        scores = compute_scores(q, flat(k_smem.index(0)), KEYS, columns_of(D))
        # The results of the tile before have left the place of the next queries.
        tma_store_wait(0)
        await_warps()
        at = q_at(work, tile.q_idx + ROWS, PACKED)
        load(q_desc, at, q_smem.index(slot ^ 1), q_full.index(slot ^ 1), i + 1 < work.count)
        weights, m, is_large = weigh(scores, work.Skv, scale, unit, SCALED, KEYS, LAYOUT)
        acc = issue_products(weights, flat(v_smem.index(0)), KEYS, DV_COLUMNS)
        out, lse, m, l = close(acc, weights, m, is_large, unit, sink, q_desc.dtype)
        for c in gl.static_range(n_pieces(DV_COLUMNS)):
            piece_of(q, DV_COLUMNS, c).store(out[c].to(q_desc.dtype))
        fence_async_shared()
        tma_store(o_desc, q_at(work, tile.q_idx, PACKED), q_smem.index(slot))
        q_idx = tile.q_idx + gl.arange(0, ROWS, LAYOUT)
        results.store_statistics(results.row(tile, q_idx), lse, m, l, q_idx < work.Sq)
    tma_store_wait(0)
    for i in gl.static_range(2):
        mbarrier.invalidate(q_full.index(i))
        mbarrier.invalidate(kv_full.index(i))
