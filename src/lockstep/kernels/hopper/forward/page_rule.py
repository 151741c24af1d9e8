"""Which sequences in pages are the forward's, and which the decode kernel's.

A row's bits depend on which of the two runs it. So the queries of its sequence and the heads decide
that: neighbours have no say in it, nor has the length of the cache, of which a call knows the most
that there may be.

Importing this module does not import Triton.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.requirements import has_tiles_in_pages
from lockstep.kernels.hopper.common.sizes import BOX, ROWS
from lockstep.problem import AttentionProblem

# Rows of a tile of the forward.
TILE_ROWS = 128
# Queries are the decode kernel's while those of a group of heads are so few rows, by the width of
# heads, or fewer queries than ROWS; and until all heads have so many tiles. Decode takes less time
# to begin, and shares keys out among more programs; the forward is twice as fast at its work.
FEW_ROWS, TILES = {64: 2 * TILE_ROWS, 256: TILE_ROWS}, 8


def least_queries_in_pages(problem: AttentionProblem) -> int:
    """From how many queries on a sequence in pages is the forward's."""
    if not has_tiles_in_pages(problem):
        return TILE_ROWS
    if _has_narrow_window(problem):
        return 1
    group = problem.Hq // max(problem.Hkv, 1)
    width = max(problem.D, problem.Dv)
    few = next(rows for widest, rows in FEW_ROWS.items() if width <= widest)
    # Rows of all tiles of a KV head but the last.
    rows = TILE_ROWS * (-(-TILES // max(problem.Hkv, 1)) - 1)
    fewer = rows // (BOX * group) * BOX if group > 1 else rows
    return max(fewer, min(few // max(group, 1), ROWS)) + 1


def _has_narrow_window(problem: AttentionProblem) -> bool:
    """Whether the forward has a kernel for the window, which is faster with a single query, too."""
    from lockstep.kernels.hopper.forward.narrow_window.plan import has_narrow_window

    return has_narrow_window(problem)
