"""Shapes of the forward kernel by head dim, as measured on an H200.

BLOCK_KV is part of a row's bits, so it may follow the head dims and the window, which are the same
for all sequences of a call, and nothing else. The other choices change no bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from lockstep.kernels.hopper.common.query_invariance import SPAN
from lockstep.kernels.hopper.common.sizes import ROWS, columns
from lockstep.kernels.hopper.forward.aligned_rows import aligns
from lockstep.kernels.hopper.forward.one_block.shares import Shares
from lockstep.problem import AttentionProblem

# Registers of a thread by consumers: at launch, then of a consumer and of the warps that serve it.
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 32)}


@dataclass(frozen=True)
class Plan:
    """Tile sizes and pipeline of one build."""

    consumers: int
    block_kv: int
    stages: int
    q_stages: int
    pingpong: bool
    one_loop: bool = False  # over the blocks of all tiles: `flow.py`
    out_columns: int = 128  # of out that leave through shared memory at once
    span: int = 0  # keys between two folds of query-invariant builds
    total_columns: int = 64  # of their second sums that are in shared memory, 64 or 0
    adds_late: bool = False  # whether spans are added while scores are computed

    @property
    def block_q(self) -> int:
        return self.consumers * ROWS


PLANS = {
    64: Plan(consumers=3, block_kv=128, stages=3, q_stages=2, pingpong=False),
    128: Plan(consumers=2, block_kv=128, stages=2, q_stages=2, pingpong=True),
    192: Plan(consumers=2, block_kv=64, stages=2, q_stages=2, pingpong=False),
    256: Plan(consumers=2, block_kv=64, stages=2, q_stages=1, pingpong=False),
}
# Keys wider than 128 with values that are not.
WIDE_KEYS = Plan(consumers=2, block_kv=128, stages=2, q_stages=1, pingpong=True, out_columns=64)
# Tiles of up to 96 and of up to 160 columns in chunks of 32 leave room for one more stage, and for
# blocks of 128 keys.
CHUNK, NARROW_CHUNK = 64, 32
IN_CHUNKS = {
    96: Plan(consumers=2, block_kv=128, stages=3, q_stages=2, pingpong=True),
    160: Plan(consumers=2, block_kv=128, stages=2, q_stages=1, pingpong=True, out_columns=64),
}
# Where tiles have few blocks of keys, lower tiles lose less at their ends. Up to which Sq:
SHORT, SHORT_CAUSAL = 1024, 4096
SHORT_PLANS = {**PLANS, 64: Plan(consumers=2, block_kv=128, stages=3, q_stages=2, pingpong=True)}
# Up to so many keys, one loop over the blocks of all tiles is faster, under a mask and without one,
# for heads up to this width.
ONE_LOOP, ONE_LOOP_UNMASKED, ONE_LOOP_WIDTH = 1024, 768, 128
# In constant time, slots are found by bits, as many as a power of two.
BITS_STAGES = 4
# Without a mask, lower tiles may fill the rounds of programs better: how many rounds of lower tiles
# take as long as one of the others, and the SMs of the GPU on which that was measured.
LOW_ROUNDS, PROGRAMS = 1.4, 132
# Up to so many keys in a window, too much of a wider block would be hidden. Wider windows have not
# been measured in constant time, and of tiles in chunks of 32 columns.
NARROW, NARROW_ELSEWHERE = 640, 256
# From so many on, the maximum of a row's first blocks is nearly as good as a running one, and
# faster; of heads wider than 192, for which running ones take longest, from fewer.
WIDE_WINDOW, WIDE_WINDOW_OF_WIDE_HEADS = 3072, 640
NARROW_PLANS = {
    64: Plan(consumers=2, block_kv=64, stages=6, q_stages=2, pingpong=False),
    128: Plan(consumers=2, block_kv=64, stages=4, q_stages=2, pingpong=False),
}
NARROW_OF_WIDE_KEYS = replace(WIDE_KEYS, block_kv=64, stages=4)
# With a softcap, weights take so much code that with wider blocks that of all consumers would not
# fit into the cache of instructions: large scores would take twice the time.
CAPPED_IN_CHUNKS = {
    width: replace(plan, block_kv=64, stages=2 * plan.stages) for width, plan in IN_CHUNKS.items()
}
# From so many keys on, all sums of D 128 are in registers, as those of D 64 always are: a new tile
# takes longer then, the end of a span less.
LONG_SPANS = 8192
# Up to so many keys, tiles are short however many queries there are.
FEW_KEYS = 256
# With two or three blocks of keys, they may stay in shared memory: `few_keys.py`. With so many
# registers of a thread, so many programs with two blocks fit on an SM.
KEPT_REGISTERS, KEPT_PROGRAMS = 168, 3
# That pays with more heads than this: with three blocks, if tiles of ROWS have so many fewer rows.
MANY_HEADS, FEWER_ROWS = 512, 5 / 6
# With two blocks also if programs have at most so many tiles and all are at work at once, where the
# tiles of the other kernel would take more than one round.
KEPT_TILES = 2
# Keys that are one block (`one_block/`): how many of them are multiplied, by the width of heads,
# how many programs fit on an SM, and with how many registers of a thread.
ONE_BLOCK = {
    64: {64: (4, 128), 80: (4, 128), 128: (4, 128)},
    128: {64: (3, 168), 128: (2, 255)},
}
# Wider heads that fill a block are faster with the kernel for all calls, and packed ones with more
# than 64 keys have not been measured.
WIDE_KEYS_OF_BLOCK = 112
# Keys of more heads are dealt out to its programs if none has more tiles than so many times as many
# as it has to have, by the width of heads.
UNEVEN = {64: 1.4, 128: 1.15}


def padded(dim: int) -> int:
    """The width of a tile for head dim `dim`: what lies beyond is zero to the copy engine."""
    return next(width for width in PLANS if dim <= width)


def _width_in_chunks(problem: AttentionProblem, dim: int) -> int:
    """The width of a tile for head dim `dim` if it comes in chunks of 32 columns, else 0."""
    # The cleaner of constant-time builds reads 64 columns at a time, and so do pages come, of which
    # the copy engine would need more loads. Rows of 72 or 88 columns begin between the sectors of
    # L2, of which chunks take more, unless they are aligned. And wider tiles leave no room for a
    # stage.
    width = next((width for width in IN_CHUNKS if width - NARROW_CHUNK < dim <= width), 0)
    dims = problem.D, problem.Dv
    fits = all(n <= 64 or (n <= 96 and (n % 16 == 0 or aligns(problem, n))) for n in dims)
    fits = fits and not problem.is_paged
    return 0 if problem.constant_time or (width == 96 and not fits) else width


def map_columns(problem: AttentionProblem, dim: int) -> int:
    """The columns of a tensor map for head dim `dim`, a power of two: of tiles with 96, 160 or 192
    columns a chunk."""
    if _width_in_chunks(problem, dim):
        return NARROW_CHUNK
    return CHUNK if padded(dim) == 192 else padded(dim)


def value_columns(dim: int) -> int:
    """How many columns of values are multiplied. 112 would be three pieces (`pieces.py`), and three
    products take longer than one of 128."""
    return 128 if columns(dim) == 112 else columns(dim)


def out_columns(problem: AttentionProblem) -> int:
    """Columns of out that leave through shared memory at once."""
    return min(padded(problem.Dv), plan_of(problem).out_columns)


def page_rows(problem: AttentionProblem) -> int:
    """Rows of a page that the copy engine loads at once."""
    assert problem.page_size is not None
    return math.gcd(problem.page_size, plan_of(problem).block_kv)


def plan_of(problem: AttentionProblem) -> Plan:
    """The build for a problem."""
    shape = _shape_of(problem)
    return replace(shape, one_loop=_takes_one_loop(problem, shape))


def fixes_maximum(problem: AttentionProblem) -> bool:
    """Whether rows keep the maximum of their first block. bf16 weights have the exponents of fp32;
    fp16 weights would overflow. Rows of a window have few blocks, and may see a part of the
    first."""
    if problem.dtype != torch.bfloat16 or problem.constant_time:
        return False
    left, right = problem.window
    is_widest = padded(max(problem.D, problem.Dv)) == max(PLANS)
    wide = WIDE_WINDOW_OF_WIDE_HEADS if is_widest else WIDE_WINDOW
    is_wide = None not in (left, right) and left + right >= wide
    return left is None or is_wide or problem.query_invariant


def _takes_one_loop(problem: AttentionProblem, shape: Plan) -> bool:
    """Whether tiles are so short that one loop over the blocks of all of them pays. It is for calls
    in which large weights are exact, or under a mask in constant time with two consumers, without
    lengths or pages."""
    is_packed = problem.layout == "varlen"
    keys = problem.Skv / max(problem.B, 1) if is_packed else problem.Skv
    is_plain = not (problem.has_kv_lens or problem.is_paged)
    left, right = problem.window
    fits = shape.consumers == 2 if problem.constant_time else problem.dtype == torch.bfloat16
    width = padded(max(problem.D, problem.Dv))
    is_short = keys <= ONE_LOOP
    if right is None:
        # Three consumers have not been measured, nor have packed sequences.
        fits = fits and shape.consumers == 2 and not (is_packed or problem.constant_time)
        is_short = keys <= ONE_LOOP_UNMASKED
    if problem.query_invariant:
        # At D 128 it is slower; without a mask and packed it has not been measured.
        fits = fits and width == 64 and right is not None and not is_packed
    return is_plain and left is None and fits and is_short and width <= ONE_LOOP_WIDTH


def _shape_of(problem: AttentionProblem) -> Plan:
    """Tiles and pipeline of the build."""
    width, width_v = padded(problem.D), padded(problem.Dv)
    left, right = problem.window
    # In constant time under a window, whose keys have flags (`cleaning.py`), wide blocks have not
    # been measured.
    has_flags = problem.constant_time and left is not None
    narrow = NARROW_ELSEWHERE if problem.constant_time else NARROW
    is_narrow = None not in (left, right) and left + right < narrow
    in_chunks = _width_in_chunks(problem, max(problem.D, problem.Dv))
    is_default = not (problem.query_invariant or problem.constant_time)
    is_capped = problem.softcap is not None and is_default
    if width == 192 and width_v <= 128 and not has_flags:
        is_narrow = (is_narrow or is_capped) and not (problem.query_invariant or in_chunks)
        return NARROW_OF_WIDE_KEYS if is_narrow else WIDE_KEYS
    width = max(width, width_v)
    if in_chunks and is_capped:
        return CAPPED_IN_CHUNKS[in_chunks]
    if in_chunks:
        is_narrow = is_narrow and left + right < NARROW_ELSEWHERE
    if in_chunks and not is_narrow:
        return IN_CHUNKS[in_chunks]
    is_narrow = is_narrow or is_capped or (has_flags and width == 128)
    if width in NARROW_PLANS and is_narrow and not problem.query_invariant:
        return NARROW_PLANS[width]
    is_packed = problem.layout == "varlen"
    if problem.query_invariant:
        return _with_spans(problem, _by_length(problem, width))
    if width == 64 and problem.Skv <= FEW_KEYS and not (is_packed or problem.constant_time):
        return SHORT_PLANS[width]
    return _by_length(problem, width)


def _may_keep_keys(problem: AttentionProblem, widest: int) -> bool:
    """Whether kernels that keep the keys of a head, up to so wide, in shared memory take a problem
    with its mask."""
    is_plain = not (problem.has_kv_lens or problem.is_paged)
    return (
        is_plain
        and not (problem.query_invariant or problem.constant_time)
        and problem.softcap is None
        and max(problem.D, problem.Dv) <= widest
    )


def has_one_block(problem: AttentionProblem) -> bool:
    """Whether all keys are one block that stays in shared memory, which changes no bit."""
    is_packed = problem.layout == "varlen"
    return one_block_keys(problem) > 0 and not is_packed


def one_block_keys(problem: AttentionProblem) -> int:
    """How many keys are multiplied, if all of them, or those of most packed sequences, are one
    block, else 0. Only the mean length of packed sequences is known."""
    is_packed = problem.layout == "varlen"
    if not _may_keep_keys(problem, 128) or _hides_first_keys(problem):
        return 0
    keys = problem.Skv / max(problem.B, 1) if is_packed else problem.Skv
    width = padded(problem.D)
    if width > 64 and (is_packed or keys > WIDE_KEYS_OF_BLOCK) and keys > 64:
        return 0
    # Results leave from where queries came.
    if width != padded(problem.Dv):
        return 0
    is_even = _is_even(problem)
    fits = (n for n in ONE_BLOCK[width] if keys <= n and not (is_even and n == 80))
    return next(fits, 0)


def _hides_first_keys(problem: AttentionProblem) -> bool:
    """Whether a window may hide keys from rows behind it, or makes blocks of keys narrow, or the
    sums of bf16 those of a running maximum, which have other bits than one block has."""
    left, _ = problem.window
    if left is None:
        return False
    if problem.dtype == torch.bfloat16 and not fixes_maximum(problem):
        return True
    is_one_block = problem.Skv <= plan_of(problem).block_kv
    return problem.layout == "varlen" or left + 1 < problem.Skv or not is_one_block


def one_block_widths(problem: AttentionProblem) -> tuple[int, ...]:
    """All numbers of keys that the build for a problem with one block may multiply: those whose
    tiles have as many rows."""
    keys, is_even = one_block_keys(problem), _is_even(problem)
    same = (n for n in ONE_BLOCK[padded(problem.D)] if one_block_rows(n) == one_block_rows(keys))
    return tuple(n for n in same if not (is_even and n == 80))


def one_block_rows(keys: int) -> int:
    """Rows of a tile in shared memory that has so many keys: a power of two."""
    return 1 << (keys - 1).bit_length()


def _is_even(problem: AttentionProblem) -> bool:
    """Whether keys are multiplied by 64s. How many are hidden in the last 16 is known of all
    sequences, or of none; and under a mask, fewer would gain little."""
    return problem.layout == "varlen" or problem.window[1] is not None


def one_block_room(problem: AttentionProblem) -> tuple[int, int]:
    """How many programs with one block fit on an SM, and with how many registers of a thread."""
    return ONE_BLOCK[padded(problem.D)][one_block_keys(problem)]


def one_block_shares(problem: AttentionProblem, programs: int) -> Shares:
    """The shares of so many programs in the tiles of a dense call with one block: keys are dealt
    out, unless some programs would have much more to do than others."""
    of_keys = -(-problem.Sq // ROWS) * problem.Hq // problem.Hkv
    uneven = UNEVEN[padded(problem.D)]
    return Shares.of(of_keys, problem.B * problem.Hkv, problem.Hkv, programs, uneven)


def one_block_heads(problem: AttentionProblem) -> int:
    """How many heads that share their keys a program has of a packed sequence: all of them, if
    there are enough programs then."""
    is_enough = problem.B * problem.Hkv >= PROGRAMS * one_block_room(problem)[0]
    return problem.Hq // problem.Hkv if is_enough else 1


def keeps_keys(problem: AttentionProblem) -> bool:
    """Whether the keys and values of a head stay in shared memory for its queries, which changes no
    bit."""
    if problem.layout != "dense" or not _may_keep_keys(problem, 64):
        return False
    if problem.window[0] is not None:
        return False
    plan, blocks, heads = plan_of(problem), kept_blocks(problem), problem.B * problem.Hq
    is_causal = problem.window[1] is not None
    if heads > MANY_HEADS and is_causal:
        return False
    if heads > MANY_HEADS:
        rows = [-(-problem.Sq // height) * height for height in (ROWS, plan.block_q)]
        are_fewer = rows[0] <= FEWER_ROWS * rows[1]
        # One loop is about as fast with three blocks, and with two where rows are as many.
        is_slower = plan.one_loop and not (blocks == 2 and are_fewer)
        return not is_slower and (blocks == 2 or (blocks == 3 and are_fewer))
    tiles = kept_tiles(problem)
    programs = heads * -(-problem.Sq // (ROWS * tiles))
    fits = tiles <= KEPT_TILES and programs <= PROGRAMS * KEPT_PROGRAMS
    return blocks == 2 and fits and _rounds(problem, plan) > 1


def kept_blocks(problem: AttentionProblem) -> int:
    """How many blocks of keys a program keeps, if it does."""
    return -(-problem.Skv // plan_of(problem).block_kv)


def kept_tiles(problem: AttentionProblem) -> int:
    """How many tiles a program works on that keeps its keys: of many heads all of one, else as many
    as it takes for all programs to be at work at once."""
    tiles = -(-problem.Sq // ROWS)
    mean = -(-problem.B * problem.Hq * tiles // (PROGRAMS * KEPT_PROGRAMS))
    return min(tiles, mean)


def _with_spans(problem: AttentionProblem, plan: Plan) -> Plan:
    """A query-invariant build. How its spans are added changes no bit."""
    plan = replace(plan, span=SPAN)
    if problem.window[0] is not None or problem.dtype != torch.bfloat16:
        return plan
    keys = problem.Skv / max(problem.B, 1) if problem.layout == "varlen" else problem.Skv
    if problem.D == 64 or keys >= LONG_SPANS:
        return replace(plan, total_columns=0, adds_late=True)
    return plan


def _by_length(problem: AttentionProblem, width: int) -> Plan:
    left, right = problem.window
    # Only the mean length of packed sequences is known.
    is_packed = problem.layout == "varlen"
    length = problem.Sq / max(problem.B, 1) if is_packed else problem.Sq
    short = SHORT if right is None else SHORT_CAUSAL
    # Masks on both sides leave too few registers for three consumers; so do, in constant time, any
    # mask of packed sequences; and the second sums of spans.
    is_crowded = left is not None or (problem.constant_time and right is not None and is_packed)
    is_crowded = is_crowded or problem.query_invariant
    # With pages, producers need registers.
    is_crowded = is_crowded or problem.is_paged
    is_short = length <= short or is_crowded
    if width == 64 and right is None and not is_packed and not is_short:
        low, high = (_rounds(problem, plans[width]) for plans in (SHORT_PLANS, PLANS))
        is_short = low < LOW_ROUNDS * high
    plan = (SHORT_PLANS if is_short else PLANS)[width]
    if problem.constant_time and width == 64:
        plan = replace(plan, stages=BITS_STAGES)
    # Without a mask, waiting for a turn costs more in constant time than it brings.
    if problem.constant_time and width == 128 and right is None and not is_packed:
        plan = replace(plan, pingpong=False)
    return plan


def _rounds(problem: AttentionProblem, plan: Plan) -> int:
    """How many tiles the busiest program of a dense call has."""
    tiles = problem.B * problem.Hq * -(-problem.Sq // plan.block_q)
    return -(-tiles // PROGRAMS)
