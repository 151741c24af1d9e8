"""The tiles of a consumer in one loop over the blocks of all of them, in constant time: as
`flow.py` does it, with the softmax of `constant_time.py`."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import empty_sums, halves, n_pieces, scale_all
from lockstep.kernels.hopper.common.softmax import rescale_and_add
from lockstep.kernels.hopper.forward import constant_time
from lockstep.kernels.hopper.forward.flow import find_next
from lockstep.kernels.hopper.forward.products import (
    await_product_between,
    end_tile,
    issue_product,
    issue_scores,
)
from lockstep.kernels.hopper.forward.stores import store_results


@gluon.jit
def flow_in_constant_time(
    c: gl.constexpr, program, results, q_ring, o_smem, o_desc, wrong, tile, rows, begun, rounding
):  # fmt: skip
    """All tiles of a program, of which `tile` has begun (`consumer.begin_tile`): `wrong`, as no
    row fails, and how many blocks and tiles there were."""
    PRODUCTS: gl.constexpr = n_pieces(program.v.COLUMNS)
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
            bad = tiles
            if changes:
                bad = program.first_bad_key(tiles)
            s = warpgroup_mma_wait(PRODUCTS, deps=(s,))
            s = program.mask_scores(next_rows, s, next_block)
            # Of a new tile, rows have seen nothing, and alpha has no meaning.
            before = gl.where(changes, constant_time.NO_MAX, m)
            next_m, next_rounding, unit, offset, alpha = constant_time.raise_maximum(
                s, before, rounding, scale, program.k.tiles_smem.dtype
            )
            left, right = halves(s)
            left = constant_time.weights_of(left, unit, offset)
            part = constant_time.sums_like(l, left)
            # `flow.py` says when the next block of K cannot be waited for here.
            has_more = next_block + 1 < next_rows.end
            fits = next_seen - held < program.v.ring.STAGES
            acc, left, right = await_product_between(
                program, acc, left, right, next_seen + 1, has_more & fits
            )
            right = constant_time.weights_of(right, unit, offset)
            part += constant_time.sums_like(l, right)
            program.k.release(next_seen)
            program.v.release(held)
            weights = constant_time.whole(left, right, s)
            p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
            if changes:
                program.k.wait(next_seen + 1, pred=has_more)
                store_results(
                    c, program, results, tile, rows, acc, m, l, rounding, None, bad, o_smem, o_desc
                )
                l = part
            else:
                acc = scale_all(acc, alpha)
                l = rescale_and_add(l, alpha, part)
            m = next_m
            rounding = next_rounding
            tile = next_tile
            rows = next_rows
            block = next_block
            tiles = next_tiles
            seen = next_seen
    acc, bad = end_tile(program, tiles, held, p, acc, block > rows.begin, m)
    store_results(c, program, results, tile, rows, acc, m, l, rounding, None, bad, o_smem, o_desc)
    return wrong, seen + 1 + (rows.tile_end - rows.end), tiles + 1
