"""The consumer of up to 16 query rows of a KV head: each warp attends to keys of its own.

A product of a warpgroup has 64 rows, whether there are as many or not. Here each warp multiplies 16
rows by itself, with the instructions of GPUs before Hopper, and has a quarter of the keys of every
tile. It has a softmax of its own, (m, l, acc), so that nothing is exchanged from tile to tile. At
the end of a span those of the four warps are folded into the part of the span, first to last.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    gl,
    gluon,
    mma_v2,
    reinterpret,
)
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.head_columns import clear_in_operand
from lockstep.kernels.hopper.decode.nonfinite import add_nonfinite, clean_tile
from lockstep.kernels.hopper.decode.producer import first_columns
from lockstep.kernels.hopper.decode.rows import hides_some, row_bounds
from lockstep.kernels.parts import fold

NARROW_ROWS, FEW_ROWS = gl.constexpr(plan.NARROW_ROWS), gl.constexpr(plan.FEW_ROWS)
# Products of rows and columns, up to which a warp has room for its queries in registers, too.
MOST_PRODUCTS = gl.constexpr(2048)
# Pieces of products of few rows that warps exchange at once.
PIECES_AT_ONCE = gl.constexpr(2)
WARPS = gl.constexpr(4)
# Columns of keys and values that lie side by side.
PIECE = gl.constexpr(plan.COLUMNS)
# Products [WARPS, NARROW_ROWS, ·], and their operands.
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))
# A piece [NARROW_ROWS, PIECE] of a part.
PIECES = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
TILES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SQUARE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# Rows of products of a warp lie in the same banks but for this.
ROWS_APART = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
WARPS_APART = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))


@gluon.constexpr_function
def pieces_at_once(rows, columns):
    """Pieces of products that warps exchange at once: what there is room for."""
    at_once = PIECES_AT_ONCE.value if rows <= FEW_ROWS.value else 1
    return min(columns // PIECE.value, at_once)


@aggregate
class Exchange:
    """Where warps leave their softmax for all others."""

    acc_smem: gl.shared_memory_descriptor  # [pieces at once, WARPS, ROWS, PIECE] fp32
    m_smem: gl.shared_memory_descriptor  # [WARPS, ROWS] fp32
    l_smem: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, acc_smem, m_smem, l_smem):
        self.acc_smem = acc_smem
        self.m_smem = m_smem
        self.l_smem = l_smem

    @gluon.jit
    def create(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """Room for some of COLUMNS columns at once."""
        N: gl.constexpr = pieces_at_once(ROWS, COLUMNS)
        return Exchange(
            gl.allocate_shared_memory(gl.float32, [N, WARPS, ROWS, PIECE], WARPS_APART),
            gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], SQUARE),
            gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], SQUARE),
        )

    @gluon.jit
    def join_sums(self, unit, layout: gl.constexpr):
        """m and l [ROWS] over all warps, in a layout."""
        m = _number(self.m_smem, 0, layout)
        for warp in gl.static_range(1, WARPS):
            m = gl.maximum(m, _number(self.m_smem, warp, layout))
        l = gl.zeros_like(m)
        for warp in gl.static_range(WARPS):
            l = gl.fma(_number(self.l_smem, warp, layout), self.factor(warp, m, unit), l)
        return m, l

    @gluon.jit
    def factor(self, warp: gl.constexpr, m, unit):
        """The factor of a warp's sums relative to m [ROWS]."""
        layout: gl.constexpr = m.type.layout
        own = _number(self.m_smem, warp, layout)
        return gl.exp2((own - gl.where(m == -float("inf"), 0.0, m)) * unit)

    @gluon.jit
    def join_piece(self, i: gl.constexpr, m, unit):
        """Products [ROWS, PIECE] over all warps, of those in place i; m [ROWS]."""
        ROWS: gl.constexpr = self.acc_smem.shape[2]
        shape: gl.constexpr = [self.acc_smem.shape[0] * WARPS, ROWS, PIECE]
        by_warp = reinterpret(self.acc_smem, gl.float32, shape, ROWS_APART)
        whole = gl.zeros([ROWS, PIECE], gl.float32, PIECES)
        for warp in gl.static_range(WARPS):
            factor = gl.expand_dims(self.factor(warp, m, unit), 1) + gl.zeros_like(whole)
            whole = gl.fma(by_warp.index(i * WARPS + warp).load(PIECES), factor, whole)
        return whole


@gluon.jit
def _number(smem, warp: gl.constexpr, layout: gl.constexpr):
    """The numbers [ROWS] of a warp, of shared memory [WARPS, ROWS]."""
    return reinterpret(smem, gl.float32, smem.shape, FLAT).index(warp).load(layout)


@gluon.jit
def join_columns(pieces):
    """One, two or four pieces [ROWS, ·] side by side; three with one of 0."""
    if len(pieces) == 3:
        pieces = pieces + (gl.zeros_like(pieces[0]),)  # noqa: RUF005
    if len(pieces) == 1:
        return pieces[0]
    else:  # noqa: RET505, Gluon would go on and return both
        pairs = ()
        for i in gl.static_range(len(pieces) // 2):
            both = gl.join(pieces[2 * i], pieces[2 * i + 1]).permute((0, 2, 1))
            pairs = pairs + (both.reshape([both.shape[0], 2 * both.shape[2]]),)  # noqa: RUF005
        return join_columns(pairs)


@gluon.jit
def query_piece(q_smem, piece: gl.constexpr):
    """A piece of the query rows as left operands [WARPS, NARROW_ROWS, PIECE], all alike."""
    N: gl.constexpr = q_smem.shape[0] // NARROW_ROWS
    shape: gl.constexpr = [q_smem.shape[1] // PIECE * N, 1, NARROW_ROWS, PIECE]
    q = reinterpret(q_smem, q_smem.dtype, shape, TILES).index(piece * N).load(LEFT)
    q, _ = gl.broadcast(q, gl.full([WARPS, NARROW_ROWS, PIECE], 0.0, q_smem.dtype, LEFT))
    return q


@gluon.jit
def left_operands(q_smem, D: gl.constexpr, ROWS: gl.constexpr):
    """`query_piece` for each piece of D columns; none where registers are full of products of ROWS
    rows."""
    operands = ()
    if stay(ROWS, D):
        for piece in gl.static_range(D // PIECE):
            operands = operands + (query_piece(q_smem, piece),)  # noqa: RUF005, Gluon does not unpack
    return operands


@gluon.constexpr_function
def stay(rows, columns):
    """Whether queries stay in registers from tile to tile."""
    return rows * columns <= MOST_PRODUCTS.value


@gluon.jit
def piece_of(tiles, i, piece: gl.constexpr):
    """Where a piece of the columns of the i-th tile is, [WARPS, keys of a warp, PIECE]."""
    N: gl.constexpr = first_columns(tiles.D) // PIECE
    KEYS: gl.constexpr = tiles.BLOCK_KV // WARPS
    if piece < N:
        shape: gl.constexpr = [tiles.ring.STAGES * N, WARPS, KEYS, PIECE]
        pieces = reinterpret(tiles.boxes_smem, tiles.boxes_smem.dtype, shape, TILES)
        return pieces.index(tiles.ring.slot(i) * N + piece)
    else:  # noqa: RET505, Gluon would go on and return both
        shape: gl.constexpr = [tiles.ring.STAGES, WARPS, KEYS, PIECE]
        pieces = reinterpret(tiles.rest_smem, tiles.rest_smem.dtype, shape, TILES)
        return pieces.index(tiles.ring.slot(i))


@gluon.jit
def scores_of(q, q_smem, k, i, HEAD_DIM: gl.constexpr):
    """Products [WARPS, NARROW_ROWS, keys of a warp] of all rows with the keys of the i-th tile."""
    zero = gl.zeros([WARPS, NARROW_ROWS, k.BLOCK_KV // WARPS], gl.float32, PRODUCTS)
    s = zero
    for piece in gl.static_range(k.D // PIECE):
        keys = piece_of(k, i, piece).permute((0, 2, 1)).load(RIGHT)
        keys = clear_in_operand(keys, piece * PIECE, HEAD_DIM)
        own = q[piece] if len(q) > 0 else query_piece(q_smem, piece)
        # Sums of their own: each product waits for those before it in its sum.
        s += mma_v2(own, keys, zero)
    return s


@gluon.jit
def computed_rows(s, N: gl.constexpr):
    """The rows of scores [WARPS, NARROW_ROWS, ·] that are computed: the first 8, which are the
    upper one of the two that a thread has; or all."""
    if N < NARROW_ROWS:
        s = s.reshape([WARPS, 2, NARROW_ROWS // 2, s.shape[2]]).permute((0, 2, 3, 1))
        return s.split()[0]
    else:  # noqa: RET505
        return s


@gluon.jit
def is_seen(sizes, first_key, bounds, s):
    """Which rows see which keys of a tile, as s [WARPS, ROWS, keys of a warp] has them."""
    of_warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout))
    of_keys: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, s.type.layout))
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, of_warps), 1), 2)
    key = gl.expand_dims(gl.expand_dims(gl.arange(0, s.shape[2], of_keys), 0), 1)
    key = first_key + warp * s.shape[2] + key
    begin, end = bounds
    seen = key < gl.expand_dims(gl.expand_dims(end, 0), 2)
    if sizes.HAS_LEFT:
        seen = seen & (key >= gl.expand_dims(gl.expand_dims(begin, 0), 2))
    return seen


@gluon.jit
def softmax_step(rows, sizes, s, first_key, bounds, m, l):
    """Weights of a tile of scores; the new (m, l), and what sums so far weigh under it."""
    s = rows.finish_scores(s)
    if hides_some(sizes, first_key, bounds[2]):
        s = gl.where(is_seen(sizes, first_key, bounds[0], s), s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 2))
    # exp2(-inf - -inf) would be NaN: measured from 0, a row without keys weighs nothing.
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.exp2((m - origin) * rows.unit)
    p = gl.exp2((s - gl.expand_dims(origin, 2)) * rows.unit)
    return p, m_new, gl.fma(l, alpha, gl.sum(p, 2)), alpha


@gluon.jit
def no_products(D: gl.constexpr, ROWS: gl.constexpr):
    """Products of no keys, in pieces [WARPS, PIECE, ROWS]."""
    return (gl.zeros([WARPS, PIECE, ROWS], gl.float32, PRODUCTS),) * (D // PIECE)


@gluon.jit
def times_values(p, alpha, acc, v, i):
    """Pieces of products times alpha [WARPS, ROWS] of their rows, and with weights p [WARPS, ROWS,
    keys of a warp] of the i-th tile of values added. The values are the left operand: as many rows
    of products as values have columns, and no more columns than there are query rows."""
    p = gl.convert_layout(p.to(v.boxes_smem.dtype).permute((0, 2, 1)), RIGHT)
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, PRODUCTS)), 1)
    sums = ()
    for piece in gl.static_range(v.D // PIECE):
        values = piece_of(v, i, piece).permute((0, 2, 1)).load(LEFT)
        sums = sums + (mma_v2(values, p, acc[piece] * alpha),)  # noqa: RUF005
    return sums


@gluon.jit
def attend_span(rows, sizes, q, q_smem, k, v, seen, tile, end, bounds, empty_m, empty_l):
    """The tiles [tile, end) of a span: m and l [WARPS, ROWS], pieces of products, whether values
    that are not finite were left out, and the tiles seen so far."""
    N: gl.constexpr = empty_m.shape[1]
    of_any = bounds[1]
    m = empty_m
    l = gl.zeros_like(m) + empty_l
    acc = no_products(v.D, m.shape[1])
    is_nonfinite = tile * 0
    for t in range(tile, end):
        first_key = t * sizes.BLOCK_KV
        k.ring.wait_full(seen)
        s = computed_rows(scores_of(q, q_smem, k, seen, rows.HEAD_DIM), N)
        k.ring.release(seen)
        p, m, l, alpha = softmax_step(rows, sizes, s, first_key, bounds, m, l)
        v.ring.wait_full(seen)
        if hides_some(sizes, first_key, bounds[2]):
            found = clean_tile(v, seen, of_any[0] - first_key, of_any[1] - first_key)
            is_nonfinite = is_nonfinite | found
        acc = times_values(p, alpha, acc, v, seen)
        v.ring.release(seen)
        seen += 1
    return m, l, acc, is_nonfinite, seen


@gluon.jit
def join_warps(exchange, m, l, acc, unit):
    """(m, l, acc) of a part, [ROWS] and [ROWS, Dv], from those of the warps."""
    N: gl.constexpr = exchange.acc_smem.shape[0]
    pieces = ()
    for first in gl.static_range(0, len(acc), N):
        # Of what was there before, warps that are behind may still read.
        await_warps()
        if first == 0:
            exchange.m_smem.store(m)
            exchange.l_smem.store(l)
        for i in gl.static_range(N):
            if first + i < len(acc):
                exchange.acc_smem.index(i).store(acc[first + i].permute((0, 2, 1)))
        await_warps()
        of_pieces, _l = exchange.join_sums(unit, gl.SliceLayout(1, PIECES))
        for i in gl.static_range(N):
            if first + i < len(acc):
                pieces = pieces + (exchange.join_piece(i, of_pieces, unit),)  # noqa: RUF005
    joined = join_columns(pieces)
    m, l = exchange.join_sums(unit, gl.SliceLayout(1, joined.type.layout))
    return m, l, joined


@gluon.jit
def attend_narrow_run(rows, sizes, run, k, v, queries, exchange, cache, seen):
    """A run of few rows, as many as the exchange has; returns the tiles seen so far."""
    N: gl.constexpr = exchange.m_smem.shape[1]
    queries.load(rows, sizes, run, 0, NARROW_ROWS)
    q = left_operands(queries.tile, k.D, N)
    zero = gl.zeros([WARPS, NARROW_ROWS, k.BLOCK_KV // WARPS], gl.float32, PRODUCTS)
    of_scores: gl.constexpr = computed_rows(zero, N).type.layout
    bounds = row_bounds(rows, sizes, run, gl.SliceLayout(0, gl.SliceLayout(2, of_scores)), N)
    empty_m = gl.full([WARPS, N], -float("inf"), gl.float32, gl.SliceLayout(2, of_scores))
    # Whatever its rows see, a sequence whose length is wrong is NaN.
    empty_l = gl.where(run.kv_len < 0, float("nan"), 0.0)
    folded_acc = join_columns((gl.zeros([N, PIECE], gl.float32, PIECES),) * (v.D // PIECE))
    of_rows: gl.constexpr = gl.SliceLayout(1, folded_acc.type.layout)
    folded_m = gl.full([N], -float("inf"), gl.float32, of_rows)
    folded_l = gl.full([N], 0.0, gl.float32, of_rows) + empty_l
    span = run.first_span
    slot = gl.where(run.slot < 0, -1 - run.slot, run.slot)
    tile = run.begin
    has_more = True
    while has_more:
        end = gl.minimum((divide(tile, run.span) + 1) * run.span, run.end)
        m, l, acc, is_nonfinite, seen = attend_span(
            rows, sizes, q, queries.tile, k, v, seen, tile, end, bounds, empty_m, empty_l
        )
        m, l, acc = join_warps(exchange, m, l, acc, rows.unit)
        if is_nonfinite != 0:
            acc = add_nonfinite(rows, sizes, cache, run, tile, end, bounds[0], acc)
        if run.first_span > 0:
            rows.store_part(sizes, run, slot, span, m, l, acc)
        else:
            folded_m, folded_l, folded_acc = fold(
                folded_m, folded_l, folded_acc, m, l, acc, rows.unit
            )
        span += 1
        tile = end
        has_more = tile < run.end
    if run.first_span == 0:
        if run.slot < 0:
            rows.store_results(sizes, run, folded_m, folded_l, folded_acc)
        else:
            rows.store_part(sizes, run, slot, span - 1, folded_m, folded_l, folded_acc)
    return seen
