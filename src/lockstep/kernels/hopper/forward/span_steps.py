"""Steps of a consumer through keys in spans: query-invariant builds (`common/spans.py`)."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import n_pieces, scale_all
from lockstep.kernels.hopper.common.rounding import add_residue
from lockstep.kernels.hopper.common.softmax import (
    add_sums,
    exp2_weights,
    hide_from,
    raise_maximum,
    thread_sums,
)
from lockstep.kernels.hopper.common.spans import (
    end_of_first,
    end_of_span,
    first_maximum,
    fold_maxima,
    fold_sums,
    mark,
    row_sums,
    sums_before_block,
    weight_error,
)
from lockstep.kernels.hopper.forward.products import await_product, issue_product, issue_scores
from lockstep.kernels.hopper.forward.total import add_products, all_products


@gluon.jit
def fixed_maximum(program, rows, s, block, m):
    """m [ROWS], with a fixed maximum, of rows that begin in `block` with scores `s`."""
    if program.schedule.HAS_LEFT:
        end = end_of_first(rows.row_begin) - block * program.schedule.BLOCK_KV
        return gl.where(m == -float("inf"), gl.max(hide_from(s, end), 1), m)
    else:  # noqa: RET505, Gluon would go on and return both
        return first_maximum(s)


@gluon.jit
def empty_sums_of_rows(program, m, l):
    """Sums of no spans: l and residue [ROWS, 4]; with a running maximum also m, error and what
    `fold_maxima` returns beside them."""
    zero = gl.zeros_like(l)
    if program.build.FIXED_MAX:
        return zero, zero
    else:  # noqa: RET505
        none = gl.zeros_like(m)
        return zero, zero, none - float("inf"), none, none + 1.0, none


@gluon.jit
def ended_before(program, rows, block):
    """Whether a span of the rows ended before `block`."""
    SPAN: gl.constexpr = program.build.SPAN
    return block // SPAN > rows.begin // SPAN


@gluon.jit
def continues(program, rows, block):
    """Whether the product of a block is added to those of the block before: not where a span
    begins."""
    return (block % program.build.SPAN != 0) & (block > rows.begin)


@gluon.jit
def add_span(program, rows, block, sums, total, memory, acc):
    """The products of a total with those of the span that ended before the one of `block`, if there
    is one."""
    SPAN: gl.constexpr = program.build.SPAN
    COLUMNS: gl.constexpr = program.build.TOTAL_COLUMNS
    before = block // SPAN - rows.begin // SPAN
    if before > 0:
        if program.build.FIXED_MAX:
            total = add_products(total, memory, None, acc, None, before == 1, COLUMNS)
        else:
            total = add_products(total, memory, sums[4], acc, sums[5], before == 1, COLUMNS)
    return total


@gluon.jit
def step_in_spans(
    c: gl.constexpr, program, rows, block, seen, q, p, acc, m, l, residue, sums, total, memory
):
    """`step`; where a span begins with `block`, the sums of the one before join the total's, and
    so do its products when they are done."""
    VOTES_LATE: gl.constexpr = program.v.COLUMNS <= 64
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    SPAN: gl.constexpr = program.build.SPAN
    scale = program.score_scale()
    is_new = block % SPAN == 0
    # Under way behind the scores, the product would overwrite those of the span before.
    if program.build.ADDS_LATE:
        s = issue_scores(c, program, q, seen + 1)
    # One branch where no span ends.
    if block % SPAN <= 1:
        if is_new:
            sums = add_sums_of_span(program, sums, m, l, residue, p.dtype)
            l = gl.zeros_like(l)
            residue = gl.zeros_like(residue)
            if not program.build.FIXED_MAX:
                m = gl.full([ROWS], -float("inf"), gl.float32, m.type.layout)
        else:
            total = add_span(program, rows, block, sums, total, memory, acc)
    if not program.build.ADDS_LATE:
        s = issue_scores(c, program, q, seen + 1)
    acc = issue_product(c, program, p, acc, seen, continues(program, rows, block - 1))
    s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
    program.k.release(seen + 1)
    s = program.mask_scores(rows, s, block)
    if program.build.FIXED_MAX:
        if program.schedule.HAS_LEFT and block <= rows.inner_begin:
            m = fixed_maximum(program, rows, s, block, m)
        weights = exp2_weights(s, m, scale)
        part = thread_sums(weights)
        if not VOTES_LATE:
            residue = add_residue(residue, weights, part, sums_before_block(l))
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
            residue = add_residue(residue, weights, part, sums_before_block(l))
        l += part
    return p, acc, m, l, residue, sums, total


@gluon.jit
def add_sums_of_span(program, sums, m, l, residue, dtype: gl.constexpr):
    """The sums of a total with those of a span that ended in the first pass."""
    scale = program.score_scale()
    if program.build.FIXED_MAX:
        return sums[0] + l, sums[1] + residue
    else:  # noqa: RET505
        residue, error = end_of_span(m, residue, scale, False, dtype)
        m, error, keep, add = fold_maxima(sums[2], sums[3], m, error, scale)
        folded = fold_sums((sums[0], sums[1]), keep, (l, residue), add)
        return folded[0], folded[1], m, error, keep, add


@gluon.jit
def end_spans(program, rows, sums, total, memory, m, l, residue, acc, dtype: gl.constexpr):
    """m, l, r, error and products of all spans, when those of the last are done."""
    COLUMNS: gl.constexpr = program.build.TOTAL_COLUMNS
    scale = program.score_scale()
    sums = add_sums_of_span(program, sums, m, l, residue, dtype)
    if program.build.FIXED_MAX:
        error = weight_error(m, scale)
        keep: gl.constexpr = None
        add: gl.constexpr = None
    else:
        m = sums[2]
        error = sums[3]
        keep = sums[4]
        add = sums[5]
    if ended_before(program, rows, rows.end - 1):
        acc = all_products(total, memory, keep, acc, add, COLUMNS)
    l, r = row_sums(m, sums[0], sums[1])
    return m, mark(m, l, scale), r, error, acc
