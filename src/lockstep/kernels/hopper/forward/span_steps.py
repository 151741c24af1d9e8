"""Steps of a consumer through keys in spans: query-invariant builds (`common/spans.py`)."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import empty_sums, n_pieces, scale_all
from lockstep.kernels.hopper.common.rounding import add_residue, sums_before
from lockstep.kernels.hopper.common.softmax import (
    add_sums,
    exp2_weights,
    raise_maximum,
    thread_sums,
)
from lockstep.kernels.hopper.common.spans import fold_sums, mark, sums_of_span
from lockstep.kernels.hopper.forward.products import await_product, issue_product, issue_scores
from lockstep.kernels.hopper.forward.total import add_products, all_products


@gluon.jit
def step_in_spans(
    c: gl.constexpr, program, rows, block, seen, q, p, acc, m, l, residue, sums, total, memory
):
    """`step`; where a span begins with `block`, the sums of the one before join the total's, and
    its products do in the next step, while the tensor cores compute scores. `sums` are m, l and r
    of the total, and by what its products, and those of the last span, are to be multiplied."""
    VOTES_LATE: gl.constexpr = program.v.COLUMNS <= 64
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    SPAN: gl.constexpr = program.build.SPAN
    scale = program.score_scale()
    is_new = block % SPAN == 0
    s = issue_scores(c, program, q, seen + 1)
    if block % SPAN == 1:
        total = add_products(total, memory, sums[3], acc, sums[4])
        acc = empty_sums(program.v.COLUMNS)
    acc = issue_product(c, program, p, acc, seen)
    before = l
    if is_new:
        sums = add_sums_of_span(program, sums, m, l, residue, p.dtype)
        m = gl.full([ROWS], -float("inf"), gl.float32, m.type.layout)
        l = gl.zeros_like(l)
        residue = gl.zeros_like(residue)
    s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
    program.k.release(seen + 1)
    s = program.mask_scores(rows, s, block)
    if program.build.FIXED_MAX:
        begins = is_new
        if program.schedule.HAS_LEFT:
            begins = begins | (block <= rows.inner_begin)
        if begins:
            before = sums_before(l, m)
            m, _alpha = raise_maximum(s, m, scale, m == -float("inf"))
        weights = exp2_weights(s, m, scale)
        part = thread_sums(weights)
        if not VOTES_LATE:
            residue = add_residue(residue, weights, part, before)
        acc, weights = await_product(program, acc, weights, seen + 2, block + 1 < rows.end)
    else:
        m, alpha = raise_maximum(s, m, scale, True)
        # In a span that begins, acc belongs to the one before.
        alpha = gl.where(is_new, 1.0, alpha)
        weights = exp2_weights(s, m, scale)
        l = add_sums(l, alpha, weights)
        acc, weights = await_product(program, acc, weights, seen + 2, block + 1 < rows.end)
        acc = scale_all(acc, alpha)
    program.v.release(seen)
    p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    if program.build.FIXED_MAX:
        if VOTES_LATE:
            residue = add_residue(residue, weights, part, before)
        l += part
    return p, acc, m, l, residue, sums, total


@gluon.jit
def add_sums_of_span(program, sums, m, l, residue, dtype: gl.constexpr):
    """`fold_sums` with a span that ended in the first pass."""
    scale = program.score_scale()
    if program.build.FIXED_MAX:
        l, r, error = sums_of_span(m, l, residue, scale, dtype)
    else:
        l, r, error = sums_of_span(m, l, None, scale, dtype)
    return fold_sums(sums[0], sums[1], sums[2], m, mark(m, l, scale), r, error, scale)


@gluon.jit
def end_spans(program, sums, total, memory, m, l, residue, acc, dtype: gl.constexpr):
    """m, l, r and products of all spans, when those of the last are done."""
    m, l, r, keep, add = add_sums_of_span(program, sums, m, l, residue, dtype)
    return m, l, r, all_products(total, memory, keep, acc, add)
