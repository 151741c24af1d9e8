"""A consumer: one warpgroup, 64 query rows of every tile, P in registers.

It runs one block ahead of itself: the scores of block j+1 are on the tensor cores before the
product of block j, and the exponentials of block j+1 run under that product. The last block of a
tile is followed in the same way by the first of the next, and the tile's results are written after
that (`change_tile`). Consumers may pass a turn around, so that one is at its exponentials while
another has the tensor cores.

A program makes one pass over its tiles. If rows failed in it, `second_pass.py` computes them again.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand
from lockstep.kernels.hopper.common.exact_weights import first_bar, first_offset
from lockstep.kernels.hopper.common.gluon_shim import (
    gl,
    gluon,
    tma_store_wait,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import (
    empty_sums,
    n_pieces,
    piece_width,
)
from lockstep.kernels.hopper.common.softmax import (
    compute_here,
    exp2_weights,
    raise_maximum,
    round_pairs,
    thread_sums,
)
from lockstep.kernels.hopper.forward import constant_time
from lockstep.kernels.hopper.forward.constant_time_flow import flow_in_constant_time
from lockstep.kernels.hopper.forward.flow import flow
from lockstep.kernels.hopper.forward.pingpong import pass_turn
from lockstep.kernels.hopper.forward.products import (
    await_product,
    end_tile,
    issue_product,
    issue_scores,
)
from lockstep.kernels.hopper.forward.program import Rows
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import await_stores
from lockstep.kernels.hopper.forward.second_pass import consume_second_pass
from lockstep.kernels.hopper.forward.skipping import skip_before, skip_behind
from lockstep.kernels.hopper.forward.spans.flow import flow_in_spans
from lockstep.kernels.hopper.forward.spans.steps import (
    add_span,
    continues,
    empty_sums_of_rows,
    end_spans,
    first_beside_in_span,
    fixed_maximum,
    step_in_spans,
)
from lockstep.kernels.hopper.forward.spans.total import empty_products, in_memory_of_out
from lockstep.kernels.hopper.forward.steps import take_steps
from lockstep.kernels.hopper.forward.stores import store_results
from lockstep.kernels.hopper.forward.weights import find_tops, find_weights


@gluon.jit
def first_block_weights(program, rows, s, block):
    """Weights [ROWS, BLOCK_KV] of the first block that rows see, their m and l."""
    scale = program.score_scale()
    s = program.mask_scores(rows, s, block)
    no_max: gl.constexpr = constant_time.NO_MAX if program.build.CONSTANT_TIME else -float("inf")
    m = gl.full([ROWS], no_max, gl.float32, gl.SliceLayout(1, s.type.layout))
    if program.build.CONSTANT_TIME:
        m, _rounding, unit, offset, _alpha = constant_time.raise_maximum(
            s, m, gl.zeros_like(m), scale, program.k.tiles_smem.dtype
        )
        weights = constant_time.weights_of(s, unit, offset)
        l = constant_time.sums_in_halves(weights)
    elif program.build.SPAN and program.build.FIXED_MAX:
        m = fixed_maximum(program, rows, s, block, m)
        weights = exp2_weights(s, m, scale)
        l = thread_sums(weights)
    else:
        s, top = find_tops(program, rows, s, block)
        m, _alpha = raise_maximum(s, m, scale, True, top)
        weights, l = find_weights(program, rows, s, block, m)
    return weights, m, l


@gluon.jit
def no_large(l):
    """What `first_large` returns where there is no block."""
    zero = gl.zeros_like(l)
    return (zero, zero), zero


@gluon.jit
def first_large(program, rows, weights, m, l):
    """l of the first block that rows see. With spans its largest weight may be any, and they also
    have offset, residue and bar (`exact_spans.py`)."""
    beside, bar = no_large(l)
    if program.build.SPAN and program.build.FIXED_MAX:
        l, beside, bar = first_beside_in_span(program, rows, weights, m, l)
    return l, (beside, bar)


@gluon.jit
def first_beside(program, rows, m, l):
    """What rows keep beside m and l behind the first block that they see, without spans: nothing,
    or bar, offset and residue (`exact_weights.py`)."""
    beside = gl.zeros_like(l)
    if program.build.CONSTANT_TIME:
        # Nothing else is left of what rounding does: here, it is that of m.
        beside = constant_time.rounding_of(m, program.score_scale(), program.k.tiles_smem.dtype)
    elif program.build.EXACT:
        bar = l
        if rows.begin + 1 < rows.end:
            schedule = program.schedule
            bar = first_bar(l, rows.n_keys(schedule), schedule.BLOCK_KV)
        beside = (bar, first_offset(m, l, program.score_scale()), beside)
    return beside


@gluon.jit
def begin_tile(c: gl.constexpr, program, rows, q_ring, tiles, seen):
    """The first block of a tile by itself: p, m, l and what `first_large` has. The block of K after
    it is there on return."""
    WIDTH: gl.constexpr = piece_width(program.v.COLUMNS, 0)
    q_ring.wait(tiles)
    q = q_ring.pieces(tiles)
    program.k.wait(seen)
    s = issue_scores(c, program, q, seen)
    if program.build.PINGPONG:
        pass_turn((c + 1) % program.build.CONSUMERS, seen)
    s = warpgroup_mma_wait(0, deps=(s,))
    program.k.release(seen)
    weights, m, l = first_block_weights(program, rows, s, rows.begin)
    program.k.wait(seen + 1, pred=rows.begin + 1 < rows.end)
    weights = program.mark_weights(rows, weights, rows.begin, seen)
    p = gl.convert_layout(round_pairs(weights, q[0].dtype), left_operand(WIDTH))
    l, large = first_large(program, rows, weights, m, l)
    return p, m, l, large


@gluon.jit
def change_tile(c: gl.constexpr, program, rows, q_ring, tiles, last, seen, p, acc, use_acc, alpha):
    """The product of the last block of a tile; and the first block, `seen`, of the next one, whose
    `rows` and number these are: acc and the first bad key, then p, m, l and what `first_large` has
    of the next."""
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    q_ring.wait(tiles)
    program.k.wait(seen)
    s = issue_scores(c, program, q_ring.pieces(tiles), seen)
    if program.build.SPAN:
        acc = issue_product(c, program, p, acc, last, use_acc)
    else:
        acc = issue_product(c, program, p, acc, last, True, alpha)
    bad = program.first_bad_key(tiles - 1)
    s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
    program.k.release(seen)
    weights, m, l = first_block_weights(program, rows, s, rows.begin)
    if not program.build.CONSTANT_TIME:
        # Else ptxas may put off these sums, and with them the exponentials, until after the
        # product.
        l = compute_here(l)
    # The block of K after that may have to wait for the slot of V that is still in use here, where
    # blocks were skipped between the two tiles.
    has_more = rows.begin + 1 < rows.end
    fits = seen - last < program.v.ring.STAGES
    acc, weights = await_product(program, acc, weights, seen + 1, has_more & fits)
    program.v.release(last)
    program.k.wait(seen + 1, pred=has_more)
    # Its values may have that slot, too.
    weights = program.mark_weights(rows, weights, rows.begin, seen)
    p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    l, large = first_large(program, rows, weights, m, l)
    return acc, bad, p, m, l, large


@gluon.jit
def take_spans(
    c: gl.constexpr, program, rows, q_ring, tiles, seen, p, acc, m, l, large, memory
):  # fmt: skip
    """The blocks of a tile behind its first one, and the sums of their spans: `spans/steps.py`."""
    q = q_ring.pieces(tiles)
    beside, bar = large
    sums = empty_sums_of_rows(program, m, l)
    total = empty_products(program.v.COLUMNS, program.build.TOTAL_COLUMNS)
    ends = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
    for block in range(rows.begin + 1, rows.end):
        p, acc, m, l, beside, bar, sums, ends, total = step_in_spans(
            c, program, rows, block, seen, q, p, acc, m, l, beside, bar, sums, ends, total, memory
        )
        seen += 1
    if (rows.end - 1) % program.build.SPAN == 0:
        total, acc = add_span(program, rows, rows.end - 1, sums, total, memory, acc, ends)
    return p, acc, m, l, beside, sums, total, seen


@gluon.jit
def take_blocks(c: gl.constexpr, program, rows, q_ring, tiles, seen, p, m, l, large, memory):
    """The blocks of a tile behind its first one: p of the last, acc without it, m, l, what is
    beside it, with sums and products of spans if there are any, alpha, and the number of the
    last."""
    acc = empty_sums(program.v.COLUMNS)
    alpha = gl.zeros_like(m)
    if program.build.SPAN:
        p, acc, m, l, beside, sums, total, seen = take_spans(
            c, program, rows, q_ring, tiles, seen, p, acc, m, l, large, memory
        )
        return p, acc, m, l, (beside, sums, total), alpha, seen
    else:  # noqa: RET505, Gluon would go on and return both
        beside = first_beside(program, rows, m, l)
        return take_steps(c, program, rows, q_ring, tiles, seen, p, acc, m, l, beside, alpha)


@gluon.jit
def flow_through(c: gl.constexpr, program, results, q_ring, o_smem, o_desc, wrong, tile):
    """All tiles of a program, of which `tile` is the first, in one loop over their blocks: which
    rows failed, and how many blocks and tiles there were."""
    rows = Rows.of_consumer(c, program.schedule, tile)
    begun = begin_tile(c, program, rows, q_ring, 0, 0)
    if program.build.SPAN:
        return flow_in_spans(
            c, program, results, q_ring, o_smem, o_desc, wrong, tile, rows, begun,
            store_results, end_tile,
        )  # fmt: skip
    else:  # noqa: RET505, Gluon would go on and return both
        beside = first_beside(program, rows, begun[1], begun[2])
        FLOW: gl.constexpr = flow_in_constant_time if program.build.CONSTANT_TIME else flow
        return FLOW(c, program, results, q_ring, o_smem, o_desc, wrong, tile, rows, begun, beside)


@gluon.jit
def consume(c: gl.constexpr, program, results, q_ring, o_smem, o_desc, total_smem):
    """Every tile of this program; then, for the first consumer, the second pass."""
    schedule = program.schedule
    # Where there is room for the queries of two tiles, one flows into the next.
    FLOWS: gl.constexpr = program.build.Q_STAGES == 2
    s_layout: gl.constexpr = accumulator(schedule.BLOCK_KV)
    memory = total_smem
    if program.build.SPAN and program.v.COLUMNS > 64 and program.build.TOTAL_COLUMNS > 0:
        memory = in_memory_of_out(o_smem)
    seen = 0
    tiles = 0
    if program.build.PINGPONG and c == program.build.CONSUMERS - 1:
        pass_turn(0, tiles)
    wrong = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s_layout))
    tile = program.tile_queue.read(tiles)
    if program.build.ONE_LOOP:
        if tile.exists:
            wrong, seen, tiles = flow_through(
                c, program, results, q_ring, o_smem, o_desc, wrong, tile
            )
    elif tile.exists:
        rows = Rows.of_consumer(c, schedule, tile)
        seen = skip_before(c, program, rows, seen)
        p, m, l, large = begin_tile(c, program, rows, q_ring, tiles, seen)
        while tile.exists:
            p, acc, m, l, beside, alpha, seen = take_blocks(
                c, program, rows, q_ring, tiles, seen, p, m, l, large, memory
            )
            # With spans, the last block of a tile may be the first of one.
            use_acc = rows.end > 0
            if program.build.SPAN:
                use_acc = continues(program, rows, rows.end - 1)
            last, seen = skip_behind(c, program, tile, rows, seen, seen + 1)

            next_tile = program.tile_queue.read(tiles + 1)
            next_rows = Rows.of_consumer(c, schedule, next_tile)
            q_ring.release(tiles)
            next_m = m
            next_l = l
            next_large = no_large(l)
            if next_tile.exists:
                seen = skip_before(c, program, next_rows, seen)
            if FLOWS and next_tile.exists:
                acc, bad, p, next_m, next_l, next_large = change_tile(
                    c, program, next_rows, q_ring, tiles + 1, last, seen, p, acc, use_acc, alpha
                )
            else:
                acc, bad = end_tile(program, tiles, last, p, acc, use_acc, alpha)
            if program.build.SPAN:
                beside, sums, total = beside
                m, l, beside, error, acc = end_spans(
                    program, rows, sums, total, memory, m, l, beside, acc, p.dtype
                )
            else:
                error = None
            again = store_results(
                c, program, results, tile, rows, acc, m, l, beside, error, bad, o_smem, o_desc
            )
            wrong |= again << (tiles % 32)
            if not FLOWS and next_tile.exists:
                p, next_m, next_l, next_large = begin_tile(
                    c, program, next_rows, q_ring, tiles + 1, seen
                )
            tiles += 1
            tile = next_tile
            rows = next_rows
            m = next_m
            l = next_l
            large = next_large
    tma_store_wait(0)
    if program.build.SECOND_PASS:
        # What the copy engine still writes must not overtake the rows of the second pass.
        await_stores(tiles)
        program.failed.report(c, wrong)
        if c == 0:
            consume_second_pass(program, results, q_ring, seen, tiles)
