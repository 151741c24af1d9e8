"""Which program of the second kernel folds what.

A *unit* is a group of rows and a block of columns of one slot. Where there are as many programs as
all slots would have units, each has one. Where these would be too many, since rows are, the
programs share the units of those slots that have parts, which may be none.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.decode import tiles
from lockstep.kernels.hopper.decode.folding import fold_plan

FIELDS, N_Q = gl.constexpr(tiles.FIELDS), gl.constexpr(tiles.N_Q)
Q_TILE, Q_START = gl.constexpr(tiles.Q_TILE), gl.constexpr(tiles.Q_START)
SEQUENCE = gl.constexpr(tiles.SEQUENCE)
SLOTS = gl.constexpr(fold_plan.MOST_SLOTS)


@gluon.jit
def has_unit_each(n_slots, n_groups, N_BLOCKS: gl.constexpr):
    """Whether there are as many programs as all slots would have units."""
    return gl.num_programs(0) >= n_slots * n_groups * N_BLOCKS


@gluon.jit
def rank_slots(slots_ptr, n_slots, N_BLOCKS: gl.constexpr, n_groups):
    """How many slots with parts are before each slot [SLOTS], -1 for one without; and how many
    units the slots with parts have: a group of rows and a block of columns each. With a unit of any
    slot for each program, nothing of that: whether this program's slot has parts, as a number of
    units that includes its own or not."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = gl.arange(0, SLOTS, layout)
    ranks = slot
    if has_unit_each(n_slots, n_groups, N_BLOCKS):
        own = divide(gl.program_id(0) // N_BLOCKS, n_groups)
        has_parts = gl.load(slots_ptr + 3 * own) >= 0
        n_units = gl.where(has_parts, gl.program_id(0) + 1, 0)
    else:
        are_there = gl.load(slots_ptr + 3 * slot, mask=slot < n_slots, other=-1) >= 0
        ranks = gl.associative_scan(are_there.to(gl.int32), 0, _add)
        n_units = gl.max(ranks, 0) * n_groups * N_BLOCKS
        ranks = gl.where(are_there, ranks - 1, -1)
    return ranks, n_units


@gluon.jit
def find_unit(slots_ptr, ranks, unit, n_slots, n_groups, N_BLOCKS: gl.constexpr):
    """The slot of a unit, whose parts are there, from which to which; the group of rows and the
    block of columns."""
    layout: gl.constexpr = ranks.type.layout
    group = unit // N_BLOCKS
    block = unit - group * N_BLOCKS
    slot = divide(group, n_groups)
    group -= slot * n_groups
    if has_unit_each(n_slots, n_groups, N_BLOCKS) == 0:
        slot = gl.sum(gl.where(ranks == slot, gl.arange(0, SLOTS, layout), 0), 0)
    work = gl.load(slots_ptr + 3 * slot)
    begin = gl.load(slots_ptr + 3 * slot + 1)
    return slot, work, begin, gl.load(slots_ptr + 3 * slot + 2), group, block


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def has_rows(work, group, sizes, N: gl.constexpr, PACKED: gl.constexpr):
    """Whether a group of N rows of a slot has any: of the last tile of a sequence, most may have
    none."""
    found = work >= 0
    if not PACKED:  # noqa: SIM102, Gluon would evaluate both
        if sizes.q_tiles > 1:
            tile = divide(work, sizes.heads)
            q_tile = tile - divide(tile, sizes.q_tiles) * sizes.q_tiles
            found = q_tile * ROWS + group * N < sizes.Sq * sizes.group
    return found


@gluon.jit
def find_rows(work, row, tiles_ptr, heads, group, q_tiles, Sq, n_rows, PACKED: gl.constexpr):
    """Whether each row of a slot exists, and the sequence, query head and query of each."""
    b = divide(work, heads)
    head = work - b * heads
    if PACKED:
        tile_ptr = tiles_ptr + (1 + b) * FIELDS
        q_tile = gl.load(tile_ptr + Q_TILE)
        n_q = gl.load(tile_ptr + N_Q)
        q_start = gl.load(tile_ptr + Q_START)
        b = gl.load(tile_ptr + SEQUENCE)
    else:
        sequence = divide(b, q_tiles)
        q_tile = b - sequence * q_tiles
        n_q = Sq
        q_start = b * 0
        b = sequence
    number = q_tile * ROWS + row
    query = divide(number, group)
    is_row = (row < n_rows) & (number < n_q * group)
    return is_row, b, head * group + number - query * group, q_start + query
