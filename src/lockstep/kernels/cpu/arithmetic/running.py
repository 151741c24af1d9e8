"""The running softmax state (acc, m, l) of a unit's rows, LANES of them at a time.

Parts of spans are folded into it in ascending order, GROUP spans together first.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.cpu.arithmetic.block import ROWS, padded
from lockstep.kernels.cpu.arithmetic.merge import MINUS_INF, fill
from lockstep.kernels.cpu.arithmetic.tiles import ROW, fold_span
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, f32

# Spans that are folded together before their sum is folded into the row's: bits depend on it.
GROUP = 64


class Running(NamedTuple):
    """Where the state of a unit's tiles lies in scratch, by address."""

    acc: int  # [TILES, Dv, LANES]
    m: int  # [TILES, LANES]
    l: int  # [TILES, LANES]
    end: int


@compiled
def carve_running(base, Dv):
    m = base + 4 * ROWS * padded(Dv, MR)
    return Running(base, m, m + 4 * ROWS, m + 8 * ROWS)


@compiled
def clear(state, n_tiles, Dv):
    fill(state.acc, n_tiles * LANES * Dv, f32(0.0))
    fill(state.m, n_tiles * LANES, MINUS_INF)
    fill(state.l, n_tiles * LANES, f32(0.0))


@compiled
def fold_tile(state, t, Dv, part, part_m, part_l):
    fold_span(
        state.acc + t * Dv * ROW, Dv, state.m + t * ROW, state.l + t * ROW, part, part_m, part_l
    )


@compiled
def end_of_group(span, last):
    """The first span that is not folded together with ``span``, or ``last``."""
    return min(last, (span // GROUP + 1) * GROUP)


@compiled
def fold_sinks(call, block, state, n_tiles, Dv):
    """A sink is one more part: a weight without a value."""
    fill(block.part, LANES * Dv, f32(0.0))
    fill(block.part_l, LANES, f32(1.0))
    for t in range(n_tiles):
        for lane in range(LANES):
            head = scalar.load_word(block.q_head + 8 * (t * LANES + lane))
            scalar.store(scalar.load(call.sinks + 4 * head), block.part_m + 4 * lane)
        fold_tile(state, t, Dv, block.part, block.part_m, block.part_l)
