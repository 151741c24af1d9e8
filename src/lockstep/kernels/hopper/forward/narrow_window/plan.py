"""Which calls `kernel.py` runs, and the sizes of their tiles, as measured on an H200.

Mask, heads and head dims decide which kernel runs a call, since its bits are not those of others.
The sizes change no bit.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.hopper.common.gluon_shim import VIEWS_GROW
from lockstep.kernels.hopper.common.sizes import ROWS, SM_BYTES, columns
from lockstep.problem import AttentionProblem

STEP = 16  # keys that are multiplied at once
# Of a tile: no more, since fewer queries see no fewer keys, of which there are whole steps.
MAX_HEADS = 8
# Keys of a tile by its heads: without heads that share their keys, most of them would be hidden.
MAX_KEYS = {1: 0, 2: 160, 4: 272, 8: 272}
# And with heads wider than 64 columns, up to twice as wide.
MAX_KEYS_OF_WIDE_HEADS = {1: 0, 2: 0, 4: 144, 8: 144}
# Programs that may share an SM: registers of a thread then, and of how many keys these hold scores.
REGISTERS, KEYS_IN_REGISTERS = {4: 128, 3: 168, 2: 240}, {4: 144, 3: 208, 2: 272}
# With so many, queries are in registers while they are multiplied.
MANY_PROGRAMS = 4
# Shared memory that a program has beside keys, values and queries.
OTHER_BYTES = 2048
# The SMs of the GPU on which this was measured.
PROCESSORS = 132
# Loading keys and values takes as long as so many tiles.
KEY_TILES = 2


class Sizes(NamedTuple):
    """Tiles of `kernel.py`."""

    heads: int  # of a tile
    chunk: int  # queries of a program
    keys: int  # that a tile is multiplied with
    kv_rows: int  # in shared memory
    before: int  # of the keys of a tile, all rows see those from `before` on
    until: int  # to `until`
    programs: int  # on an SM
    stay: bool  # queries do, in shared memory, with a place of their own for results

    @property
    def positions(self) -> int:
        """Queries of a tile."""
        return ROWS // self.heads


def has_narrow_window(problem: AttentionProblem) -> bool:
    """Whether all scores of a row fit into registers."""
    left, right = problem.window
    # The keys of a tile are a view of shared memory that may begin anywhere.
    if not VIEWS_GROW or left is None or right is None or problem.softcap is not None:
        return False
    if problem.query_invariant or problem.constant_time:
        return False
    width = max(columns(problem.D), columns(problem.Dv))
    if width > 128:
        return False
    sizes = sizes_of(problem)
    return sizes.keys <= (MAX_KEYS if width <= 64 else MAX_KEYS_OF_WIDE_HEADS)[sizes.heads]


def sizes_of(problem: AttentionProblem) -> Sizes:
    """The sizes for a problem with a window on both sides."""
    left, right = problem.window
    assert left is not None
    assert right is not None
    group = problem.Hq // problem.Hkv
    heads = min(group & -group, MAX_HEADS)
    positions = ROWS // heads

    def first_key(tile: int) -> int:
        return (tile * positions - left) // STEP * STEP

    def in_steps(keys: int) -> int:
        return -(-keys // STEP) * STEP

    # Tiles are counted from a sequence's first key, chunks from its first query.
    starts = [tile * positions - left - first_key(tile) for tile in range(STEP)]
    keys = in_steps(max(starts) + left + positions + right)
    chunk = _chunk(problem, heads, keys)
    rows = [
        first_key((begin + chunk - 1) // positions) + keys - first_key(begin // positions)
        for begin in range(max(positions, STEP))
    ]
    before = in_steps(max(starts) + positions - 1)
    until = (min(starts) + left + right + 1) // STEP * STEP
    width = sum(-(-dim // 64) * 64 for dim in (problem.D, problem.Dv))
    programs, with_results = (
        _programs(keys, (max(rows) * width + tiles * ROWS * width // 2) * 2) for tiles in (1, 2)
    )
    # Registers are worth more than a place, unless a program more has room without it.
    stay = 0 < programs == with_results < MANY_PROGRAMS
    return Sizes(heads, chunk, keys, max(rows), before, until, programs or 2, stay)


def _programs(keys: int, n_bytes: int) -> int:
    """How many programs share an SM, of so many keys of a tile, and bytes of tensors; 0 if
    none has room."""
    n_bytes += OTHER_BYTES
    fits = (n for n in REGISTERS if n * n_bytes <= SM_BYTES and keys <= KEYS_IN_REGISTERS[n])
    return next(fits, 0)


def _chunk(problem: AttentionProblem, heads: int, keys: int) -> int:
    """How many queries have their keys in shared memory together."""
    if max(problem.D, problem.Dv) > 64:
        return 32
    # Where heads share little, keys are loaded less often for more queries.
    if heads <= 2:
        return 128
    # Four programs have room then. That of a packed sequence takes longer to begin.
    return 64 if problem.is_packed or keys > KEYS_IN_REGISTERS[4] else 32


def parts_of(sizes: Sizes, chunks: int) -> int:
    """Into how many parts chunks are cut, for a program each."""
    tiles = sizes.chunk // sizes.positions

    def time(parts: int) -> int:
        rounds = -(-chunks * parts // (PROCESSORS * sizes.programs))
        return rounds * (tiles // parts + KEY_TILES)

    return min((1 << i for i in range(tiles.bit_length())), key=time)
