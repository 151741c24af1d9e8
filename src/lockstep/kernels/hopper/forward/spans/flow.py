"""Query-invariant builds at D 64 under a causal mask: the tiles of a consumer in one loop over the
blocks of all of them, as `forward/flow.py` has it. `steps.py` has a loop for each tile.

Where a span begins, the sums of the one before join those of the spans before, and in the step
behind that its products do, which are done then. What was summed before are sums of threads, l,
residue and the factors of products that have not been added yet, [ROWS, 4] each; and products.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import zeros
from lockstep.kernels.hopper.common.exact_spans import settle_block, settle_in_span
from lockstep.kernels.hopper.common.exact_weights import first_offset, offset_weights_in_halves
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import empty_sums
from lockstep.kernels.hopper.common.rescale import rescale_by_threads
from lockstep.kernels.hopper.common.softmax import round_pairs, thread_sums
from lockstep.kernels.hopper.common.spans import (
    begin_span,
    end_exact_span,
    first_maximum,
    mark,
    row_sums,
    weight_error,
)
from lockstep.kernels.hopper.forward.products import await_product, issue_product, issue_scores
from lockstep.kernels.hopper.forward.program import Rows
from lockstep.kernels.hopper.forward.skipping import skip_behind
from lockstep.kernels.hopper.forward.spans.steps import bar_of_begun


@gluon.jit
def nothing_before(program, l):
    """What was summed before the first span: sums and products."""
    zero = gl.zeros_like(l)
    return (zero, zero, zero + 1.0), zeros(program.v.COLUMNS)


@gluon.jit
def add_ended(program, block, is_last, acc, m, l, beside, sums, total):
    """What was summed, with what ended before `block`: of one that begins a span, the sums of the
    span before; of the one behind that, its products. Also acc, l and what is beside it. If the
    block before `is_last` in its tile, the sums of its span are not added."""
    SPAN: gl.constexpr = program.build.SPAN
    scale = program.score_scale()
    if block % SPAN == 0:
        if not is_last:
            ended, residue, ends = end_exact_span(m, l, beside, scale)
            sums = (sums[0] + ended, sums[1] + residue, ends)
            l, beside = begin_span(m, l, scale)
    elif block > SPAN:
        total, acc = add_products(sums, total, acc)
    return acc, l, beside, sums, total


@gluon.jit
def add_products(sums, total, acc):
    """Products with those of a span that ended. Also what acc becomes, which is of no use: else
    registers would be copied."""
    acc = (rescale_by_threads(acc[0], sums[2]),)
    return total + acc[0], acc


@gluon.jit
def flow_in_spans(
    c: gl.constexpr, program, results, q_ring, o_smem, o_desc, wrong, tile, rows, begun,
    store_results: gl.constexpr, end_tile: gl.constexpr,
):  # fmt: skip
    """All tiles of a program, of which `tile` has begun (`consumer.begin_tile`): which rows failed,
    and how many blocks and tiles there were."""
    SPAN: gl.constexpr = program.build.SPAN
    schedule = program.schedule
    scale = program.score_scale()
    acc = empty_sums(program.v.COLUMNS)
    p, m, l, large = begun
    beside, bar = large
    sums, total = nothing_before(program, l)
    tiles = 0
    seen = 0
    # The block whose values are multiplied next, and the one that p is of: the same, if there are
    # rows.
    held = 0
    block = rows.begin
    goes_on = tile.exists
    while goes_on:
        changes = block + 1 >= rows.end
        held = seen
        next_tile = tile
        next_rows = rows
        next_seen = seen + 1
        next_block = block + 1
        next_tiles = tiles
        # Of a tile that ends, the sums of the last span are added with its products.
        if (next_block % SPAN <= 1) & (next_block > 1):
            acc, l, beside, sums, total = add_ended(
                program, next_block, changes, acc, m, l, beside, sums, total
            )
        if changes:
            held, next_seen = skip_behind(c, program, tile, rows, seen, next_seen)
            next_tiles = tiles + 1
            next_tile = program.tile_queue.read(next_tiles)
            next_rows = Rows.of_consumer(c, schedule, next_tile)
            q_ring.release(tiles)
            next_block = next_rows.begin
        goes_on = next_tile.exists
        if goes_on:
            if changes:
                q_ring.wait(next_tiles)
                program.k.wait(next_seen)
            s = issue_scores(c, program, q_ring.pieces(next_tiles), next_seen)
            acc = issue_product(c, program, p, acc, held, block % SPAN != 0)
            s = warpgroup_mma_wait(1, deps=(s,))
            program.k.release(next_seen)
            s = program.mask_scores(next_rows, s, next_block)
            offset, residue = beside
            next_m = m
            next_offset = offset
            if changes:
                next_m = first_maximum(s)
                next_offset = first_offset(next_m, l, scale)
            weights = offset_weights_in_halves(s, next_offset, scale)
            part = thread_sums(weights)
            at_most = gl.maximum(l, bar)
            # As in `flow.flow`.
            has_more = next_block + 1 < next_rows.end
            fits = next_seen - held < program.v.ring.STAGES
            acc, weights = await_product(program, acc, weights, next_seen + 1, has_more & fits)
            program.v.release(held)
            p = gl.convert_layout(round_pairs(weights, p.dtype), p.type.layout)
            if changes:
                # First what needs the weights, whose registers are of use then.
                zero = gl.zeros_like(l)
                bar = bar_of_begun(program, next_rows, weights, next_block, l)
                next_l, offset, residue, _factors = settle_in_span(
                    weights, part, zero, bar, next_offset, zero, None
                )
                program.k.wait(next_seen + 1, pred=has_more)
                wrong = end_and_store(
                    c, program, results, tile, rows, tiles, acc, m, l, beside, sums, total,
                    0, o_smem, o_desc, wrong, store_results,
                )  # fmt: skip
                l = next_l
                sums, total = nothing_before(program, l)
            else:
                acc, l, offset, residue = settle_block(
                    weights, acc, part, l, at_most, offset, residue, next_block % SPAN == 0,
                    None,
                )  # fmt: skip
            beside = (offset, residue)
            m = next_m
            tile = next_tile
            rows = next_rows
            block = next_block
            tiles = next_tiles
            seen = next_seen
    acc, bad = end_tile(program, tiles, held, p, acc, block % SPAN != 0, m)
    wrong = end_and_store(
        c, program, results, tile, rows, tiles, acc, m, l, beside, sums, total, bad, o_smem,
        o_desc, wrong, store_results,
    )  # fmt: skip
    return wrong, seen + 1 + (rows.tile_end - rows.end), tiles + 1


@gluon.jit
def end_and_store(
    c: gl.constexpr, program, results, tile, rows, tiles, acc, m, l, beside, sums, total,
    bad, o_smem, o_desc, wrong, store_results: gl.constexpr,
):  # fmt: skip
    """Store the results of a tile whose products are done, and report its rows that failed."""
    l, r, error, acc = end_flowing_spans(program, rows, sums, total, m, l, beside, acc)
    again = store_results(c, program, results, tile, rows, acc, m, l, r, error, bad, o_smem, o_desc)
    return wrong | (again << (tiles % 32))


@gluon.jit
def end_flowing_spans(program, rows, sums, total, m, l, beside, acc):
    """l, r, error and products of all spans, when those of the last are done."""
    scale = program.score_scale()
    l, residue, ends = end_exact_span(m, l, beside, scale)
    products = rescale_by_threads(acc[0], ends)
    if rows.end > program.build.SPAN:
        l = sums[0] + l
        residue = sums[1] + residue
        products = total + products
    l, r = row_sums(m, l, residue)
    return mark(m, l, scale), r, weight_error(m, scale), (products,)
