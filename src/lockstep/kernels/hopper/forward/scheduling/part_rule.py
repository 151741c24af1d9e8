"""Into how many parts the keys of a tile are cut, if a sequence has few tiles and many keys.

The parts of a tile are results of their own, folded in their order (`key_parts.py`). How many there
are is part of a row's bits: it follows from the lengths of the sequence and the heads, and not from
the batch. The host and the device call the same function, the host by its `fn`.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401, the interpreter looks for it beside each function

from lockstep.problem import AttentionProblem

# Parts that all tiles of a sequence make together, if its keys are many enough; the most of a tile;
# and the keys of one, of those that all queries see.
WANTED, MOST, LEAST_KEYS = 132, 4, 2048
# Up to so many parts of a call, programs draw each by itself; else a tile with all of them.
UNITS = 264


@triton.jit
def parts_of(tiles, keys, wanted, most, least):
    """The parts of each of so many tiles, whose rows all see so many keys: 1 to 4."""
    two = (2 * tiles <= wanted) & (2 * least <= keys) & (most >= 2)
    three = (3 * tiles <= wanted) & (3 * least <= keys) & (most >= 3)
    four = (4 * tiles <= wanted) & (4 * least <= keys) & (most >= 4)
    return 1 + 1 * two + 1 * three + 1 * four


def cuts_keys(problem: AttentionProblem) -> bool:
    """Whether tiles of a call may have several parts: of keys in pages, where chunks of a few
    hundred queries meet long caches. Windows leave too few keys."""
    if not problem.is_paged or problem.window[0] is not None or problem.query_invariant:
        return False
    return 2 * problem.Hq <= WANTED


def most_parts(problem: AttentionProblem, n_q_tiles: int) -> int:
    """The most parts that tiles of a call have, whose sequences have so many tiles of a head."""
    if not cuts_keys(problem):
        return 1
    keys = problem.Skv - (0 if problem.window[1] is None else problem.Sq)
    return int(parts_of.fn(n_q_tiles * problem.Hq, keys, WANTED, MOST, LEAST_KEYS))
