"""The tiles of a consumer in one loop over the blocks of all of them.

`steps.py` has a loop for the blocks of one tile behind its first, and `consumer.change_tile` has a
copy of that code for the first block of the next. Where tiles are short, warps wait for
instructions, and here there are fewer: every block but the first of a program goes through the same
loop, and what a new tile needs besides stands in branches of it.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.exact_weights import (
    exceeds,
    first_bar,
    first_offset,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import empty_sums, n_pieces
from lockstep.kernels.hopper.common.softmax import raise_maximum, round_pairs
from lockstep.kernels.hopper.forward.products import (
    await_product,
    end_tile,
    issue_product,
    issue_scores,
)
from lockstep.kernels.hopper.forward.program import Rows
from lockstep.kernels.hopper.forward.skipping import skip_behind
from lockstep.kernels.hopper.forward.stores import store_results
from lockstep.kernels.hopper.forward.weights import find_offset_weights, find_tops


@gluon.jit
def find_next(c: gl.constexpr, program, q_ring, tile, rows, block, seen, tiles, changes):
    """What comes behind `block` of a tile, the last one if the tile `changes`: the number of the
    block whose values are multiplied next; then tile, rows, block, and numbers of both."""
    held = seen
    next_tile = tile
    next_rows = rows
    next_seen = seen + 1
    next_block = block + 1
    next_tiles = tiles
    if changes:
        held, next_seen = skip_behind(c, program, tile, rows, seen, next_seen)
        next_tiles = tiles + 1
        next_tile = program.tile_queue.read(next_tiles)
        next_rows = Rows.of_consumer(c, program.schedule, next_tile)
        q_ring.release(tiles)
        next_block = next_rows.begin
    return held, next_tile, next_rows, next_block, next_seen, next_tiles


@gluon.jit
def first_maxima(program, rows, s, block):
    """Scores of the first block of a tile, and their maxima [ROWS]."""
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    none = gl.full([s.shape[0]], -float("inf"), gl.float32, layout)
    s, top = find_tops(program, rows, s, block)
    m, _alpha = raise_maximum(s, none, program.score_scale(), True, top)
    return s, m


@gluon.jit
def flow(
    c: gl.constexpr, program, results, q_ring, o_smem, o_desc, wrong, tile, rows, begun, beside
):  # fmt: skip
    """All tiles of a program, of which `tile` has begun (`consumer.begin_tile`): which rows failed,
    and how many blocks and tiles there were."""
    VOTES_LATE: gl.constexpr = program.v.COLUMNS <= 64
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
    TOGETHER: gl.constexpr = program.build.CONSUMERS == 2
    schedule = program.schedule
    scale = program.score_scale()
    acc = empty_sums(program.v.COLUMNS)
    p, m, l, _large = begun
    tiles = 0
    seen = 0
    # The block whose values are multiplied next, and the one that p is of: the same, if there are
    # rows.
    held = 0
    block = rows.begin
    goes_on = tile.exists
    while goes_on:
        changes = block + 1 >= rows.end
        held, next_tile, next_rows, next_block, next_seen, next_tiles = find_next(
            c, program, q_ring, tile, rows, block, seen, tiles, changes
        )
        goes_on = next_tile.exists
        if goes_on:
            if changes:
                q_ring.wait(next_tiles)
                program.k.wait(next_seen)
            s = issue_scores(c, program, q_ring.pieces(next_tiles), next_seen)
            acc = issue_product(c, program, p, acc, held, block > rows.begin)
            s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
            program.k.release(next_seen)
            s = program.mask_scores(next_rows, s, next_block)
            bar, offset, residue = beside
            next_m = m
            next_offset = offset
            if changes:
                s, next_m = first_maxima(program, next_rows, s, next_block)
                next_offset = first_offset(next_m, l, scale)
            weights, part = find_offset_weights(
                program, next_rows, s, next_block, next_offset, True
            )
            any_exceeds = None
            if not VOTES_LATE:
                any_exceeds = exceeds(part, bar)
            # The block of K after that may have to wait for the slot of V that is still in use
            # here, where blocks were skipped between the two tiles.
            has_more = next_block + 1 < next_rows.end
            fits = next_seen - held < program.v.ring.STAGES
            acc, weights = await_product(program, acc, weights, next_seen + 1, has_more & fits)
            program.v.release(held)
            p = gl.convert_layout(round_pairs(weights, p.dtype), p.type.layout)
            if changes:
                program.k.wait(next_seen + 1, pred=has_more)
                again = store_results(
                    c, program, results, tile, rows, acc, m, l, beside, None, 0, o_smem, o_desc
                )
                wrong |= again << (tiles % 32)
                l = part
                next_bar = part
                if has_more:
                    next_bar = first_bar(part, next_rows.row_end, schedule.BLOCK_KV)
                beside = (next_bar, next_offset, gl.zeros_like(residue))
            else:
                acc, l, beside = settle(weights, acc, part, l, beside, any_exceeds, TOGETHER)
            m = next_m
            tile = next_tile
            rows = next_rows
            block = next_block
            tiles = next_tiles
            seen = next_seen
    acc, bad = end_tile(program, tiles, held, p, acc, block > rows.begin, m)
    again = store_results(
        c, program, results, tile, rows, acc, m, l, beside, None, bad, o_smem, o_desc
    )
    wrong |= again << (tiles % 32)
    return wrong, seen + 1 + (rows.tile_end - rows.end), tiles + 1
