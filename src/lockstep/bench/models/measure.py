"""One case of `lockstep bench gpu --suite models`: checked, then timed in turns.

A decode, and what is served at once, is captured into a CUDA graph, as servers do, and what is
checked and timed is the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep import dispatch
from lockstep.bench.gpu_timing import ROUNDS, take_turns
from lockstep.bench.models import inputs as models_inputs
from lockstep.bench.models.cases import UNITS, Case
from lockstep.bench.models.contender import Contender, call_of
from lockstep.bench.models.inputs import Inputs
from lockstep.bench.row import Row
from lockstep.problem import describe

Run = Callable[[], "tuple[Tensor, ...]"]
# Calls before a capture: what compiles on first use, or sets up a library, has done so by then.
CALLS_BEFORE_CAPTURE = 2


def run(
    case: Case, contenders: Sequence[Contender], *, rounds: int = ROUNDS, device: str = "cuda"
) -> Row:
    """Check every contender of one case, then time those with a right result in turns.

    Raises:
        DeviceLost: A contender broke the CUDA context.
    """
    row, calls = admitted(case, contenders, device)
    with torch.no_grad():
        row.timings = take_turns(calls, rounds)
    return row


def admitted(
    case: Case, contenders: Sequence[Contender], device: str = "cuda"
) -> tuple[Row, dict[str, Run]]:
    """The row of a case before anything is timed, and the calls that computed the right result.

    Raises:
        DeviceLost: A contender broke the CUDA context.
    """
    row = Row(_facts(case))
    inputs = models_inputs.make(case, device)
    parts = models_inputs.pieces(inputs)
    rules = models_inputs.expect(inputs, parts)
    row.chosen, row.amount = chosen(inputs), models_inputs.amount(case)
    calls: dict[str, Run] = {}
    for contender in contenders:
        call = row.admit(
            contender.name,
            contender.kind,
            partial(prepare, contender, inputs),
            partial(models_inputs.largest_error, inputs, parts, rules),
        )
        if call is not None:
            calls[contender.name] = call
    return row, calls


def prepare(contender: Contender, inputs: Inputs) -> Run:
    """The call that is timed: of a cache in pages mostly a graph of it."""
    call = call_of(contender, inputs)
    on_gpu = inputs.tensors.q.is_cuda
    return graphed(call) if inputs.case.kind in ("decode", "serve") and on_gpu else call


def graphed(call: Run) -> Run:
    """A CUDA graph of a call. Every replay overwrites the results of the last."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(CALLS_BEFORE_CAPTURE):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay(inputs: Run) -> tuple[Tensor, ...]:
        graph.replay()
        return results

    # The graph has addresses alone: the call keeps the tensors that lie there.
    return partial(replay, call)


def chosen(inputs: Inputs) -> str | None:
    """The kernel that Lockstep runs for a case, None if all kernels refuse it."""
    problem = describe(inputs.tensors, inputs.case.shape.options)
    try:
        return dispatch.select(problem, backward=inputs.case.kind == "backward").name
    except NotImplementedError:
        return None


def _facts(case: Case) -> dict[str, Any]:
    layer = case.shape
    return {
        "kind": case.kind,
        "case": case.name,
        "unit": UNITS[case.kind],
        "model": case.model,
        "layer": case.layer,
        "work": case.work,
        "B": case.B,
        "Hq": layer.Hq,
        "Hkv": layer.Hkv,
        "Sq": case.Sq,
        "Skv": case.keys,
        "D": layer.D,
        "Dv": layer.value_dim,
        "page": case.page,
        "dtype": "bf16",
    }
