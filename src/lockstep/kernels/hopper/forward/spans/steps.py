"""Steps of a consumer through keys in spans: query-invariant builds (`common/spans.py`)."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.exact_spans import settle_block, settle_in_span
from lockstep.kernels.hopper.common.exact_weights import (
    exceeds,
    first_offset,
    offset_weights,
    offset_weights_in_halves,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import n_pieces, scale_all
from lockstep.kernels.hopper.common.rescale import rescale_by_threads
from lockstep.kernels.hopper.common.softmax import (
    add_sums,
    exp2_weights,
    hide_from,
    raise_maximum,
    thread_sums,
)
from lockstep.kernels.hopper.common.spans import (
    bar_of_rows,
    begin_span,
    end_exact_span,
    end_of_first,
    end_of_span,
    first_columns,
    first_maximum,
    first_sum,
    fold_maxima,
    fold_sums,
    mark,
    row_sums,
    weight_error,
)
from lockstep.kernels.hopper.common.thread_numbers import of_threads
from lockstep.kernels.hopper.forward.products import await_product, issue_product, issue_scores
from lockstep.kernels.hopper.forward.spans.total import add_products, all_products


@gluon.jit
def fixed_maximum(program, rows, s, block, m):
    """m [ROWS], with a fixed maximum, of rows that begin in `block` with scores `s`."""
    if program.schedule.HAS_LEFT:
        end = end_of_first(rows.row_begin) - block * program.schedule.BLOCK_KV
        return gl.where(m == -float("inf"), gl.max(hide_from(s, end), 1), m)
    else:  # noqa: RET505, Gluon would go on and return both
        return first_maximum(s)


@gluon.jit
def bar_of_begun(program, rows, weights, block, l):
    """The bar [ROWS, 4] of rows that begin in `block`, with these weights."""
    if program.schedule.HAS_LEFT:
        end = end_of_first(rows.row_begin) - block * program.schedule.BLOCK_KV
        first = first_sum(gl.maximum(hide_from(weights, end), 0.0))
    else:
        first = first_sum(first_columns(weights))
    first = gl.convert_layout(first, rows.row_end.type.layout)
    return bar_of_rows(first, rows.row_begin, rows.row_end, l)


@gluon.jit
def first_beside_in_span(program, rows, weights, m, l):
    """l [ROWS, 4] of the first block of a tile, which begins a span; what is beside it: offset and
    residue; and the bar of its rows."""
    none, beside = begin_span(m, l, program.score_scale())
    bar = bar_of_begun(program, rows, weights, rows.begin, l)
    l, offset, residue, _factors = settle_in_span(weights, l, none, bar, beside[0], beside[1], None)
    return l, (offset, residue), bar


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


@gluon.constexpr_function
def keeps_ends(program):
    """Whether the factors of a span that has ended are kept until it is added to the total, so that
    blocks which begin a span take the path of all others. D 128 has no registers for them: they are
    in l, and applied with the next block (`settle_step`)."""
    return program.v.COLUMNS <= 64 and not program.schedule.HAS_LEFT


@gluon.jit
def add_span(program, rows, block, sums, total, memory, acc, ends):
    """The products of a total with those of the span that ended before the one of `block`, if there
    is one; and these, times `ends` if these were kept."""
    SPAN: gl.constexpr = program.build.SPAN
    COLUMNS: gl.constexpr = program.build.TOTAL_COLUMNS
    before = block // SPAN - rows.begin // SPAN
    if before > 0:
        if program.build.FIXED_MAX:
            if keeps_ends(program):
                acc = (rescale_by_threads(acc[0], ends),)
            total = add_products(total, memory, None, acc, None, before == 1, COLUMNS)
        else:
            total = add_products(total, memory, sums[4], acc, sums[5], before == 1, COLUMNS)
    return total, acc


@gluon.jit
def step_in_spans(
    c: gl.constexpr, program, rows, block, seen, q, p, acc, m, l, beside, bar, sums, ends, total,
    memory,
):  # fmt: skip
    """`step`; where a span begins with `block`, the sums of the one before join the total's, and
    so do its products when they are done. Beside l are offset and residue of `exact_spans.py`."""
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
            sums, ends = add_sums_of_span(program, sums, m, l, beside, p.dtype)
            l, beside = begin_span(m, l, scale)
            if program.build.FIXED_MAX:
                if not keeps_ends(program):
                    # The sum is 0 until the products of the span before are done, and l below any
                    # bar.
                    l = -ends
            else:
                m = gl.full([ROWS], -float("inf"), gl.float32, m.type.layout)
        else:
            total, acc = add_span(program, rows, block, sums, total, memory, acc, ends)
    if not program.build.ADDS_LATE:
        s = issue_scores(c, program, q, seen + 1)
    acc = issue_product(c, program, p, acc, seen, continues(program, rows, block - 1))
    s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
    program.k.release(seen + 1)
    s = program.mask_scores(rows, s, block)
    if program.build.FIXED_MAX:
        offset, residue = beside
        if program.schedule.HAS_LEFT and block <= rows.inner_begin:
            begins = of_threads(gl.where(m == -float("inf"), 1.0, 0.0), l) > 0.0
            m = fixed_maximum(program, rows, s, block, m)
            offset = gl.where(begins, first_offset(m, l, scale), offset)
            weights = offset_weights(s, offset, scale)
            bar = gl.where(begins, bar_of_begun(program, rows, weights, block, l), bar)
        elif program.schedule.HAS_RIGHT and keeps_ends(program):
            weights = offset_weights_in_halves(s, offset, scale)
        else:
            weights = offset_weights(s, offset, scale)
        part = thread_sums(weights)
        any_exceeds = None
        if not VOTES_LATE:
            any_exceeds = exceeds(part, gl.maximum(l, bar))
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
        acc, l, beside = settle_step(
            program, weights, acc, part, l, bar, (offset, residue), is_new, any_exceeds
        )
    return p, acc, m, l, beside, bar, sums, ends, total


@gluon.jit
def settle_step(program, weights, acc, part, l, bar, beside, is_new, any_exceeds):
    """acc, l and what is beside it with a block; if the block `is_new` in its span, acc belongs to
    the span before, which has ended, and whose factors are in l unless they are kept."""
    offset, residue = beside
    if keeps_ends(program):
        large = gl.maximum(l, bar)
        acc, l, offset, residue = settle_block(
            weights, acc, part, l, large, offset, residue, is_new, any_exceeds
        )
    elif is_new:
        acc = (rescale_by_threads(acc[0], -l),)
        l, offset, residue, _factors = settle_in_span(
            weights, part, gl.zeros_like(l), bar, offset, residue, any_exceeds
        )
    else:
        large = (gl.maximum(l, bar), offset, residue)
        acc, l, large = settle(weights, acc, part, l, large, any_exceeds)
        offset = large[1]
        residue = large[2]
    return acc, l, (offset, residue)


@gluon.jit
def add_sums_of_span(program, sums, m, l, beside, dtype: gl.constexpr):
    """The sums of a total with those of a span that ended in the first pass, and factors for its
    products."""
    scale = program.score_scale()
    if program.build.FIXED_MAX:
        l, residue, factors = end_exact_span(m, l, beside, scale)
        return (sums[0] + l, sums[1] + residue), factors
    else:  # noqa: RET505
        residue, error = end_of_span(m, beside[1], scale, False, dtype)
        m, error, keep, add = fold_maxima(sums[2], sums[3], m, error, scale)
        folded = fold_sums((sums[0], sums[1]), keep, (l, residue), add)
        none = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
        return (folded[0], folded[1], m, error, keep, add), none


@gluon.jit
def end_spans(program, rows, sums, total, memory, m, l, beside, acc, dtype: gl.constexpr):
    """m, l, r, error and products of all spans, when those of the last are done."""
    COLUMNS: gl.constexpr = program.build.TOTAL_COLUMNS
    scale = program.score_scale()
    sums, ends = add_sums_of_span(program, sums, m, l, beside, dtype)
    if program.build.FIXED_MAX:
        acc = (rescale_by_threads(acc[0], ends),)
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
