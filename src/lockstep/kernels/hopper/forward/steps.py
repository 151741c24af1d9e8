"""Steps of a consumer through the blocks of a tile behind the first; `spans/steps.py` has those of
query-invariant builds."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import left_operand
from lockstep.kernels.hopper.common.exact_weights import (
    bar_of_begun,
    exceeds,
    no_bar,
    rise,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import halves, n_pieces, scale_all
from lockstep.kernels.hopper.common.rescale import rescale_all, rescale_all_by_threads
from lockstep.kernels.hopper.common.softmax import (
    raise_maximum,
    rescale_and_add,
)
from lockstep.kernels.hopper.forward import constant_time
from lockstep.kernels.hopper.forward.products import (
    await_product,
    await_product_between,
    issue_product,
    issue_scores,
)
from lockstep.kernels.hopper.forward.weights import find_offset_weights, find_tops, find_weights


@gluon.jit
def step_weights_in_halves(program, rows, block, seen, s, acc, m, l, residue):
    """Weights of a block in constant time, from its scores s, acc with the product of the block
    before, m, l, residue and alpha.

    The left half of the columns is computed under the product, the right half behind it: meanwhile
    weights may be rounded, for which they need the registers of those that the product reads."""
    scale = program.score_scale()
    m, residue, unit, offset, alpha = constant_time.raise_maximum(
        s, m, residue, scale, program.k.tiles_smem.dtype
    )
    left, right = halves(s)
    left = constant_time.weights_of(left, unit, offset)
    part = constant_time.sums_like(l, left)
    has_more = block + 1 < rows.end
    acc, left, right = await_product_between(program, acc, left, right, seen + 2, has_more)
    right = constant_time.weights_of(right, unit, offset)
    l = rescale_and_add(l, alpha, part + constant_time.sums_like(l, right))
    weights = constant_time.whole(left, right, s)
    return weights, acc, m, l, residue, alpha


@gluon.jit
def step_weights(program, rows, block, seen, s, acc, m, l, residue):
    """The same under the product as a whole, without constant time, too."""
    scale = program.score_scale()
    if program.build.CONSTANT_TIME:
        m, residue, unit, offset, alpha = constant_time.raise_maximum(
            s, m, residue, scale, program.k.tiles_smem.dtype
        )
        # Summed in halves as well, so that a row has the same bits in both.
        left, right = halves(s)
        left = constant_time.weights_of(left, unit, offset)
        right = constant_time.weights_of(right, unit, offset)
        part = constant_time.sums_like(l, left)
        l = rescale_and_add(l, alpha, part + constant_time.sums_like(l, right))
        weights = constant_time.whole(left, right, s)
    else:
        s, top = find_tops(program, rows, s, block)
        m, alpha = raise_maximum(s, m, scale, True, top)
        weights, sums = find_weights(program, rows, s, block, m)
        l = rescale_and_add(l, alpha, sums)
    acc, weights = await_product(program, acc, weights, seen + 2, block + 1 < rows.end)
    return weights, acc, m, l, residue, alpha


@gluon.jit
def step(c: gl.constexpr, program, rows, block, seen, q, p, acc, m, l, beside, alpha):
    """Scores and weights of `block`, and the product of the block before, whose weights are `p`.

    The block of K is there already; the one after it is, too, on return."""
    # The conversion hides how long a vote takes. Behind it, ptxas may put off the exponentials of
    # wider heads until after the product.
    VOTES_LATE: gl.constexpr = program.v.COLUMNS <= 64
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    scale = program.score_scale()
    s = issue_scores(c, program, q, seen + 1)
    acc = issue_product(c, program, p, acc, seen, True, alpha)
    s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
    if not program.build.CONSTANT_TIME:
        program.k.release(seen + 1)
    s = program.mask_scores(rows, s, block)
    if program.build.EXACT:
        # Up to inner_begin, maxima may yet rise. Rows whose maximum does have no bar.
        BEGIN: gl.constexpr = program.schedule.HAS_LEFT
        factors = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
        if BEGIN and block <= rows.inner_begin:
            rises = rows.rise(program.schedule, block)
            s, top = find_tops(program, rows, s, block)
            m, offset, factors = rise(s, m, l, beside[1], scale, rises, None, top)
            beside = (no_bar(beside[0], rises), offset, beside[2])
        weights, part = find_offset_weights(program, rows, s, block, beside[1], True)
        any_exceeds = None
        if not VOTES_LATE:
            any_exceeds = exceeds(part, beside[0])
        acc, weights = await_product(program, acc, weights, seen + 2, block + 1 < rows.end)
    else:
        if program.build.HALVES:
            weights, acc, m, l, beside, alpha = step_weights_in_halves(
                program, rows, block, seen, s, acc, m, l, beside
            )
        else:
            weights, acc, m, l, beside, alpha = step_weights(
                program, rows, block, seen, s, acc, m, l, beside
            )
        if program.schedule.HAS_LEFT and not program.build.CONSTANT_TIME:
            acc = rescale_all(acc, alpha)
        elif not program.build.RESCALES_LATE:
            acc = scale_all(acc, alpha)
    if program.build.CONSTANT_TIME:
        # Before, warps would have to wait for each other once more.
        program.k.release(seen + 1)
    program.v.release(seen)
    weights = program.mark_weights(rows, weights, block, seen + 1)
    p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    if program.build.EXACT:
        TOGETHER: gl.constexpr = program.build.CONSUMERS == 2
        if BEGIN and block <= rows.inner_begin:
            acc = rescale_all_by_threads(acc, factors)
            l = l * factors
        acc, l, beside = settle(weights, acc, part, l, beside, any_exceeds, TOGETHER)
        if BEGIN and block <= rows.inner_begin:
            keys = rows.n_keys(program.schedule)
            bar = bar_of_begun(beside[0], part, keys, program.schedule.BLOCK_KV)
            # Maxima that rise in the next block, too, leave none behind this one.
            bar = no_bar(bar, rows.rise(program.schedule, block + 1))
            beside = (bar, beside[1], beside[2])
    return p, acc, m, l, beside, alpha


@gluon.jit
def take_steps(c: gl.constexpr, program, rows, q_ring, tiles, seen, p, acc, m, l, beside, alpha):
    """Every block of a tile behind the first; `seen` is the number of the last one then."""
    q = q_ring.pieces(tiles)
    if program.build.Q_IN_REGISTERS:
        q = (q[0].load(left_operand(program.schedule.BLOCK_KV)),)
    for block in range(rows.begin + 1, rows.end):
        p, acc, m, l, beside, alpha = step(
            c, program, rows, block, seen, q, p, acc, m, l, beside, alpha
        )
        seen += 1
    return p, acc, m, l, beside, alpha, seen
