"""Which part of its keys a tile of `schedule.py` has: `key_parts.py`."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.forward.scheduling import part_rule
from lockstep.kernels.hopper.forward.scheduling.part_rule import parts_of
from lockstep.kernels.hopper.forward.scheduling.tile import Keys

WANTED, MOST_PARTS = gl.constexpr(part_rule.WANTED), gl.constexpr(part_rule.MOST)
LEAST_KEYS = gl.constexpr(part_rule.LEAST_KEYS)


@gluon.jit
def parts_of_tile(schedule, n_tiles, len_q, len_kv):
    """How many parts the keys of a tile have in a sequence of so many tiles of a head."""
    seen_by_all = len_kv
    if schedule.HAS_RIGHT:
        seen_by_all -= len_q
    return parts_of(n_tiles * schedule.Hq, seen_by_all, WANTED, MOST_PARTS, LEAST_KEYS)


@gluon.jit
def keys_of(part, n_parts, slot, has_slot):
    """All keys, of which this is to be one part; it has that slot, or one of the program, which
    is -1 less its number."""
    every = Keys.every(part)
    slot = gl.where(has_slot, slot, -1 - gl.program_id(0) * MOST_PARTS)
    return Keys(part, n_parts, slot, every.first_block, every.end_block)


@gluon.jit
def has_slot_each(schedule):
    """Whether each part is a tile of its own to the schedule; else a program has them all."""
    if schedule.LAYOUT == "varlen":
        return gl.load(schedule.sequence_order_ptr + 1) != 0
    else:  # noqa: RET505, Gluon would go on and return both
        return schedule.parts > 0


@gluon.jit
def part_of(schedule, tile, part):
    """A tile, of all keys, with one part of them."""
    keys = tile.keys
    first = keys.first_block
    behind = keys.end_block
    if keys.n_parts > 1:
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        first = begin + (end - begin) * part // keys.n_parts
        behind = begin + (end - begin) * (part + 1) // keys.n_parts
    return tile.with_keys(Keys(part, keys.n_parts, keys.slot, first, behind))
