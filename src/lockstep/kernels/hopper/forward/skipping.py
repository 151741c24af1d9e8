"""Blocks of keys that pass a consumer by: others of its program need them."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.forward.pingpong import await_turn, pass_turn


@gluon.jit
def skip(c: gl.constexpr, program, i, held):
    """Let a block of keys pass, the i-th in all, and then the values of the block `held`: the same
    one, or one before it."""
    program.k.wait(i)
    if program.build.PINGPONG:
        await_turn(c, i)
        pass_turn((c + 1) % program.build.CONSUMERS, i)
    program.k.release(i)
    program.await_values(held)
    program.v.release(held)


@gluon.jit
def skip_before(c: gl.constexpr, program, rows, seen):
    """Let the blocks of a tile pass that are before those of a consumer; how many blocks were seen
    so far."""
    for _block in range(rows.tile_begin, rows.begin):
        skip(c, program, seen, seen)
        seen += 1
    return seen


@gluon.jit
def skip_behind(c: gl.constexpr, program, tile, rows, last, seen):
    """Let the blocks of a tile pass that are behind those of a consumer, the last of which is
    `last`, of whose values the product is yet to be issued. Returns that one, and how many blocks
    were seen so far.

    A consumer without rows has one block of a tile, and there may be more behind it than have room
    beside its values. Any values will do for rows that are not stored: so it lets go of these, and
    has those of the next block instead."""
    for _block in range(rows.end, rows.tile_end):
        if program.schedule.SPLIT and c > 0:
            is_idle = tile.q_idx + c * ROWS >= tile.len_q
            skip(c, program, seen, gl.where(is_idle, last, seen))
            last = gl.where(is_idle, seen, last)
        else:
            skip(c, program, seen, seen)
        seen += 1
    return last, seen
