"""Forward attention over keys that come in blocks: each starts from the state of the last.

A block begins at a multiple of SPAN keys of its sequence, and ends at one, or with the sequence.
Its spans are folded as `forward` folds them, groups of spans at absolute positions included, so
rows get the bits of one call over all keys. What is carried on is (acc, m, l) of each row, twice:
of the groups that are complete, and of the one that is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.carry import moved
from lockstep.kernels.cpu.arithmetic.block import (
    ROWS,
    SPAN,
    carve_block,
    load_queries,
    load_span,
    padded,
    rows_range,
    zeros_for,
)
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.running import (
    GROUP,
    carve_running,
    clear,
    fold_sinks,
    fold_tile,
)
from lockstep.kernels.cpu.arithmetic.tiles import ROW, close_rows
from lockstep.kernels.cpu.arithmetic.wide import attend_span
from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.record import variants, with_tiles
from lockstep.kernels.cpu.call.tensors import address, describe
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import MR, f32
from lockstep.kernels.cpu.forward import write_rows
from lockstep.kernels.cpu.units import UNIT, UNIT_BYTES, unit_at
from lockstep.problem import Tensors

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Result
    from lockstep.problem import AttentionProblem


@compiled
def _fold_group(state, group, n_tiles, Dv):
    """Fold the sum of a group into that of the groups before it, and begin another one."""
    for t in range(n_tiles):
        at = group.acc + t * Dv * ROW
        fold_tile(state, t, Dv, at, group.m + t * ROW, group.l + t * ROW)
    clear(group, n_tiles, Dv)


@compiled
def _fold_spans(call, block, unit, state, group, n_tiles, spans_before):
    """The spans of this call that a unit sees; ``spans_before`` come before the first of them."""
    Dv = padded(call.Dv, MR)
    lo, hi = rows_range(call, unit.b, unit.first_row, unit.n_rows)
    if lo >= hi:
        return
    for span in range(lo // SPAN, padded(hi, SPAN) // SPAN):
        first = span * SPAN
        n = min(SPAN, hi - first)
        finite = load_span(call, block, unit.b, unit.h, first, n)
        for t in range(n_tiles):
            if attend_span(call, block, unit.b, t, first, n, finite):
                fold_tile(group, t, Dv, block.part, block.part_m, block.part_l)
        if (spans_before + span + 1) % GROUP == 0:
            _fold_group(state, group, n_tiles, Dv)


def _run_carried(call_at):
    def run_carried(arguments):
        """Every unit from its state to its next one, or to its rows.

        Arguments: call, units, how many, states, bytes of a state, spans before, whether to close.
        """
        call = call_at(argument(arguments, 0))
        units, n_units = argument(arguments, 1), argument(arguments, 2)
        states, state_bytes = argument(arguments, 3), argument(arguments, 4)
        spans_before, closing = argument(arguments, 5), argument(arguments, 6)
        block = carve_block(enter(arguments), call.D, call.Dv)
        fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
        Dv = padded(call.Dv, MR)
        while True:
            ticket = take_ticket(arguments)
            if ticket >= n_units:
                return
            unit = unit_at(units + ticket * UNIT_BYTES)
            state = carve_running(states + ticket * state_bytes, call.Dv)
            group = carve_running(state.end, call.Dv)
            n_tiles = load_queries(call, block, unit.b, unit.h, unit.first_row, unit.n_rows)
            _fold_spans(call, block, unit, state, group, n_tiles, spans_before)
            if closing != 0:
                _fold_group(state, group, n_tiles, Dv)
                if call.sinks != 0:
                    fold_sinks(call, block, state, n_tiles, Dv)
                for t in range(n_tiles):
                    close_rows(state.acc + t * Dv * ROW, Dv, state.l + t * ROW)
                write_rows(call, unit, block.q_rows, state.acc, state.m, state.l)

    return run_carried


_run_carried.__name__ = "run_carried"
RUNNER, RUNNER_WITH_TILES = variants(_run_carried)[0], with_tiles(_run_carried)


class CarriedForward:
    """Rows of the queries that begin at position ``start`` of their sequence.

    `fold` takes keys and values [B, Hkv, n, ..] from position ``first`` on, blocks in ascending
    order; `close` then returns out, lse and statistics. The mask of ``problem`` is that of a whole
    sequence, which has as many queries as keys; its lengths do not count. With ``tiles``, products
    are those of matrix units.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        q: Tensor,
        sinks: Tensor | None,
        start: int,
        *,
        tiles: bool = False,
    ) -> None:
        self._runner = RUNNER_WITH_TILES if tiles else RUNNER
        self._problem, self._q, self._sinks, self._start = problem, q, sinks, start
        self._sizes = {"Sq": q.shape[2]}
        n_rows = problem.Hq // problem.Hkv * q.shape[2]
        units = [
            (b, h, first, min(ROWS, n_rows - first), 0, 0, -1, 1, 0)
            for first in range(0, n_rows, ROWS)
            for b in range(problem.B)
            for h in range(problem.Hkv)
        ]
        self._units = np.array(units, UNIT)
        Dv = -(-problem.Dv // MR) * MR
        self._states = np.zeros((len(units), 2, Dv + 2, ROWS), np.float32)
        self._states[:, :, Dv] = -np.inf
        shaped = replace(problem, **self._sizes)
        self._out = torch.empty(shaped.out_shape, dtype=problem.dtype)
        self._lse = torch.empty(shaped.lse_shape, dtype=torch.float32)
        self._statistics = torch.empty(shaped.statistics_shape, dtype=torch.float32)

    def fold(self, k: Tensor, v: Tensor, first: int) -> None:
        self._run(k, v, first, closing=False)

    def close(self) -> Result:
        p = self._problem
        k, v = (self._q.new_empty(p.B, p.Hkv, 0, D) for D in (p.D, p.Dv))
        self._run(k, v, 0, closing=True)
        return self._out, self._lse, self._statistics

    def _run(self, k: Tensor, v: Tensor, first: int, *, closing: bool) -> None:
        Sq, n = self._q.shape[2], k.shape[2]
        problem = moved(self._problem, first + n - self._start - Sq, Skv=n, **self._sizes)
        tensors = Tensors(self._q, k, v, sinks=self._sinks)
        described = describe(problem, tensors, self._out, self._lse, self._statistics)
        if not len(self._units):
            return
        states = self._states
        arguments = (
            *(described.address, address(self._units), len(self._units), address(states)),
            *(states[0].nbytes, first // SPAN, closing),
        )
        scratch = carve_block(0, problem.D, problem.Dv).end
        work = problem.B * problem.Hq * Sq * n * (problem.D + problem.Dv)
        parallel(self._runner, arguments, scratch, work)
