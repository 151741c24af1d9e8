"""A consumer: one warpgroup, 64 query rows of every tile, P in registers.

It runs one block ahead of itself: the scores of block j+1 are on the tensor cores before the
product of block j, and the exponentials of block j+1 run under that product. The last block of a
tile is followed in the same way by the first of the next, and the tile's results are written after
that (`turn_over`). Consumers may pass a turn around, so that one is at its exponentials while
another has the tensor cores.

A program makes one lap over its tiles. If rows went wrong in it, `second_lap.py` mends them.
"""

from __future__ import annotations

from lockstep.kernels.hopper.channel import await_stores, await_turn, pass_turn
from lockstep.kernels.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.second_lap import consume_again
from lockstep.kernels.hopper.softmax import (
    LARGE,
    OVERFLOW,
    add_sums,
    compute_here,
    multiply_rows,
    raise_maximum,
    round_tops,
    thread_sums,
    thread_tops,
    weigh,
)
from lockstep.kernels.hopper.team import ROWS, Rows, normalize


@gluon.jit
def skip(c: gl.constexpr, team, i):
    """Let a block of keys pass that other consumers need and this one does not."""
    team.k.wait(i)
    if team.build.TURNS:
        await_turn(c, i)
        pass_turn((c + 1) % team.build.CONSUMERS, i)
    team.k.release(i)
    team.v.wait(i)
    team.v.release(i)


@gluon.jit
def issue_scores(c: gl.constexpr, team, q, i):
    """Q·Kᵀ of the i-th block on its way to the tensor cores."""
    BLOCK_KV: gl.constexpr = team.schedule.BLOCK_KV
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    if team.build.TURNS:
        await_turn(c, i)
    return warpgroup_mma(q, team.k.tile(i).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def issue_product(c: gl.constexpr, team, p, acc, i):
    """P·V of the i-th block behind it; the next consumer may have the tensor cores then."""
    team.v.wait(i)
    acc = warpgroup_mma(p, team.v.tile(i), acc, is_async=True)
    if team.build.TURNS:
        pass_turn((c + 1) % team.build.CONSUMERS, i)
    return acc


@gluon.jit
def weigh_first(team, rows, s, block):
    """Weights [ROWS, BLOCK_KV] of the first block that rows see, their m, l and tops."""
    scale = team.score_scale()
    s = team.see(rows, s, block)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    m, _alpha = raise_maximum(s, m, scale, True)
    weights = weigh(s, m, scale)
    return weights, m, thread_sums(weights), thread_tops(weights)


@gluon.jit
def await_product(team, acc, weights, next_block, expected):
    """acc of a product under way, and the weights computed meanwhile.

    ptxas moves the wait above the exponentials unless a block boundary stands between: waiting for
    the next block of K, which is needed next anyway, is one. The weights go through the wait
    because the left operand, which the product reads, gives them its registers."""
    team.k.wait(next_block, pred=expected)
    return warpgroup_mma_wait(0, deps=(acc, weights))


@gluon.jit
def step(c: gl.constexpr, team, rows, block, seen, q, p, acc, m, l, tops):
    """Scores and weights of `block`, and the product of the block before, whose weights are `p`.

    The block of K is there already; the one after it is, too, on return."""
    scale = team.score_scale()
    s = issue_scores(c, team, q, seen + 1)
    acc = issue_product(c, team, p, acc, seen)
    s = warpgroup_mma_wait(1, deps=(s,))
    team.k.release(seen + 1)
    s = team.see(rows, s, block)
    if team.build.SETTLED:
        # Up to inner_begin, rows may yet see their first key.
        if team.schedule.HAS_LEFT and block <= rows.inner_begin:
            m, alpha = raise_maximum(s, m, scale, m == -float("inf"))
            l = multiply_rows(l, alpha)
            acc = warpgroup_mma_init(multiply_rows(warpgroup_mma_wait(0, deps=(acc,)), alpha))
        weights = weigh(s, m, scale)
        l += thread_sums(weights)
        tops = gl.maximum(tops, thread_tops(weights))
        acc, weights = await_product(team, acc, weights, seen + 2, block + 1 < rows.end)
    else:
        m, alpha = raise_maximum(s, m, scale, True)
        weights = weigh(s, m, scale)
        l = add_sums(l, alpha, weights)
        acc, weights = await_product(team, acc, weights, seen + 2, block + 1 < rows.end)
        acc = multiply_rows(acc, alpha)
    team.v.release(seen)
    return gl.convert_layout(weights.to(p.dtype), p.type.layout), acc, m, l, tops


@gluon.jit
def start(c: gl.constexpr, team, rows, q_channel, tiles, seen):
    """The first block of a tile by itself: p, m, l, tops. The block of K after it is there on return."""
    DV: gl.constexpr = team.v.tiles.shape[5]
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    q_channel.wait(tiles)
    q = q_channel.tile(tiles)
    team.k.wait(seen)
    s = issue_scores(c, team, q, seen)
    if team.build.TURNS:
        pass_turn((c + 1) % team.build.CONSUMERS, seen)
    s = warpgroup_mma_wait(0, deps=(s,))
    team.k.release(seen)
    weights, m, l, tops = weigh_first(team, rows, s, rows.begin)
    team.k.wait(seen + 1, pred=rows.begin + 1 < rows.end)
    return gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2)), m, l, tops


@gluon.jit
def turn_over(c: gl.constexpr, team, rows, q_channel, tiles, last, seen, p, acc):
    """The product of the last block of a tile, and the first block, `seen`, of the next one, whose
    `rows` these are: acc, then p, m, l and tops of the next."""
    q_channel.wait(tiles)
    team.k.wait(seen)
    s = issue_scores(c, team, q_channel.tile(tiles), seen)
    acc = issue_product(c, team, p, acc, last)
    s = warpgroup_mma_wait(1, deps=(s,))
    team.k.release(seen)
    weights, m, l, tops = weigh_first(team, rows, s, rows.begin)
    # Else ptxas may put off these sums, and with them the exponentials, until after the product.
    l = compute_here(l)
    # The block of K after that may have to wait for the slot of V that is still in use here, where
    # blocks were skipped between the two tiles.
    has_more = rows.begin + 1 < rows.end
    fits = seen - last < team.v.STAGES
    acc, weights = await_product(team, acc, weights, seen + 1, has_more & fits)
    team.v.release(last)
    team.k.wait(seen + 1, pred=has_more)
    return acc, gl.convert_layout(weights.to(p.dtype), p.type.layout), m, l, tops


@gluon.jit
def end(team, last, p, acc):
    """The product of the last block of a tile by itself: acc."""
    team.v.wait(last)
    acc = warpgroup_mma(p, team.v.tile(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    team.v.release(last)
    return acc


@gluon.jit
def store_columns(team, tile, first_row, column: gl.constexpr, out, o_smem, o_desc):
    """Send columns of the output on their way through shared memory."""
    tma_store_wait(0)
    o = o_smem.index(0)
    o.reshape([ROWS, out.shape[1]]).store(out)
    fence_async_shared()
    tma_store(o_desc, team.schedule.q_coordinates(tile, first_row, column), o)


@gluon.jit
def finish(c: gl.constexpr, team, results, tile, rows, acc, m, l, tops, o_smem, o_desc):
    """Write the results of a tile; 1 for rows [ROWS] that are to be computed again, else 0."""
    OUT_COLUMNS: gl.constexpr = o_desc.block_shape[4]
    row_layout: gl.constexpr = m.type.layout
    r = round_tops(l, tops) if team.build.SETTLED else l
    is_large = (gl.abs(m) * team.score_scale() >= LARGE) & (m > -float("inf"))
    out, lse, m, l = normalize(team, results, tile, acc, m, l, r, None)
    first_row = tile.q_idx + c * ROWS
    q_idx = first_row + gl.arange(0, ROWS, row_layout)
    exists = q_idx < tile.len_q
    wrong = gl.full([ROWS], 0, gl.int32, row_layout)
    if team.build.SECOND_LAP and rows.have_edges():
        total = gl.convert_layout(gl.sum(out, 1), row_layout)
        stray = exists & ((gl.abs(total) < float("inf")) == 0)
        lse = gl.where(stray, float("inf"), lse)
        wrong = gl.where(stray, 1, 0)
    if team.build.SECOND_LAP:
        ran_away = exists & (is_large | ((l < OVERFLOW) == 0))
        lse = gl.where(ran_away, float("nan"), lse)
        wrong = wrong | gl.where(ran_away, 1, 0)
    out = out.to(o_desc.dtype)
    if out.shape[1] == OUT_COLUMNS:
        store_columns(team, tile, first_row, 0, out, o_smem, o_desc)
    else:
        left, right = out.reshape([ROWS, 2, out.shape[1] // 2]).permute((0, 2, 1)).split()
        store_columns(team, tile, first_row, 0, left, o_smem, o_desc)
        store_columns(team, tile, first_row, OUT_COLUMNS, right, o_smem, o_desc)
    results.store_statistics(results.row(tile, q_idx), lse, m, l, exists)
    return wrong


@gluon.jit
def consume(c: gl.constexpr, team, results, q_channel, o_smem, o_desc):
    """Every tile of this program; then, for the first consumer, what went wrong once more."""
    schedule = team.schedule
    DV: gl.constexpr = team.v.tiles.shape[5]
    # Where there is room for the queries of two tiles, one flows into the next.
    FLOWS: gl.constexpr = team.build.Q_STAGES == 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    seen = 0
    tiles = 0
    if team.build.TURNS and c == team.build.CONSUMERS - 1:
        pass_turn(0, tiles)
    wrong = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s_layout))
    tile = team.board.read(tiles)
    if tile.exists:
        rows = Rows.of_consumer(c, schedule, tile)
        for _ in range(rows.tile_begin, rows.begin):
            skip(c, team, seen)
            seen += 1
        p, m, l, tops = start(c, team, rows, q_channel, tiles, seen)
        while tile.exists:
            acc = gl.zeros([ROWS, DV], gl.float32, o_layout)
            q = q_channel.tile(tiles)
            for block in range(rows.begin + 1, rows.end):
                p, acc, m, l, tops = step(c, team, rows, block, seen, q, p, acc, m, l, tops)
                seen += 1
            last = seen
            seen += 1
            for _ in range(rows.end, rows.tile_end):
                skip(c, team, seen)
                seen += 1

            next_tile = team.board.read(tiles + 1)
            next_rows = Rows.of_consumer(c, schedule, next_tile)
            q_channel.release(tiles)
            next_m = m
            next_l = l
            next_tops = tops
            if next_tile.exists:
                for _ in range(next_rows.tile_begin, next_rows.begin):
                    skip(c, team, seen)
                    seen += 1
            if FLOWS and next_tile.exists:
                acc, p, next_m, next_l, next_tops = turn_over(
                    c, team, next_rows, q_channel, tiles + 1, last, seen, p, acc
                )
            else:
                acc = end(team, last, p, acc)
            again = finish(c, team, results, tile, rows, acc, m, l, tops, o_smem, o_desc)
            wrong |= again << (tiles % 32)
            if not FLOWS and next_tile.exists:
                p, next_m, next_l, next_tops = start(c, team, next_rows, q_channel, tiles + 1, seen)
            tiles += 1
            tile = next_tile
            rows = next_rows
            m = next_m
            l = next_l
            tops = next_tops
    tma_store_wait(0)
    if team.build.SECOND_LAP:
        # What the copy engine still writes must not overtake the rows of the second lap.
        await_stores(tiles)
        team.lap.end(c, wrong)
        if c == 0:
            consume_again(team, results, q_channel, seen, tiles)
