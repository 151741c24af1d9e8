"""The orders of `schedule.py` that have pairs of tiles: which tile a program has of which pair."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

# Whole rounds of pairs whose tiles go singly, with those of the round that is not whole.
SINGLE_ROUNDS = gl.constexpr(1)


@gluon.jit
def pair_rounds(schedule):
    """How many rounds of pairs there are before single tiles."""
    n_pairs = (schedule.n_q_tiles + 1) // 2
    return gl.maximum(n_pairs * schedule.heads // gl.num_programs(0) - SINGLE_ROUNDS, 0)


@gluon.jit
def paired(schedule, n_paired, index, second):
    """Head and slot of the first or the `second` tile of a pair, of n_paired in all, and
    whether there is one."""
    n_pairs = (schedule.n_q_tiles + 1) // 2
    head = index // n_pairs
    turns = head * n_pairs // gl.num_programs(0) * schedule.turn
    # The tiles that are left of the last head are those in its middle.
    is_whole = head < n_paired // n_pairs
    pair = (index + gl.where(is_whole, turns, 0)) % n_pairs
    slot = gl.where(second == 0, schedule.n_q_tiles - 1 - pair, pair)
    # The tile in the middle is its own pair.
    return head, slot, (second == 0) | (2 * pair != schedule.n_q_tiles - 1)


@gluon.jit
def left_by_pairs(schedule, n_paired, index):
    """The same of the tiles that n_paired pairs leave, the longest first: some in the middle of
    one head, and all of those after it."""
    n_pairs = (schedule.n_q_tiles + 1) // 2
    cut_head = n_paired // n_pairs
    cut = n_paired % n_pairs  # so many tiles of that head are gone at either end
    n_whole = schedule.heads - cut_head - 1
    # Tiles as long as those that are gone, and tiles that are in the middle of their heads.
    n_long = cut * n_whole
    n_middle = (schedule.n_q_tiles - 2 * cut) * (n_whole + 1)
    is_long = index < n_long
    is_middle = (is_long == 0) & (index < n_long + n_middle)
    at = index - gl.where(is_long, 0, gl.where(is_middle, n_long, n_long + n_middle))
    before = gl.where(is_long, 0, gl.where(is_middle, cut, schedule.n_q_tiles - cut))
    n_heads = gl.where(is_middle, n_whole + 1, gl.maximum(n_whole, 1))
    first_head = gl.where(is_middle, cut_head, cut_head + 1)
    slot = schedule.n_q_tiles - 1 - before - at // n_heads
    return first_head + at % n_heads, slot, index < 2 * n_long + n_middle
