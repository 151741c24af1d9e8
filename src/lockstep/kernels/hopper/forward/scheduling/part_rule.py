"""Into how many parts the keys of a tile are cut, if a sequence has few tiles and many keys.

The parts of a tile are results of their own, folded in their order (`key_parts.py`). How many there
are is part of a row's bits: it follows from the lengths of the sequence and the heads, and not from
the batch. The host and the device call the same function, the host by its `fn`.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401, the interpreter looks for it beside each function

from lockstep.kernels.hopper.forward.groups import n_tiles
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.problem import AttentionProblem

# Parts that all tiles of a sequence make together, if its keys are many enough; the most of a tile;
# and the keys of one, of those that all queries see.
WANTED, MOST, LEAST_KEYS = 132, 8, 2048
# Sequences with fewer queries have tiles that a group of heads shares, with parts or without.
FEW_QUERIES = 256
# Up to so many parts of a call, programs draw each by itself; else a tile with all of them.
UNITS = WANTED * MOST


@triton.jit
def parts_of(tiles, keys, wanted, most, least):
    """The parts of each of so many tiles, whose rows all see so many keys: 1 to `most`."""
    # Neither Python's min nor Triton's is for both.
    found = wanted // (tiles + (tiles < 1))
    of_keys = keys // least
    found = found + (of_keys - found) * (of_keys < found)
    found = found + (most - found) * (most < found)
    return found + (1 - found) * (found < 1)


def cuts_keys(problem: AttentionProblem) -> bool:
    """Whether tiles of a call may have several parts: of keys in pages, where chunks of a few
    hundred queries meet long caches. Windows leave too few keys."""
    if not problem.is_paged or problem.window[0] is not None or problem.query_invariant:
        return False
    return 2 * problem.Hkv <= WANTED


def part_group(problem: AttentionProblem) -> int:
    """How many heads share tiles that have parts."""
    return problem.Hq // problem.Hkv


def most_parts(problem: AttentionProblem) -> int:
    """The most parts that tiles of a call have whose sequences have equally many queries."""
    if not cuts_keys(problem):
        return 1
    n_q_tiles = n_tiles(problem.Sq, part_group(problem), plan_of(problem).block_q)
    keys = problem.Skv - (0 if problem.window[1] is None else problem.Sq)
    return int(parts_of.fn(n_q_tiles * problem.Hkv, keys, WANTED, MOST, LEAST_KEYS))


def few_queries(problem: AttentionProblem) -> int:
    """Sequences with fewer queries have the build for tiles with parts, if they have none: it is
    the one whose tiles heads share. And one build is enough for calls with fewer in all."""
    is_small = problem.longest_q < FEW_QUERIES
    return FEW_QUERIES if cuts_keys(problem) and (part_group(problem) > 1 or is_small) else 0


def has_parts(problem: AttentionProblem) -> bool:
    """Whether sequences of equally many queries have that build."""
    is_shared = cuts_keys(problem) and part_group(problem) > 1
    return most_parts(problem) > 1 or (is_shared and problem.Sq < FEW_QUERIES)
