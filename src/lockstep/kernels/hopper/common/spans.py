"""Query-invariant builds: the keys of a row in spans, each summed by itself.

A *span* is SPAN blocks of keys, counted from the first key of the sequence. At its end it is a part
of the row's softmax, and is folded into the total of the spans before. So a row has the same bits
wherever its spans are computed: here one after another, in the decode kernel by several programs.

With a *fixed maximum* (bf16) all weights of a row are relative to one number, which each program
can find out by itself: the maximum of the FIRST keys, aligned, with which the row begins. Then
parts are summed as they are. Only if a weight would be too large does a span take a maximum of its
own. The first pass of the forward does not look for that: sums tell it, and the second pass does.
With a running maximum (fp16) each span has its own, and parts are rescaled where they are folded.

A row that sees nothing of a span has an empty part, which changes no bit of its total.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common import query_invariance
from lockstep.kernels.hopper.common.exact_spans import (
    end_factors,
    settle_in_span,
    span_bar,
    times_factors,
)
from lockstep.kernels.hopper.common.exact_weights import first_offset
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    max_rounding_error,
    raise_maximum,
    thread_sums,
)
from lockstep.kernels.hopper.common.thread_numbers import per_weight

FIRST = gl.constexpr(query_invariance.FIRST)
# A row whose sum reaches this in the first pass is computed again, and one whose maximum is as
# large as that.
SPAN_OVERFLOW = gl.constexpr(2.0**60)
SPAN_LARGE_MAX = gl.constexpr(4194304.0 - 256.0)
# In the second pass, and in the decode kernel, a row takes a later maximum if a weight would exceed
# 2 to this power. Rows that the first pass does not mark have no such weight.
RISE = gl.constexpr(62.0)
# Of what weights are rounded to in `first_sum` this is a multiple: 2^-11.
WHOLE = gl.constexpr(4096.0)


@gluon.jit
def empty_total(m, l, acc):
    """The total of no spans, as `fold_span` takes it: m and error; sums l and residue, products."""
    none = gl.zeros_like(m)
    zero = gl.zeros_like(l)
    return (none - float("inf"), none), (zero, zero, gl.zeros_like(acc))


@gluon.jit
def first_maximum(s):
    """The maximum [ROWS] of the FIRST columns of scores [ROWS, BLOCK_KV]."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    return gl.convert_layout(gl.max(first_columns(s), 1), rows)


@gluon.jit
def first_columns(x):
    """The FIRST columns of x [ROWS, BLOCK_KV]."""
    for _ in gl.static_range(_halvings(x.shape[1])):
        x, _right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return x


@gluon.jit
def first_sum(weights):
    """The sum [ROWS] of the weights [ROWS, ·] of the FIRST keys, up to 1 each, of which others are
    0: of whole multiples of 2^-11, so that it is the same in any order."""
    return gl.sum((weights + WHOLE) - WHOLE, 1)


@gluon.jit
def bar_of_rows(first, begin, end, l):
    """`span_bar` of rows with this `first_sum` [ROWS] that see the keys [begin, end)."""
    return span_bar(first, end - gl.maximum(begin, 0), l)


@gluon.constexpr_function
def _halvings(columns):
    return (columns // FIRST.value).bit_length() - 1


@gluon.jit
def end_of_first(row_begin):
    """The key after the FIRST ones, aligned, among which key `row_begin` [ROWS] is."""
    return (gl.maximum(row_begin, 0) // FIRST + 1) * FIRST


@gluon.jit
def row_sums(m, l, residue):
    """Sums l and r [ROWS], with the layout of m, of a total whose threads have l and residue
    [ROWS, 4]."""
    layout: gl.constexpr = m.type.layout
    r = gl.convert_layout(gl.sum(l + residue, 1), layout)
    return gl.convert_layout(gl.sum(l, 1), layout), r


@gluon.jit
def end_of_span(m, residue, scale, FIXED_MAX: gl.constexpr, dtype: gl.constexpr):
    """The residue [ROWS, 4] of a span that ended, and the error in the exponents of its weights."""
    error = weight_error(m, scale)
    if not FIXED_MAX:
        # The weight of the maximum is known: it is what rounding m·scale makes of 1. Each of four
        # threads has a quarter of the difference.
        top = gl.exp2(error)
        rounding = (top.to(dtype).to(gl.float32) - top) * 0.25
        rounding = gl.where(m == -float("inf"), 0.0, rounding)
        residue = _each(rounding, residue)
    return residue, error


@gluon.jit
def weight_error(m, scale):
    """The error in the exponents of `span_weights`."""
    error = max_rounding_error(m, scale)
    return gl.where(gl.abs(m) * scale >= LARGE_MAX, 0.0, error)


@gluon.jit
def span_weights(s, m, scale):
    """`exp2_weights`, but right for scores of any size; the same bits where these are not large."""
    offset = gl.where(m == -float("inf"), 0.0, -m * scale)
    return _weights_with_offset(s, m, gl.expand_dims(offset, 1), scale)


@gluon.jit
def _weights_with_offset(s, m, offset, scale):
    """exp2(s·scale + offset), less what is missing in the offset of a large m."""
    missing = max_rounding_error(m, scale)
    missing = gl.where(gl.abs(m) * scale >= LARGE_MAX, missing, 0.0)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    exponents = gl.fma(s, zero + scale, zero + offset)
    return gl.exp2(exponents - gl.expand_dims(missing, 1))


@gluon.jit
def begin_span(m, l, scale):
    """Sums of a span without a block: l [ROWS, 4], and what is beside it, offset and residue, of
    `exact_spans.py`."""
    zero = gl.zeros_like(l)
    return zero, (first_offset(m, l, scale), zero)


@gluon.jit
def weights_in_span(s, m, l, beside, bar, scale):
    """Weights of a block with scores `s`, with a fixed maximum; m [ROWS], l and what is beside it
    [ROWS, 4] with that block, and factors [ROWS, 4] for what was multiplied before.

    Rows take a new maximum only where a weight would be too large, and with it its offset. Where
    none does, this is what the first pass of the forward does."""
    offset, residue = beside
    before = m
    rises = (m == -float("inf")) | ((gl.max(s, 1) - m) * scale > RISE)
    m, alpha = raise_maximum(s, m, scale, rises)
    rose = _each(gl.where(m != before, 1.0, 0.0), l) > 0.0
    alphas = times_factors(_each(alpha, l), end_factors(offset, before, scale))
    alphas = gl.where(rose, alphas, 1.0)
    offset = gl.where(rose, first_offset(m, l, scale), offset)
    residue = times_factors(residue, alphas)
    l = times_factors(l, alphas)
    weights = _weights_with_offset(s, m, per_weight(offset, s), scale)
    part = thread_sums(weights)
    l, offset, residue, factors = settle_in_span(
        weights, part, l, gl.maximum(l, bar), offset, residue, None
    )
    return weights, m, l, (offset, residue), times_factors(alphas, factors)


@gluon.jit
def end_exact_span(m, l, beside, scale):
    """l and residue [ROWS, 4] of a span that ended, without the offset, and factors that do the
    same for its products."""
    offset, residue = beside
    factors = end_factors(offset, m, scale)
    return times_factors(l, factors), times_factors(residue, factors), factors


@gluon.jit
def mark(m, l, scale):
    """l [ROWS], NaN where the first pass must not decide."""
    is_large = (gl.abs(m) * scale >= SPAN_LARGE_MAX) & (m > -float("inf"))
    # All of the FIRST keys may have scores of -inf.
    is_large = is_large | ((m == -float("inf")) & (l > 0.0))
    return gl.where(is_large | ((l < SPAN_OVERFLOW) == 0), float("nan"), l)


@gluon.jit
def fold_maxima(total_m, total_error, m, error, scale):
    """m and error of a total with one more span, and by what sums so far, and those of the span,
    are multiplied [ROWS]: exactly 1 where they have the same m."""
    m_new = gl.maximum(total_m, m)
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    error_new = gl.where(m > total_m, error, total_error)
    scales = scale + gl.zeros_like(m)
    keep = gl.exp2(gl.fma(total_m - origin, scales, error_new - total_error))
    add = gl.exp2(gl.fma(m - origin, scales, error_new - error))
    return m_new, error_new, keep, add


@gluon.jit
def fold_sums(total, keep, part, add):
    """Sums [ROWS, ·] of a total, a tuple, with those of one more span."""
    folded = ()
    for i in gl.static_range(len(part)):
        x = gl.fma(total[i], _each(keep, part[i]), part[i] * _each(add, part[i]))
        folded = folded + (x,)  # noqa: RUF005, Gluon does not unpack
    return folded


@gluon.jit
def fold_span(maxima, total, m, error, part, scale):
    """m and error, and the sums [ROWS, ·], a tuple, of a total with one more span."""
    m, error, keep, add = fold_maxima(maxima[0], maxima[1], m, error, scale)
    return (m, error), fold_sums(total, keep, part, add)


@gluon.jit
def _each(x, like):
    """x [ROWS] for each number of `like` [ROWS, ·]."""
    rows: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.expand_dims(gl.convert_layout(x, rows), 1) + gl.zeros_like(like)
