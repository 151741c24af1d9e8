"""The constant-time builds of the Hopper kernels, cross-compiled: forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from lockstep.audit.timing.triton_code import Find, leaks_of_call
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.problem import Options, Tensors, describe
from lockstep.simt.taint import Leak

CAPABILITY, PROCESSORS = 90, 132
# Head dim, whether causal.
FORWARD, BACKWARD = ((64, True), (128, False)), ((64, True), (128, False))


def builds() -> Iterator[tuple[str, Find]]:
    """Every build by name, and what looks for leaks in it."""
    for D, causal in FORWARD:
        yield f"hopper: forward, {_name(D, causal)}", partial(_forward_leaks, D, causal)
    for D, causal in BACKWARD:
        yield f"hopper: backward, {_name(D, causal)}", partial(_backward_leaks, D, causal)


def _name(D: int, causal: bool) -> str:
    return f"D {D}{', causal' if causal else ''} for sm_{CAPABILITY}"


def _tensors(D: int) -> Tensors:
    q, k, v = torch.zeros(3, 2, 2, 512, D, dtype=torch.bfloat16)
    return Tensors(q, k, v)


def _forward_leaks(D: int, causal: bool) -> list[Leak]:
    tensors = _tensors(D)
    problem = describe(tensors, Options(causal=causal, constant_time=True))
    return leaks_of_call(forward_launches(problem, tensors, PROCESSORS), tensors, CAPABILITY)


def _backward_leaks(D: int, causal: bool) -> list[Leak]:
    tensors = _tensors(D)
    problem = describe(tensors, Options(causal=causal, constant_time=True))
    out = tensors.q
    given = BackwardTensors(*tensors, out, out[..., :2].float().contiguous(), out, None)
    with patch.object(narrow, "processors", lambda _: PROCESSORS):
        call: Any = narrow.prepare_backward(problem, given, Needs(True, True, True, False, False))
    return leaks_of_call(call, given, CAPABILITY)
