"""Query-invariant builds: the keys of a row in spans, each from a state of its own.

A *span* is SPAN blocks of keys, counted from the first key of the sequence. Within a span a row is
computed as in other builds: the first block it sees has its maximum, and residues start from 0. At
its end the span is a part of the row's softmax, and is folded into the total of the spans before.
So a row has the same bits wherever its spans are computed: here one after another, in the decode
kernel by several programs.

A row that sees nothing of a span has an empty part, which changes no bit of its total.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import empty_sums
from lockstep.kernels.hopper.common.softmax import (
    LARGE_MAX,
    max_rounding_error,
    raise_maximum,
)

# A span whose sum reaches this in the first pass has its row computed again, and one whose maximum
# is as large as that.
SPAN_OVERFLOW = gl.constexpr(2.0**60)
SPAN_LARGE_MAX = gl.constexpr(4194304.0 - 256.0)
# In the second pass, and in the decode kernel, a row takes a later maximum if a weight would exceed
# 2 to this power. Rows that the first pass does not mark have no such weight.
RISE = gl.constexpr(62.0)


@gluon.jit
def empty_sums_of_spans(m):
    """What `fold_sums` returns of no spans; `m` [ROWS] has the layout of rows."""
    zero = gl.full([ROWS], 0.0, gl.float32, m.type.layout)
    return zero - float("inf"), zero, zero, zero + 1.0, zero


@gluon.jit
def empty_total(m, COLUMNS: gl.constexpr):
    """The total of no spans: sums, and products of all columns."""
    return empty_sums_of_spans(m), empty_sums(COLUMNS)


@gluon.jit
def sums_of_span(m, l, residue, scale, dtype: gl.constexpr):
    """Of a span that ended: its sums l and r [ROWS], and what the exponents of its weights are off
    by. `l` and `residue` [ROWS, 4] are those of threads."""
    error = max_rounding_error(m, scale)
    error = gl.where(gl.abs(m) * scale >= LARGE_MAX, 0.0, error)
    r = l
    if residue is not None:
        r = l + residue
    r = gl.convert_layout(gl.sum(r, 1), m.type.layout)
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    # The weight of the maximum is known: it is what rounding m·scale makes of 1.
    top = gl.exp2(error)
    r = gl.where(l == 0.0, l, r + (top.to(dtype).to(gl.float32) - top))
    return l, r, error


@gluon.jit
def span_weights(s, m, scale):
    """`exp2_weights`, but right for scores of any size; the same bits where these are not large."""
    offset = gl.where(m == -float("inf"), 0.0, -m * scale)
    missing = max_rounding_error(m, scale)
    missing = gl.where(gl.abs(m) * scale >= LARGE_MAX, missing, 0.0)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    exponents = gl.fma(s, zero + scale, zero + gl.expand_dims(offset, 1))
    return gl.exp2(exponents - gl.expand_dims(missing, 1))


@gluon.jit
def raise_in_span(s, m, l, residue, scale, FIXED_MAX: gl.constexpr):
    """m [ROWS] for a block with scores `s`, and the factor alpha [ROWS] for what was summed before;
    residue [ROWS, 4] multiplied by it, and the sums with which `add_residue` compares.

    With a fixed maximum, rows take a new one where a weight would be too large, and where they see
    their first key."""
    rises = True
    if FIXED_MAX:
        rises = (m == -float("inf")) | ((gl.max(s, 1) - m) * scale > RISE)
    m, alpha = raise_maximum(s, m, scale, rises)
    zero = gl.zeros_like(residue)
    of_threads: gl.constexpr = gl.SliceLayout(1, residue.type.layout)
    alphas = gl.expand_dims(gl.convert_layout(alpha, of_threads), 1) + zero
    before = l
    if FIXED_MAX:
        # In the block that has the maximum, its rounding is known.
        first = gl.where(rises, float("inf"), 0.0)
        before = gl.fma(l, alphas, gl.expand_dims(gl.convert_layout(first, of_threads), 1) + zero)
    # All as `fma`: a compiler may join a product with a later sum, or not.
    return m, alpha, gl.fma(residue, alphas, zero), before


@gluon.jit
def mark(m, l, scale):
    """l [ROWS] of a span, NaN where the first pass must not decide."""
    is_large = (gl.abs(m) * scale >= SPAN_LARGE_MAX) & (m > -float("inf"))
    return gl.where(is_large | ((l < SPAN_OVERFLOW) == 0), float("nan"), l)


@gluon.jit
def fold_sums(total_m, total_l, total_r, m, l, r, error, scale):
    """The sums of a total with one more span, and by what products so far, and those of the span,
    are multiplied [ROWS]."""
    m_new = gl.maximum(total_m, m)
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    keep = gl.exp2((total_m - origin) * scale)
    add = gl.exp2(gl.fma(m - origin, scale + gl.zeros_like(m), -error))
    return m_new, gl.fma(total_l, keep, l * add), gl.fma(total_r, keep, r * add), keep, add


@gluon.jit
def fold_products(total_acc, keep, acc, add):
    """Pieces [ROWS, ·] of a total with those of one more span."""
    folded = ()
    for p in gl.static_range(len(acc)):
        rows: gl.constexpr = gl.SliceLayout(1, acc[p].type.layout)
        keeps = gl.expand_dims(gl.convert_layout(keep, rows), 1)
        adds = gl.expand_dims(gl.convert_layout(add, rows), 1)
        zero = gl.zeros_like(acc[p])
        folded = folded + (gl.fma(total_acc[p], keeps + zero, acc[p] * adds),)  # noqa: RUF005
    return folded


@gluon.jit
def fold_span(sums, total, m, l, r, error, acc, scale):
    """Sums and products of a total with one more span."""
    sums = fold_sums(sums[0], sums[1], sums[2], m, l, r, error, scale)
    return sums, fold_products(total, sums[3], acc, sums[4])
