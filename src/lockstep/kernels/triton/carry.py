"""Attention over keys, or gradients over rows, that come in blocks: the Triton kernels go on where
they were.

    CarriedForward    `forward.attend` from one state to the next, `split_kv.reduce_parts` to close
    CarriedQueries    `dq.sum_queries` adds to the sums of its rows
    CarriedKeys       `dkdv.sum_keys` adds to the sums of its keys

With `query_invariant` spans and tiles are cut at fixed positions and taken in ascending order, so
blocks that begin at multiples of a span give the bits of one call. Sums stay in float32 between
blocks. `Carry` says what each class takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.carry import between
from lockstep.kernels.kernel import BackwardTensors
from lockstep.kernels.launch import Launch
from lockstep.kernels.triton.backward import (
    arguments_of,
    launch_keys,
    launch_queries,
    launch_rows,
    launch_sinks,
    terms_of,
    with_aligned_inputs,
)
from lockstep.kernels.triton.forward import attend
from lockstep.kernels.triton.launch import (
    attend_arguments,
    device_of,
    options_of,
    reduce_arguments,
)
from lockstep.kernels.triton.plan import plan_of
from lockstep.kernels.triton.split_kv import reduce_parts
from lockstep.kernels.triton.terms import launch_cut
from lockstep.problem import Tensors

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Result
    from lockstep.problem import AttentionProblem

STATE = ("state", "state_stats")


class CarriedForward:
    """Rows of the queries that begin at position ``start`` of their sequence."""

    def __init__(
        self, problem: AttentionProblem, q: Tensor, sinks: Tensor | None, start: int
    ) -> None:
        self._problem = replace(problem, Sq=q.shape[2])
        self._q, self._sinks = q.contiguous(), sinks
        self._at = range(start, start + q.shape[2])
        shape = self._problem.lse_shape
        states = (q.new_empty(*shape, n, dtype=torch.float32) for n in (problem.Dv, 2) * 2)
        acc, stats, *self._next = states
        acc.zero_()
        stats[..., 0], stats[..., 1] = -torch.inf, 0.0  # m, l
        self._state = [acc, stats]
        self._results = {
            "out": q.new_empty(self._problem.out_shape),
            "lse": q.new_empty(shape, dtype=torch.float32),
            "statistics": q.new_empty(self._problem.statistics_shape, dtype=torch.float32),
        }

    def fold(self, k: Tensor, v: Tensor, first: int) -> None:
        """Adds keys and values [B, Hkv, n, ..] from position ``first`` on."""
        problem = between(self._problem, self._at, range(first, first + k.shape[2]))
        if problem is None:
            return
        tensors, device = Tensors(self._q, k, v), device_of(self._q.device)
        plan = plan_of(problem, device, splits=False)
        options: dict[str, Any] = {**options_of(problem, plan, device)}
        launch = Launch(
            attend,
            (plan.n_programs,),
            attend_arguments(problem, tensors, plan),
            absent=("sinks", "statistics"),
            **options,
        )
        named = dict(zip(STATE, self._state, strict=True))
        named |= {f"next_{name}": x for name, x in zip(STATE, self._next, strict=True)}
        _run(launch, self._results | named | {"q": self._q, "k": k, "v": v})
        self._state, self._next = self._next, self._state

    def close(self) -> Result:
        # One part, which all rows see.
        problem = replace(self._problem, Skv=1, causal=False, window_left=None, window_right=None)
        plan = plan_of(problem, device_of(self._q.device), splits=False)
        launch = Launch(
            reduce_parts,
            (self._results["lse"].numel(),),
            reduce_arguments(problem, self._q, replace(plan, early=False)),
            names={"parts": STATE[0], "part_stats": STATE[1]},
            num_warps=1,
        )
        named = dict(zip(STATE, self._state, strict=True))
        _run(launch, {**self._results, **named, "sinks": self._sinks})
        out, lse, statistics = self._results.values()
        return out, lse, statistics


class CarriedQueries:
    """dq of the queries that begin at position ``start``, as `CarriedForward` has their rows."""

    def __init__(
        self, problem: AttentionProblem, q: Tensor, rows: Tensor, dout: Tensor, start: int
    ) -> None:
        self._problem, self._rows = problem, _four(rows)
        self._q, self._dout = q.contiguous(), dout.contiguous()
        self._at = range(start, start + q.shape[2])
        self._sums = torch.zeros_like(self._q, dtype=torch.float32)

    def fold(self, k: Tensor, v: Tensor, first: int) -> None:
        """Adds what keys and values [B, Hkv, n, ..] from position ``first`` on give."""
        problem = between(self._problem, self._at, range(first, first + k.shape[2]))
        if problem is None:
            return
        given = _given(self._q, k, v, self._dout)
        launch = launch_queries(problem, given, absent=("dq",))
        _run(launch, {**_factors(problem, given), "rows": self._rows, "dq_sums": self._sums})

    def close(self) -> Tensor:
        return _closed(self._sums, self._problem.scale, self._q)


class CarriedKeys:
    """dk and dv of the keys that begin at position ``start``, from queries of their sequence."""

    def __init__(self, problem: AttentionProblem, k: Tensor, v: Tensor, start: int) -> None:
        self._problem = problem
        self._k, self._v = k.contiguous(), v.contiguous()
        self._at = range(start, start + k.shape[2])
        self._sums = {
            "dk_sums": torch.zeros_like(self._k, dtype=torch.float32),
            "dv_sums": torch.zeros_like(self._v, dtype=torch.float32),
        }

    def fold(self, q: Tensor, dout: Tensor, rows: Tensor, first: int) -> None:
        """Adds what queries [B, Hq, n, D] from position ``first`` on give."""
        problem = between(self._problem, range(first, first + q.shape[2]), self._at)
        if problem is None:
            return
        given = _given(q, self._k, self._v, dout)
        launch = launch_keys(problem, given, absent=("dk", "dv"))
        _run(launch, {**_factors(problem, given), "rows": _four(rows), **self._sums})

    def close(self) -> tuple[Tensor, Tensor]:
        dk, dv = self._sums.values()
        return _closed(dk, self._problem.scale, self._k), _closed(dv, 1.0, self._v)


def rows_of(
    problem: AttentionProblem,
    q: Tensor,
    out: Tensor,
    statistics: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Tensor:
    """m, norm and delta [B, Hq, S, 3] of some rows: `gradient_rows`."""
    rows = torch.empty((*q.shape[:3], 4), dtype=torch.float32, device=q.device)
    if rows.numel():
        problem = replace(problem, Sq=q.shape[2])
        given = _given(q.contiguous(), q, q, dout)
        given = given._replace(out=out.contiguous(), statistics=statistics.contiguous(), dlse=dlse)
        _run(launch_rows(problem, arguments_of(problem, given)), {**given._asdict(), "rows": rows})
    return rows[..., :3]


def sums_of_sinks(problem: AttentionProblem, sinks: Tensor, rows: Tensor) -> Tensor:
    """dsinks [h] of h heads, from all their rows [B, h, S, 3]."""
    _, H, S, _ = rows.shape
    dsinks = torch.empty_like(sinks)
    launch = launch_sinks(replace(problem, Hq=H, Sq=S))
    _run(launch, {"sinks": sinks.contiguous(), "rows": _four(rows), "dsinks": dsinks})
    return dsinks


def _given(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> BackwardTensors:
    """The tensors that the passes take; those that `rows` stand for are left out."""
    inputs = Tensors(q, k, v)
    return with_aligned_inputs(BackwardTensors(*inputs, dout, dout, dout, None))


def _factors(problem: AttentionProblem, given: BackwardTensors) -> dict[str, Tensor | None]:
    """The inputs of the passes by name, and the terms of those that have any."""
    named = given._asdict()
    terms = terms_of(problem, device_of(given.dout.device))
    if terms:
        named |= {name: given.dout.new_empty(x.shape, dtype=x.dtype) for name, x in terms.items()}
        _run(launch_cut(problem, arguments_of(problem, given)), named)
    return named


def _four(rows: Tensor) -> Tensor:
    """Rows as the kernels lay them out: [.., 4], of which the last is not read, nor sent."""
    return pad(rows, (0, 1)).contiguous()


def _closed(sums: Tensor, scale: float, like: Tensor) -> Tensor:
    # Adding 0 makes one zero of the two.
    return (sums * scale + 0.0).to(like.dtype)


def _run(launch: Launch, named: Mapping[str, Tensor | None]) -> None:
    """Launches one kernel on the device of its tensors."""
    device = next(x.device for x in named.values() if x is not None)
    arguments = launch.bind(named)
    if device.type != "cuda":
        launch.run(arguments, -1)
        return
    with torch.cuda.device(device):
        launch.run(arguments, torch.cuda.current_device())
