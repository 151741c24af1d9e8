"""Rows whose keys stay in shared memory: weights, sums and results, block by block.

Rows have the bits that `consumer.py` and `second_pass.py` would give them: bf16 keeps the maximum
of the first block, fp16 has a running one.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import accumulator, left_operand
from lockstep.kernels.hopper.common.exact_weights import (
    first_bar,
    first_offset,
    no_bar,
    offset_factors,
    offset_weights,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import cut, join_all, piece_width, scale_all
from lockstep.kernels.hopper.common.softmax import (
    close_rows,
    max_rounding_error,
    raise_maximum,
    rescale_and_add,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.common.thread_numbers import of_rows
from lockstep.kernels.hopper.forward.one_block.rows import add_clean, hide_piece, weights_of
from lockstep.kernels.hopper.forward.second_pass import product


@gluon.constexpr_function
def doublings(width):
    """How often weights of so many columns are doubled until `settle` takes
    them, which 64 are."""
    return max(7 - width.bit_length(), 0)


@gluon.jit
def empty_maxima(s):
    """-inf for each row [ROWS] of scores."""
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    return gl.full([s.shape[0]], -float("inf"), gl.float32, layout)


@gluon.jit
def row_offsets(m, unit):
    """What is added to the exponents of rows [ROWS] with these maxima."""
    return gl.where(m == -float("inf"), 0.0, -m * unit)


@gluon.jit
def raised(s, m, unit):
    """m [ROWS] with the maxima of scores s, and the factor for what was summed before."""
    top = gl.convert_layout(gl.max(s, 1), m.type.layout, assert_trivial=True)
    return raise_maximum(s, m, unit, True, top)


@gluon.jit
def as_left(weights, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Weights, rounded, as the left operand of a product with values of so many columns."""
    return gl.convert_layout(round_pairs(weights, dtype), left_operand(piece_width(COLUMNS, 0)))


@gluon.jit
def sums_like(weights, l):
    """`thread_sums` of weights, in the layout of l."""
    return gl.convert_layout(thread_sums(weights), l.type.layout, assert_trivial=True)


@gluon.jit
def doubled(weights):
    """Weights [ROWS, n] as [ROWS, 2n], with zeros."""
    layout: gl.constexpr = accumulator(2 * weights.shape[1])
    both = gl.join(weights, gl.zeros_like(weights)).permute((0, 2, 1))
    both = both.reshape([weights.shape[0], 2 * weights.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def widened(weights):
    """Weights of the rest [ROWS, ·], as wide as `settle` takes them."""
    for _step in gl.static_range(doublings(weights.shape[1])):
        weights = doubled(weights)
    return weights


@gluon.jit
def first_weights(s, unit):
    """Weights of the first block with scores s, m [ROWS] and l [ROWS, 4]."""
    m, _alpha = raise_maximum(s, empty_maxima(s), unit, True)
    weights = weights_of(s, None, row_offsets(m, unit), unit)
    return weights, m, thread_sums(weights)


@gluon.jit
def first_beside(m, l, n_keys, unit, BLOCK_KV: gl.constexpr):
    """Bar, offset and residue (`exact_weights.py`) behind the first block."""
    return first_bar(l, n_keys, BLOCK_KV), first_offset(m, l, unit), gl.zeros_like(l)


@gluon.jit
def later_weights(s, m, l, beside, unit, FIXED_MAX: gl.constexpr):
    """Weights of a later block with scores s, m [ROWS], their sums [ROWS, 4] and the factor [ROWS]
    for all that was summed before, which is of no use with a fixed maximum."""
    alpha = m
    if FIXED_MAX:
        weights = offset_weights(s, beside[1], unit)
    else:
        m, alpha = raised(s, m, unit)
        weights = weights_of(s, None, row_offsets(m, unit), unit)
    return weights, m, sums_like(weights, l), alpha


@gluon.jit
def add_block(weights, acc, part, l, beside, alpha, FIXED_MAX: gl.constexpr):
    """Products so far, l and what is beside it, with a block that has these weights and sums."""
    if FIXED_MAX:
        acc, l, beside = settle(widened(weights), acc, part, l, beside, None, False)
    else:
        acc = scale_all(acc, alpha)
        l = rescale_and_add(l, alpha, part)
    return acc, l, beside


@gluon.jit
def close(acc, m, l, beside, is_exact, unit, sink, dtype: gl.constexpr):
    """Pieces of out, lse, m and l, as `program.normalize` has them. Rows that `is_exact` names, if
    it is not None, have weights of any size."""
    layout: gl.constexpr = m.type.layout
    EXACT: gl.constexpr = dtype == gl.bfloat16
    error = max_rounding_error(m, unit)
    if is_exact is not None:
        error = gl.where(is_exact, 0.0, error)
    factor = gl.exp2(-error)
    r = l
    if EXACT:
        _bar, offset, residue = beside
        r = l + residue
        factors = offset_factors(offset, m, unit, is_exact)
        if sink is not None:
            factor = of_rows(factors, layout)
        else:
            l = l * factors
            factor = gl.full(m.shape, 1.0, gl.float32, layout)
    r = gl.convert_layout(gl.sum(r, 1), layout)
    l = gl.convert_layout(gl.sum(l, 1), layout)
    if is_exact is not None:
        r = gl.where(is_exact, l, r)
    # The weight of the maximum is known: it is what rounding m·unit makes of 1.
    top = gl.exp2(error)
    r = gl.where(l == 0.0, l, r + (top.to(dtype).to(gl.float32) - top))
    return close_rows(acc, m, l, r, factor, unit, sink, 0.0, BRIEF=True)


@gluon.jit
def of_either(s, m, usual, is_exact, unit):
    """The `usual` weights of scores s, but of any size in rows that `is_exact` names, whose maximum
    is m [ROWS]."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    is_exact = gl.expand_dims(gl.convert_layout(is_exact, rows, assert_trivial=True), 1)
    origin = gl.where(m == -float("inf"), 0.0, m)
    return gl.where(is_exact, weights_of(s, origin, gl.zeros_like(m), unit), usual)


@gluon.jit
def first_again(s, n_keys, is_exact, unit, BLOCK_KV: gl.constexpr, FIXED_MAX: gl.constexpr):
    """`first_weights` and `first_beside`, as `attend_second_pass` has them: the maxima of rows that
    `is_exact` names run."""
    usual, m, _l = first_weights(s, unit)
    weights = of_either(s, m, usual, is_exact, unit)
    l = thread_sums(weights)
    bar, offset, residue = first_beside(m, l, n_keys, unit, BLOCK_KV)
    if FIXED_MAX:
        bar = no_bar(bar, is_exact)
    return weights, m, l, (bar, offset, residue)


@gluon.jit
def later_again(s, acc, m, l, beside, is_exact, unit, FIXED_MAX: gl.constexpr):
    """Weights of a later block, with products so far, m, l and what is beside it, alike."""
    rises = is_exact
    if not FIXED_MAX:
        rises = rises | True
    top = gl.convert_layout(gl.max(s, 1), m.type.layout, assert_trivial=True)
    m, alpha = raise_maximum(s, m, unit, rises, top)
    if FIXED_MAX:
        usual = offset_weights(s, beside[1], unit)
    else:
        usual = weights_of(s, None, row_offsets(m, unit), unit)
    weights = of_either(s, m, usual, is_exact, unit)
    part = sums_like(weights, l)
    acc = scale_all(acc, alpha)
    if FIXED_MAX:
        l = rescale_and_add(l, alpha, gl.zeros_like(l))
        acc, l, beside = settle(widened(weights), acc, part, l, beside, None, False)
    else:
        l = rescale_and_add(l, alpha, part)
    return weights, acc, m, l, beside


@gluon.jit
def add_strip(acc, weights, seen, values, cleans):
    """acc and weights times values, which are overwritten and may not be finite if it `cleans`
    them."""
    if cleans:
        acc = add_clean(weights, seen, values, acc)
    else:
        left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        acc = product(gl.convert_layout(round_pairs(weights, values.dtype), left), values, acc)
    return acc


@gluon.jit
def add_piece(acc, weights, seen, values, cleans):
    """The same, up to 64 columns at a time: registers are few."""
    if acc.shape[1] > 64:
        before = cut(acc, 64)
        parts = ()
        for c in gl.static_range(len(before)):
            part = add_strip(before[c], weights, seen, values.slice(c * 64, 64, dim=1), cleans)
            parts = parts + (part,)  # noqa: RUF005, Gluon does not unpack
        return join_all(parts, (acc,))[0]
    else:  # noqa: RET505, Gluon would go on and return both
        return add_strip(acc, weights, seen, values, cleans)


@gluon.jit
def add_in_strips(acc, weights, end, cleans, v, b: gl.constexpr):
    """acc and weights [ROWS, n] times the values of a block, of which rows see those before `end`
    [ROWS]."""
    seen = gl.exp2(hide_piece(gl.zeros_like(weights), end))
    added = ()
    for p in gl.static_range(len(acc)):
        added = added + (add_piece(acc[p], weights, seen, v.block(b).piece(0, p), cleans),)  # noqa: RUF005
    return added
