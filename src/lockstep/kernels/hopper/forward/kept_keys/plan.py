"""Which calls have keys that stay in shared memory, and how many programs share an SM. It changes
no bit."""

from __future__ import annotations

import math
from typing import NamedTuple

from lockstep.kernels.hopper.common.sizes import ROWS, SM_BYTES
from lockstep.kernels.hopper.forward.one_block.shares import Shares
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.problem import AttentionProblem

# Keys that are multiplied behind the first block.
REST = 64
# Heads wider than this, up to this wide, and columns of a sector of L2.
WIDE, NARROW, SECTOR = 128, 64, 16
# So many heads of a group share tiles, if there are as many.
MOST_HEADS = 8
# Columns of a tensor map by those of a tile in shared memory.
MAPS = {64: 64, 96: 32, 128: 128, 160: 32, 192: 64, 256: 256}
# Shared memory that a program has beside keys, values and queries.
OTHER_BYTES = 1024 + 2048 + 256
# Registers of a thread by how many programs share an SM.
REGISTERS = {3: 168, 2: 255}
# Keys of more heads are dealt out to programs if none has more tiles than so many times as many as
# it has to have.
UNEVEN = 1.15


class Sizes(NamedTuple):
    """Keys of a head, heads of a tile, and programs of an SM."""

    block: int  # keys of the first block
    rest: int  # keys that are multiplied behind it
    heads: int
    programs: int

    def tiles_of_heads(self, problem: AttentionProblem) -> int:
        """How many tiles `heads` heads have."""
        return -(-problem.Sq * self.heads // ROWS)


def kept_sizes(problem: AttentionProblem) -> Sizes | None:
    """The sizes of a dense call whose keys stay in shared memory, or None."""
    is_plain = problem.layout == "dense" and not (problem.has_kv_lens or problem.is_paged)
    is_default = not (problem.query_invariant or problem.constant_time)
    if not (is_plain and is_default and problem.softcap is None) or problem.window[0] is not None:
        return None
    block, width, width_v = plan_of(problem).block_kv, width_of(problem.D), width_of(problem.Dv)
    rest = rest_of(problem, block)
    if rest is None:
        return None
    rows = (block + rest) * (width + width_v) + ROWS * width
    programs = min(max(REGISTERS), SM_BYTES // (2 * rows + OTHER_BYTES))
    if programs not in REGISTERS:
        return None
    return Sizes(block, rest, math.gcd(problem.Hq // problem.Hkv, MOST_HEADS), programs)


def rest_of(problem: AttentionProblem, block: int) -> int | None:
    """How many keys are multiplied behind the first block, if a call takes less time than with the
    kernel for all calls, else None."""
    width = max(problem.D, problem.Dv)
    # Tiles of wide heads have 128 rows there, and end before the next one begins.
    if width > WIDE and problem.Skv <= block:
        return 0
    # The copy engine takes long to load rows that begin between sectors of L2: here it does so once
    # for a head.
    is_unaligned = NARROW < width <= WIDE and problem.D % SECTOR != 0
    is_masked = problem.window[1] is not None
    return REST if is_unaligned and not is_masked and block < problem.Skv <= block + REST else None


def width_of(dim: int) -> int:
    """The columns of a tile in shared memory for head dim `dim`."""
    return next(width for width in MAPS if dim <= width)


def shares_of(problem: AttentionProblem, sizes: Sizes, programs: int) -> Shares:
    """The shares of so many programs in all tiles: keys are dealt out, unless some programs would
    have much more to do than others."""
    of_keys = sizes.tiles_of_heads(problem) * (problem.Hq // problem.Hkv // sizes.heads)
    return Shares.of(of_keys, problem.B * problem.Hkv, problem.Hkv, programs, UNEVEN)
