"""Queries that are shared out: several loops for the same keys, where a sequence has few key tiles.

A program owns keys, and there are fewer key tiles than SMs where there are few keys (those of a
text that many pixels see), or few heads of keys. There each loop is over some of the query heads
that share the keys, or over a span of their query tiles. Its dk and dv go to memory in fp32, in the
order of registers, and `finish_keys` adds up those of all shares, from the first to the last.

How queries are shared out depends on a sequence's own lengths (`divide_queries`) and never on the
batch, nor on whether it is packed: what is not known to the host is found on the device. A sequence
has a slot for each share of each of its key tiles; `rows.py` counts those of packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.hopper.backward.groups import ShareRule
from lockstep.kernels.hopper.backward.sizes import find_sequence
from lockstep.kernels.hopper.common.accumulator import ROWS, as_registers, from_registers
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import n_pieces, piece_start, piece_width
from lockstep.kernels.launch import unspecialized
from lockstep.problem import AttentionProblem

# Queries are shared out where a sequence has at most so many loops. It gets about so many, if
# these have as many steps each, and more where there are more of them to win less from.
FEW_LOOPS, FEW_LOOPS_WITH_MASK = 64, 128
ENOUGH_LOOPS, ENOUGH_LOOPS_WITH_MASK = 528, 264
LEAST_STEPS, LEAST_STEPS_WITH_MASK = 10, 24
# Sequences of at most so many loops get a few shares in any case, if these have so many steps: very
# short ones under a mask, and without one those of grouped heads of which the last round of loops
# leaves an eighth of an H200's SMs or more without one.
MORE_LOOPS, MORE_LOOPS_WITH_MASK = 400, 14
MORE_SHARES, MORE_SHARES_WITH_MASK = 3, 4
MORE_STEPS, MORE_STEPS_WITH_MASK = 40, 13
ROUND_LOOPS = 132
# More than there are tiles.
MANY_TILES = 1 << 24


@dataclass(frozen=True)
class Shares:
    """What a launch has to know of the shares of its sequences."""

    slots: int  # of a head of keys; of packed sequences at most, and of all of them
    capacity: int  # how many of these may be shares of several
    heads: int  # of a share, and so on: `divide_queries` of a sequence of full length
    span_tiles: int
    spans: int
    n_shares: int


def shares_of(
    problem: AttentionProblem, kv_slots: int, block_q: int, block_kv: int
) -> Shares | None:
    """How queries are shared out, if any may be, where a head of keys would have so many slots."""
    rule = rule_of(problem, block_q, block_kv)
    q_tiles, Hkv, group = triton.cdiv(problem.Sq, block_q), problem.Hkv, problem.Hq // problem.Hkv

    def divide(kv_tiles: int) -> tuple[int, int, int, int]:
        found = divide_queries.fn(q_tiles, kv_tiles, Hkv, group, rule)
        heads, span_tiles, by_heads, spans = found
        return heads, span_tiles, spans, by_heads * spans

    full = divide(triton.cdiv(problem.Skv, block_kv))
    if problem.layout == "varlen":
        # One build serves all lengths. Rows that no sequence owns make one more.
        if group == 1 and rule.most_spans == 1:
            return None
        q_tiles, sequences = problem.Sq // block_q + problem.B + 1, problem.B + 1
    elif problem.has_kv_lens:
        # The fewer keys, the more shares.
        if divide(1)[-1] == 1:
            return None
        sequences = 1
    else:
        n = kv_slots * full[-1]
        return Shares(n, n, *full) if n > kv_slots else None
    # As `divide_queries` has it: about so many loops, and no fewer steps to a share than those; or
    # a few shares of each loop. By steps alone, there is a bound of both.
    steps = group * q_tiles
    capacity = min(rule.enough_loops * sequences, steps) // Hkv + rule.more_shares * kv_slots
    most = triton.cdiv(steps * max(rule.more_loops, rule.more_steps), rule.more_steps)
    capacity = max(min(capacity, triton.cdiv(most, Hkv)), 1)
    return Shares(kv_slots + capacity, capacity, *full)


def rule_of(problem: AttentionProblem, block_q: int, block_kv: int) -> ShareRule:
    """How queries are shared out under this mask."""
    left, right = problem.window
    if left is None and right is None:
        loops, seen, most_spans = (FEW_LOOPS, ENOUGH_LOOPS, LEAST_STEPS), MANY_TILES, MANY_TILES
        more = (MORE_SHARES if problem.Hq > problem.Hkv else 0, MORE_LOOPS, MORE_STEPS)
    else:
        seen = MANY_TILES
        if left is not None and right is not None:
            seen = min(triton.cdiv(left + right + block_kv, block_q) + 1, MANY_TILES)
        # Spans would differ in how much they see: shares have all tiles of some heads.
        most_spans = 1
        loops = (FEW_LOOPS_WITH_MASK, ENOUGH_LOOPS_WITH_MASK, LEAST_STEPS_WITH_MASK)
        more = (MORE_SHARES_WITH_MASK, MORE_LOOPS_WITH_MASK, MORE_STEPS_WITH_MASK)
    return ShareRule(*loops, *more, ROUND_LOOPS, seen, most_spans)


@triton.jit
def divide_queries(q_tiles, kv_tiles, Hkv, group, rule):
    """How the queries of each key tile of a sequence are shared out, by its tiles and heads alone:
    heads of a share, query tiles of a span, how many shares heads make, and how many spans. A key
    tile sees at most `rule.seen_tiles` query tiles. The host computes this, too."""
    loops = kv_tiles * Hkv
    steps = group * min(q_tiles, rule.seen_tiles)
    wanted = min(rule.enough_loops // max(loops, 1), steps // max(rule.least_steps, loops))
    wanted = wanted * (loops <= rule.few_loops)
    room = (loops + rule.round_loops - 1) // rule.round_loops * rule.round_loops
    is_uneven = (loops <= rule.more_loops) & (8 * loops < 7 * room)
    wanted = max(wanted, max(min(rule.more_shares, steps // rule.more_steps) * is_uneven, 1))
    # Spans are about equal; heads may make some shares longer than others.
    heads = (group + wanted - 1) // wanted
    is_by_spans = (group % wanted > 0) & (wanted <= min(q_tiles, rule.most_spans))
    heads = heads + (group - heads) * is_by_spans
    by_heads = (group + heads - 1) // heads
    spans = min(wanted // by_heads, rule.most_spans)
    span_tiles = max((q_tiles + spans - 1) // spans, 1)
    return heads, span_tiles, by_heads, max((q_tiles + span_tiles - 1) // span_tiles, 1)


@gluon.jit
def store_share(
    shares_ptr, number, pieces, FIRST: gl.constexpr, COLUMNS: gl.constexpr, ALL: gl.constexpr
):  # fmt: skip
    """A warpgroup: pieces of dk or dv, COLUMNS of ALL columns of both from FIRST on, to be added up
    by `finish_keys`. `number` counts blocks of ROWS keys through all shares."""
    to = shares_ptr + (number.to(gl.int64) * (ROWS * ALL) + ROWS * FIRST)
    for p in gl.static_range(len(pieces)):
        x = as_registers(pieces[p])
        rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        columns = gl.arange(0, 256, gl.SliceLayout(0, x.type.layout))
        at = gl.expand_dims(rows, 1) * 256 + gl.expand_dims(columns, 0)
        gl.store(to + (ROWS * piece_start(COLUMNS, p) + at), x)


@triton.jit
def _fold(
    from_ptr, to_ptr, is_row, n_shares, step, factor, WIDTH: tl.constexpr, FIRST: tl.constexpr,
    D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Columns from FIRST on, WIDTH of them, of 64 rows: the sum of all shares, `step` apart."""
    at = from_ptr + 64 * FIRST + tl.arange(0, 64 * WIDTH)
    x = tl.load(at)
    for _ in range(1, n_shares):
        at += step
        x += tl.load(at)
    x = from_registers(x, WIDTH)
    if MASKED:
        # Whatever is not finite is NaN: `nonfinite.py`.
        x += x * 0.0
    d = FIRST + tl.arange(0, WIDTH)
    x = (x * factor).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr[:, None] + d[None, :], x, mask=is_row[:, None] & (d < D)[None, :])


@unspecialized(triton.jit, any_address=("bounds_ptr", "plan_ptr"))
def finish_keys(
    shares_ptr, dk_ptr, dv_ptr, bounds_ptr, plan_ptr, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, Hkv, B, Skv, kv_slots, n_shares, scale,
    D: tl.constexpr, DV: tl.constexpr, D_COLUMNS: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk, or dv in every other program, of 64 keys, by programs of the first share of each key
    tile. Strides count rows. This one starts before the kernel before has ended. Where a sequence
    has a length, the rest of its last key tile is written, too: gradients of hidden keys are 0."""
    gdc_wait()
    number = tl.program_id(0)
    block, is_value = tl.program_id(1) // 2, tl.program_id(1) % 2
    share, is_there, kv_start, len_kv = number // Hkv, True, 0, Skv
    if plan_ptr is None:
        batch, share = share // kv_slots, share % kv_slots
    else:
        # `rows.py`
        firsts_ptr = plan_ptr + (B + 2)
        is_there = share < tl.load(firsts_ptr + B + 1)
        batch = find_sequence(share, firsts_ptr, B + 1, 1, 0)
        share -= tl.load(firsts_ptr + batch)
        n_shares = tl.load(plan_ptr + 5 * (B + 2) + batch)
        if bounds_ptr is not None:
            kv_start = tl.load(bounds_ptr + (B + 2) + batch)
            len_kv = tl.load(bounds_ptr + (B + 2) + batch + 1) - kv_start
            batch *= 0
    if is_there & (share % n_shares == 0):
        SIZE: tl.constexpr = 64 * (D_COLUMNS + DV_COLUMNS)
        BLOCKS: tl.constexpr = BLOCK_KV // 64
        step = tl.cast(Hkv, tl.int64) * (BLOCKS * SIZE)
        first = number.to(tl.int64) * (BLOCKS * SIZE) + block * SIZE
        idx = share // n_shares * BLOCK_KV + block * 64 + tl.arange(0, 64)
        is_row = idx < len_kv
        b, h = tl.cast(batch, tl.int64), (number % Hkv).to(tl.int64)
        s = (kv_start + idx).to(tl.int64)
        if is_value == 0:
            rows = dk_ptr + (b * stride_kb + h * stride_kh + s * stride_ks) * D
            for p in tl.static_range(n_pieces(D_COLUMNS)):
                _fold(
                    shares_ptr + first, rows, is_row, n_shares, step, scale,
                    piece_width(D_COLUMNS, p), piece_start(D_COLUMNS, p), D, MASKED,
                )  # fmt: skip
        else:
            rows = dv_ptr + (b * stride_vb + h * stride_vh + s * stride_vs) * DV
            for p in tl.static_range(n_pieces(DV_COLUMNS)):
                _fold(
                    shares_ptr + first + 64 * D_COLUMNS, rows, is_row, n_shares, step, 1.0,
                    piece_width(DV_COLUMNS, p), piece_start(DV_COLUMNS, p), DV, MASKED,
                )  # fmt: skip
