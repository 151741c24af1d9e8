"""Gradients over keys, or over queries, that come in blocks: each starts from the last one's sums.

dQ of a row adds up spans of keys, dK and dV of a key blocks of ROWS rows, both ascending. Here
these sums stay in float32 between calls, and go on where they were: the bits are those of one call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.carry import moved
from lockstep.kernels.cpu.arithmetic.block import ROWS, SPAN, carve_block, padded, zeros_for
from lockstep.kernels.cpu.arithmetic.merge import fill
from lockstep.kernels.cpu.arithmetic.rescore import (
    GRADIENT,
    Gradient,
    carve_gradient,
    gradient_at,
    load_keys,
)
from lockstep.kernels.cpu.backward import block_gradients, scratch_bytes, write_keys, write_queries
from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.record import CALL, call_at, of_sequence
from lockstep.kernels.cpu.call.tensors import DENSE, Described, address, describe, strided
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler.compile import compiled, kernel
from lockstep.kernels.cpu.compiler.vectors import LANES, MR, WIDTH, f32
from lockstep.kernels.cpu.extras import row_deltas, sink_gradient
from lockstep.kernels.cpu.items import ITEM, ITEM_BYTES, item_at, list_items
from lockstep.problem import Tensors

if TYPE_CHECKING:
    from lockstep.problem import AttentionProblem

# What a call's tensors with query rows are called in its record.
Q_AT, STATISTICS_AT = (CALL.fields[name][1] // 8 for name in ("q", "statistics"))  # type: ignore[index]


@compiled
def _with_sums(work, dk, dv):
    """A thread's tiles, with the sums of keys elsewhere."""
    return Gradient(
        work.dout_t,
        work.q,
        work.dout,
        work.m,
        work.inverse,
        work.delta,
        work.k_cols,
        work.p,
        work.dp,
        work.slopes,
        work.dq,
        dk,
        dv,
        work.dk_part,
        work.dv_part,
        work.end,
    )


@compiled
def _sums_of_span(call, b, span):
    """How many spans of sums come before this one; there is one KV head."""
    return b * (padded(of_sequence(call.kv_len, b), SPAN) // SPAN) + span


@kernel
def _run_folds(arguments):
    """Add the rows and keys of each item to the sums that it owns; nothing is written elsewhere.

    Arguments: call, gradient, items, how many, sums of dk [B, spans, SPAN, D] and of dv.
    """
    call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
    items, n_items = argument(arguments, 2), argument(arguments, 3)
    dk, dv = argument(arguments, 4), argument(arguments, 5)
    block = carve_block(enter(arguments), call.D, call.Dv)
    work = carve_gradient(block.end, call.D, call.Dv)
    fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
    k_span, v_span = 4 * SPAN * padded(call.D, WIDTH), 4 * SPAN * padded(call.Dv, WIDTH)
    while True:
        ticket = take_ticket(arguments)
        if ticket >= n_items:
            return
        item = item_at(items + ticket * ITEM_BYTES)
        length = of_sequence(call.kv_len, item.b)
        for span in range(item.first_span, item.last_span):
            first = span * SPAN
            n = min(SPAN, length - first)
            k_finite = load_keys(call, block, work, item.b, item.h, first, n)
            at = _sums_of_span(call, item.b, span)
            sums = _with_sums(work, dk + at * k_span, dv + at * v_span)
            for row0 in range(item.first_row, item.last_row, ROWS):
                block_gradients(call, grad, block, sums, item, row0, first, n, k_finite)


@kernel
def _run_close(arguments):
    """Scale the sums of each item, round them and write them where they belong.

    Arguments: as for `_run_folds`.
    """
    call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
    items, n_items = argument(arguments, 2), argument(arguments, 3)
    dk, dv = argument(arguments, 4), argument(arguments, 5)
    block = carve_block(enter(arguments), call.D, call.Dv)
    k_span, v_span = 4 * SPAN * padded(call.D, WIDTH), 4 * SPAN * padded(call.Dv, WIDTH)
    while True:
        ticket = take_ticket(arguments)
        if ticket >= n_items:
            return
        item = item_at(items + ticket * ITEM_BYTES)
        b, h = item.b, item.h
        if grad.want_q:
            write_queries(call, grad, block, item)
        for span in range(item.first_span, item.last_span if grad.want_kv else item.first_span):
            first = span * SPAN
            n = min(SPAN, of_sequence(call.kv_len, b) - first)
            at = _sums_of_span(call, b, span)
            write_keys(call, grad.dk, b, h, first, n, dk + at * k_span, call.D, f32(call.scale))
            write_keys(call, grad.dv, b, h, first, n, dv + at * v_span, call.Dv, f32(1.0))


def rows_of(
    problem: AttentionProblem,
    q: Tensor,
    out: Tensor,
    statistics: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Tensor:
    """m, l and delta [B, Hq, S, 3] of some rows; delta is Σ_d dO · O − dlse."""
    rows = torch.zeros((*q.shape[:3], 3), dtype=torch.float32)
    rows[..., :2], delta = statistics, rows[..., 2]
    if delta.numel() == 0:
        return rows
    record = np.zeros(1, GRADIENT)
    record["dout"], record["delta"] = strided(dout, DENSE), strided(delta, DENSE)
    if dlse is not None:
        record["dlse"] = strided(dlse, DENSE)
    shaped, described = _rows(problem, q, out, None)
    row_deltas(shaped, described, record, scratch_bytes(problem.D, problem.Dv))
    return rows


def sums_of_sinks(problem: AttentionProblem, sinks: Tensor, rows: Tensor) -> Tensor:
    """dsinks [h] of h heads, from all their rows [B, h, S, 3]."""
    statistics, delta = rows[..., :2], rows[..., 2]
    record = np.zeros(1, GRADIENT)
    record["delta"] = strided(delta, DENSE)
    Hq, S = delta.shape[1:]
    q = delta.new_empty(problem.B, Hq, S, 1)
    some = replace(problem, Hq=Hq, Hkv=1, dtype=torch.float32)
    _, described = _rows(some, q, q, statistics, sinks)
    return sink_gradient(some, Tensors(q, q, q, sinks=sinks), described, record)


def _rows(
    problem: AttentionProblem,
    q: Tensor,
    out: Tensor,
    statistics: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[AttentionProblem, Described]:
    """A call with these rows and no keys."""
    shaped = replace(problem, Sq=q.shape[2], Skv=0)
    k = q[:, :1, :0]
    return shaped, describe(shaped, Tensors(q, k, k, sinks=sinks), out, None, statistics)


class CarriedQueries:
    """dq of the queries that begin at position ``start``, as `CarriedForward` has their rows."""

    def __init__(
        self,
        problem: AttentionProblem,
        q: Tensor,
        rows: Tensor,
        dout: Tensor,
        start: int,
    ) -> None:
        statistics, delta = rows[..., :2], rows[..., 2]
        self._problem, self._q, self._start = problem, q, start
        self._statistics, self._delta, self._dout = statistics, delta, dout
        self._dq = torch.zeros(q.shape, dtype=q.dtype)
        tiles = -(-q.shape[2] * problem.Hq // problem.Hkv // LANES) * problem.Hkv
        self._first_tile = np.arange(problem.B, dtype=np.int64) * tiles
        D = -(-problem.D // MR) * MR
        self._sums = np.zeros(problem.B * tiles * D * LANES, np.float32)
        record = self._record = np.zeros(1, GRADIENT)
        for name, tensor in (("dout", dout), ("delta", delta), ("dq", self._dq)):
            record[name] = strided(tensor, DENSE)
        record["dq_tiles"], record["first_tile"] = address(self._sums), address(self._first_tile)
        record["want_q"] = 1

    def fold(self, k: Tensor, v: Tensor, first: int) -> None:
        """Adds what keys and values [B, Hkv, n, ..] from position ``first`` on give."""
        self._run(_run_folds, k, v, first)

    def close(self) -> Tensor:
        p = self._problem
        k, v = (self._q.new_empty(p.B, p.Hkv, 0, D) for D in (p.D, p.Dv))
        self._run(_run_close, k, v, 0)
        return self._dq

    def _run(self, run: Any, k: Tensor, v: Tensor, first: int) -> None:
        Sq, n = self._q.shape[2], k.shape[2]
        problem = moved(self._problem, first + n - self._start - Sq, Sq=Sq, Skv=n)
        tensors = Tensors(self._q, k, v)
        described = describe(problem, tensors, self._dout, None, self._statistics)
        items = list_items(problem, described, by_span=False, by_block=True)
        if not len(items):
            return
        arguments = (described.address, address(self._record), address(items), len(items), 0, 0)
        work = 3 * problem.B * problem.Hq * Sq * n * problem.D
        parallel(run, arguments, scratch_bytes(problem.D, problem.Dv), work)


class CarriedKeys:
    """dk and dv of the keys that begin at position ``start``, from all queries of their sequence.

    The rows of a KV head are those of its query heads, one head after the other: row ``g · S + i``
    is query i of head g. `fold` takes some of them, of every KV head, in ascending order: queries
    [B, Hkv, n, D], dout and rows likewise, from row ``first`` on, which is a multiple of ROWS, and
    n is one, too, but for the last. `close` then returns dk and dv.
    """

    def __init__(self, problem: AttentionProblem, k: Tensor, v: Tensor, start: int) -> None:
        self._k, self._v = k, v
        self._group = problem.Hq // problem.Hkv
        n, self._length = k.shape[2], problem.Sq
        self._n_spans = -(-n // SPAN)
        # One KV head at a time.
        self._problem = moved(
            replace(problem, Hq=self._group, Hkv=1), start + n - self._length, Skv=n
        )
        self._dk, self._dv = torch.zeros_like(k), torch.zeros_like(v)
        self._sums = tuple(
            np.zeros((problem.Hkv, problem.B * self._n_spans, SPAN, -(-D // WIDTH) * WIDTH), "f4")
            for D in (problem.D, problem.Dv)
        )

    def fold(self, q: Tensor, dout: Tensor, rows: Tensor, first: int) -> None:
        for h in range(self._k.shape[1]):
            of_head = [x[:, h : h + 1] for x in (q, dout, rows[..., :2], rows[..., 2])]
            self._run(_run_folds, h, of_head, first)

    def close(self) -> tuple[Tensor, Tensor]:
        p = self._problem
        none = self._k.new_empty(p.B, 1, 0, max(p.D, p.Dv))
        for h in range(self._k.shape[1]):
            self._run(_run_close, h, [none, none, none, none], 0)
        return self._dk, self._dv

    def _run(self, run: Any, h: int, rows: list[Tensor], first: int) -> None:
        problem, head = self._problem, slice(h, h + 1)
        q, dout, statistics, delta = rows
        tensors = Tensors(q, self._k[:, head], self._v[:, head])
        described = describe(problem, tensors, dout, None, statistics)
        for at, x in ((Q_AT, q), (STATISTICS_AT, statistics)):
            for i, word in enumerate(self._of_rows(x, first)):
                described.record[at + i] = word
        record = np.zeros(1, GRADIENT)
        record["dout"], record["delta"] = self._of_rows(dout, first), self._of_rows(delta, first)
        record["dk"] = strided(self._dk[:, head], DENSE)
        record["dv"] = strided(self._dv[:, head], DENSE)
        record["want_kv"] = 1
        n = q.shape[2]
        items = np.array(
            [
                (b, 0, first, first + n, s, s + 1)
                for b in range(problem.B)
                for s in range(self._n_spans)
            ],
            ITEM,
        )
        if not len(items):
            return
        sums = (address(x[h]) for x in self._sums)
        arguments = (described.address, address(record), address(items), len(items), *sums)
        work = 4 * problem.B * n * problem.Skv * problem.D
        parallel(run, arguments, scratch_bytes(problem.D, problem.Dv), work)

    def _of_rows(self, x: Tensor, first: int) -> tuple[int, ...]:
        """Strides by which (head g, query i) is row g · S + i, of a tensor that begins at a row."""
        where, batch, _, row = strided(x, DENSE)
        return where - first * row, batch, self._length * row, row
