"""The second pass: rows that failed in the first, block by block, nothing overlapped.

The first pass leaves a mark in the lse of such a row:

- NaN, if its sum overflows: its fixed maximum was too low, or it is too large for `exp2_weights`.
  Now its maximum runs, and its weights are those of `exp2_weights_exact`.
- +inf, if its output is not finite and some of its blocks are masked. The tensor cores make NaN of
  0 · NaN and 0 · inf, so V may have held something that the row does not see. Now V is cleaned of
  NaN and infinities before it is multiplied, and they are given to the rows that do see them. All
  else is as in the first pass, so a row that saw nothing of the kind gets the bits it would have
  had, had V been clean.

Other rows are left alone. The first consumer does all of it, 64 rows after another, and only in
tiles that have such rows. Columns of the output come in slices of up to 128: a wider product would
not leave the registers that counting takes.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS, accumulator, left_operand, zeros
from lockstep.kernels.hopper.common.exact_weights import (
    bar_of_begun,
    first_offset,
    no_bar,
    rise,
    settle,
)
from lockstep.kernels.hopper.common.gluon_shim import (
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import issue_transposed, scale_rows
from lockstep.kernels.hopper.common.rescale import rescale_by_threads
from lockstep.kernels.hopper.common.softmax import (
    add_sums,
    exp2_weights,
    exp2_weights_exact,
    raise_maximum,
    rescale_and_add,
    thread_sums,
)
from lockstep.kernels.hopper.common.spans import (
    begin_span,
    empty_total,
    end_exact_span,
    end_of_span,
    fold_span,
    row_sums,
    span_weights,
    weights_in_span,
)
from lockstep.kernels.hopper.common.thread_numbers import of_threads
from lockstep.kernels.hopper.forward.key_parts import fold_parts, is_own, store_part
from lockstep.kernels.hopper.forward.program import (
    Rows,
    close_total,
    normalize,
)
from lockstep.kernels.hopper.forward.scheduling.tile_parts import part_of
from lockstep.kernels.hopper.forward.sending import send_block, send_queries
from lockstep.kernels.hopper.forward.spans.steps import bar_of_begun as bar_in_spans
from lockstep.kernels.hopper.forward.spans.steps import fixed_maximum
from lockstep.kernels.hopper.forward.weights import find_offset_weights, find_tops, find_weights

# What stands for a value that is not finite while it is counted. A block has up to 128 keys, so
# that a count of one kind stays below one of the next; all are exact in bf16 and fp16, and sums of
# them in fp32.
_PLUS_INF, _MINUS_INF, _NAN = gl.constexpr(2.0**-8), gl.constexpr(1.0), gl.constexpr(2.0**8)


@gluon.constexpr_function
def slice_width(columns):
    """Columns of a slice, of tiles with so many in their first part."""
    return min(columns, 128)


@gluon.jit
def product(p, v_tile, acc):
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(p, v_tile, acc, is_async=True),))


@gluon.jit
def clean_product(p, seen, v_tile, acc):
    """acc + p·V where V [BLOCK_KV, DV] may hold NaN and infinities; `seen` [ROWS, BLOCK_KV] is 1
    where a row sees a key, 0 elsewhere. Overwrites V."""
    lanes: gl.constexpr = v_tile.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    v = v_tile.load(layout)
    x = v.to(gl.float32)
    finite = gl.abs(x) < float("inf")
    v_tile.store(gl.where(finite, x, 0.0).to(v.dtype))
    fence_async_shared()
    acc = product(p, v_tile, acc)
    code = gl.where(x != x, _NAN, gl.where(x > 0, _PLUS_INF, _MINUS_INF))
    v_tile.store(gl.where(finite, 0.0, code).to(v.dtype))
    fence_async_shared()
    zero = gl.full(acc.shape, 0.0, gl.float32, acc.type.layout)
    counts = product(seen, v_tile, zero)
    plus = gl.where(counts != gl.floor(counts), float("inf"), 0.0)
    minus = gl.where(counts >= _MINUS_INF, -float("inf"), 0.0)
    nonfinite = gl.where(counts >= _NAN, float("nan"), plus + minus)
    return gl.where(counts == 0.0, acc, acc + nonfinite)


@gluon.jit
def take_scores(program, rows, q, block, seen):
    """The scores of a block [ROWS, BLOCK_KV], masked; its keys are released."""
    program.k.wait(seen)
    s = issue_transposed(q, program.k, seen, program.schedule.BLOCK_KV)
    s = warpgroup_mma_wait(0, deps=(s,))
    program.k.release(seen, program.build.CONSUMERS)
    return program.mask_scores(rows, s, block)


@gluon.jit
def _apart(i):
    """i, so that the compiler does not see what it is. What two branches compute from one number,
    ptxas has left to one of them, and the other one's product read what its registers had before
    (CUDA 12.8, head dim 80)."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_values(program, rows, weights, block, seen, acc, dtype: gl.constexpr):
    """acc [ROWS, ·] and the weighted values of a block, which are released."""
    WIDTH: gl.constexpr = acc.shape[1]
    p_layout: gl.constexpr = left_operand(WIDTH)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    program.v.wait(seen)
    if rows.is_edge(block):
        visible = gl.exp2(rows.hide(program.schedule, zeros(weights.shape[1]), block))
        visible = gl.convert_layout(visible.to(dtype), p_layout)
        acc = clean_product(p, visible, program.v.tile(seen).slice(0, WIDTH, 1), acc)
    else:
        acc = product(p, program.v.tile(_apart(seen)).slice(0, WIDTH, 1), acc)
    program.v.release(seen, program.build.CONSUMERS)
    return acc


@gluon.jit
def attend_second_pass(program, rows, q, runs, is_exact, seen):
    """Rows against their keys and a slice of the values: acc [ROWS, ·], m [ROWS], l [ROWS, 4] and
    what is beside it, and how many blocks were seen so far."""
    BLOCK_KV: gl.constexpr = program.schedule.BLOCK_KV
    WIDTH: gl.constexpr = slice_width(program.v.tiles_smem.shape[5])
    s_layout: gl.constexpr = accumulator(BLOCK_KV)
    scale = program.score_scale()
    zero = zeros(BLOCK_KV)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l = thread_sums(zero)
    bar = l
    offset = l
    residue = l
    acc = zeros(WIDTH)
    for block in range(rows.begin, rows.end):
        s = take_scores(program, rows, q, block, seen)
        exact = gl.expand_dims(is_exact, 1)
        if program.build.EXACT:
            begins = m == -float("inf")
            if program.schedule.HAS_LEFT:
                rises = runs | rows.rise(program.schedule, block)
                s, top = find_tops(program, rows, s, block)
                m, offset, factors = rise(s, m, l, offset, scale, rises, is_exact, top)
                acc = rescale_by_threads(acc, factors)
                l = l * factors
                bar = no_bar(bar, rises)
            else:
                rises = runs | (begins & (block <= rows.inner_begin))
                s, top = find_tops(program, rows, s, block)
                m, alpha = raise_maximum(s, m, scale, rises, top)
                acc = scale_rows(acc, alpha)
                # Rows whose maximum rises have no bar.
                bar = no_bar(bar, runs | begins)
                offset = gl.where(bar == float("inf"), first_offset(m, l, scale), offset)
            weights, _ = find_offset_weights(program, rows, s, block, offset)
            if not program.build.CAPS_LATE:
                weights = gl.where(exact, exp2_weights_exact(s, m, scale), weights)
            part = thread_sums(weights)
            if not program.schedule.HAS_LEFT:
                l = rescale_and_add(l, alpha, gl.zeros_like(l))
            scaled, l, beside = settle(weights, (acc,), part, l, (bar, offset, residue), None)
            acc = scaled[0]
            bar, offset, residue = beside
            keys = rows.n_keys(program.schedule)
            bar = bar_of_begun(bar, part, keys, BLOCK_KV)
            if program.schedule.HAS_LEFT:
                bar = no_bar(bar, rows.rise(program.schedule, block + 1))
        else:
            s, top = find_tops(program, rows, s, block)
            m, alpha = raise_maximum(s, m, scale, True, top)
            if program.build.CAPS_LATE:
                weights, _ = find_weights(program, rows, s, block, m)
            else:
                exact_weights = exp2_weights_exact(s, m, scale)
                weights = gl.where(exact, exact_weights, exp2_weights(s, m, scale))
            l = add_sums(l, alpha, weights)
            acc = scale_rows(acc, alpha)
        acc = add_values(program, rows, weights, block, seen, acc, q[0].dtype)
        seen += 1
    beside = residue
    if program.build.EXACT:
        beside = (bar, offset, residue)
    return acc, m, l, beside, seen


@gluon.jit
def attend_parts(c, program, results, tile, q, runs, is_exact, seen, first_column, own):
    """A slice of out [ROWS, ·], lse, m and l of rows whose keys may have several parts, and how
    many blocks were seen so far; `own`: whether the tile is this program's."""
    WIDTH: gl.constexpr = slice_width(program.v.tiles_smem.shape[5])
    m = gl.full([ROWS], 0.0, gl.float32, is_exact.type.layout)
    l = m
    lse = m
    out = (zeros(WIDTH),)
    for part in range(tile.keys.n_parts):
        part_tile = part_of(program.schedule, tile, part)
        rows = Rows.of_consumer(c, program.schedule, part_tile)
        acc, m, l, beside, seen = attend_second_pass(program, rows, q, runs, is_exact, seen)
        out, lse, m, l = normalize(
            program, results, part_tile, c, rows, (acc,), m, l, beside, is_exact, None, q[0].dtype
        )
        # Rows of a tile that another program folded are not this one's to change.
        mask = (tile.keys.n_parts > 1) & own
        store_part(c, program, results, part_tile, out, lse, (first_column,), mask)
    if tile.keys.n_parts > 1:
        await_warps()
        out, lse = fold_parts(c, program, results, tile, out, lse, (first_column,), False)
    return out, lse, m, l, seen


@gluon.jit
def attend_spans(program, rows, q, seen):
    """`attend_second_pass` of builds with spans: acc, m, l, r and error of the total."""
    BLOCK_KV: gl.constexpr = program.schedule.BLOCK_KV
    WIDTH: gl.constexpr = program.v.COLUMNS
    FIXED_MAX: gl.constexpr = program.build.FIXED_MAX
    scale = program.score_scale()
    zero = zeros(BLOCK_KV)
    no_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, zero.type.layout))
    # What the rows of a span begin with.
    first_m = no_max
    m = no_max
    l = thread_sums(zero)
    bar = l
    l, beside = begin_span(m, l, scale)
    acc = zeros(WIDTH)
    maxima, total = empty_total(m, l, acc)
    for block in range(rows.begin, rows.end):
        s = take_scores(program, rows, q, block, seen)
        if FIXED_MAX and block <= gl.maximum(rows.begin, rows.inner_begin):
            begins = first_m == -float("inf")
            first_m = fixed_maximum(program, rows, s, block, first_m)
            found = bar_in_spans(program, rows, span_weights(s, first_m, scale), block, l)
            bar = gl.where(of_threads(gl.where(begins, 1.0, 0.0), l) > 0.0, found, bar)
            is_empty = of_threads(gl.where(m == -float("inf"), 1.0, 0.0), l) > 0.0
            m = gl.where(m == -float("inf"), first_m, m)
            beside = (gl.where(is_empty, first_offset(m, l, scale), beside[0]), beside[1])
        if FIXED_MAX:
            weights, m, l, beside, factors = weights_in_span(s, m, l, beside, bar, scale)
            acc = rescale_by_threads(acc, factors)
        else:
            m, alpha = raise_maximum(s, m, scale, True)
            weights = span_weights(s, m, scale)
            l = add_sums(l, alpha, weights)
            acc = scale_rows(acc, alpha)
        acc = add_values(program, rows, weights, block, seen, acc, q[0].dtype)
        seen += 1
        if (block + 1) % program.build.SPAN == 0 or block + 1 == rows.end:
            residue = beside[1]
            if FIXED_MAX:
                l, residue, factors = end_exact_span(m, l, beside, scale)
                acc = rescale_by_threads(acc, factors)
            residue, error = end_of_span(m, residue, scale, FIXED_MAX, q[0].dtype)
            maxima, total = fold_span(maxima, total, m, error, (l, residue, acc), scale)
            m = first_m
            l, beside = begin_span(m, l, scale)
            acc = zeros(WIDTH)
    l, r = row_sums(m, total[0], total[1])
    return (total[2],), maxima[0], l, r, maxima[1], seen


@gluon.jit
def replace_rows(results, out, row, chosen, first_column):
    """Store the `chosen` rows of out [ROWS, ·], columns of the tensor from `first_column` on; `row`
    [ROWS] counts rows of the tensor."""
    layout: gl.constexpr = out.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = first_column + gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    column = gl.expand_dims(column, 0)
    start = gl.expand_dims(gl.convert_layout(row.to(gl.int64), rows), 1) * results.Dv
    mask = gl.expand_dims(gl.convert_layout(chosen, rows), 1) & (column < results.Dv)
    gl.store(results.out_ptr + start + column, out, mask=mask)


@gluon.jit
def consume_second_pass(program, results, q_ring, seen, tiles):
    """The second pass of the first consumer, which saw so many blocks and tiles in the first."""
    CONSUMERS: gl.constexpr = program.build.CONSUMERS
    SLICE: gl.constexpr = slice_width(program.v.tiles_smem.shape[5])
    schedule = program.schedule
    sent_q = tiles
    # The first pass ended with a tile that did not exist.
    tiles += 1
    tile = program.tile_queue.read(tiles, CONSUMERS)
    while tile.exists:
        for c in range(CONSUMERS):
            rows = Rows.of_consumer(c, schedule, tile)
            number = tile.q_idx + c * ROWS + gl.arange(0, ROWS, rows.row_end.type.layout)
            row = results.place(schedule, tile, number)
            exists = schedule.exist(tile, number)
            mark = gl.load(results.lse_ptr + row, mask=exists, other=0.0)
            is_exact = mark != mark
            chosen = is_exact | (mark == float("inf"))
            if schedule.PARTS:
                own = is_own(program, results, tile, c)
                chosen = chosen & own
            runs = is_exact
            if not program.build.FIXED_MAX:
                runs = runs | True
            q_ring.wait(sent_q)
            q = q_ring.pieces(sent_q)
            for first_column in range(0, program.v.COLUMNS, SLICE):
                if program.build.SPAN:
                    acc, m, l, r, error, seen = attend_spans(program, rows, q, seen)
                    out, lse, m, l = close_total(
                        program, results, tile, c, rows, acc, m, l, r, error
                    )
                elif schedule.PARTS:
                    out, lse, m, l, seen = attend_parts(
                        c, program, results, tile, q, runs, is_exact, seen, first_column, own
                    )
                else:
                    acc, m, l, beside, seen = attend_second_pass(
                        program, rows, q, runs, is_exact, seen
                    )
                    out, lse, m, l = normalize(
                        program, results, tile, c, rows, (acc,), m, l, beside, is_exact,
                        None, q[0].dtype,
                    )  # fmt: skip
                out = out[0].to(q[0].dtype)
                replace_rows(results, out, row, chosen, first_column)
                results.store_statistics(row, lse, m, l, chosen)
            q_ring.release(sent_q)
            sent_q += 1
        tiles += 1
        tile = program.tile_queue.read(tiles, CONSUMERS)


@gluon.jit
def produce_second_pass(program, q_desc, k_desc, v_desc, q_ring, sent, tiles):
    """The producer's side of it."""
    SLICE: gl.constexpr = slice_width(program.v.tiles_smem.shape[5])
    schedule = program.schedule
    sent_q = tiles
    tiles += 1
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        for c in range(program.build.CONSUMERS):
            q_idx = tile.q_idx + c * ROWS
            if q_desc is not None:
                send_queries(schedule, q_ring, sent_q, q_desc, tile, q_idx)
            sent_q += 1
            begin, end = schedule.blocks(tile, q_idx, ROWS)
            for first_column in range(0, program.v.COLUMNS, SLICE):
                for block in range(begin, end):
                    send_block(program, k_desc, v_desc, tile, block, sent, first_column)
                    sent += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)
