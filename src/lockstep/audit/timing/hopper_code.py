"""The constant-time builds of the Hopper kernels, cross-compiled: forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from lockstep.audit.timing.triton_code import Find, leaks_of_call
from lockstep.kernels.hopper import KERNEL
from lockstep.kernels.hopper.backward.medium import call as medium
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.problem import Options, Tensors, describe
from lockstep.simt.taint import Leak

CAPABILITY, PROCESSORS = 90, 132


class Build(NamedTuple):
    """A kind of call."""

    D: int
    causal: bool = False
    packed: bool = False
    S: int = 512
    Dv: int = 0  # that of values, if it is another
    window: tuple[int, int] | None = None
    has_more: bool = False  # lengths, sinks, and a softcap
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        kind = f", Dv {self.Dv}" * bool(self.Dv) + ", causal" * self.causal
        kind += ", packed" * self.packed + ", long" * (self.S > 4096)
        kind += ", medium" * (512 < self.S <= 4096)
        kind += ", window" * bool(self.window) + ", lengths, sinks, softcap" * self.has_more
        kind += ", fp16" * (self.dtype == torch.float16)
        return f"D {self.D}{kind} for sm_{CAPABILITY}"

    @property
    def options(self) -> Options:
        left, right = self.window or (None, None)
        softcap = 20.0 if self.has_more else None
        return Options(self.causal, left, right, softcap=softcap, constant_time=True)

    @property
    def tensors(self) -> Tensors:
        if self.packed:
            q, k, v = self._zeros(1024, 2)
            offsets = torch.tensor([0, 300, 1024], dtype=torch.int32)
            return Tensors(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        more = {}
        if self.has_more:
            more = {"kv_lens": torch.tensor([300], dtype=torch.int32), "sinks": torch.zeros(2)}
        return Tensors(*self._zeros(1, 2, self.S), **more)

    def _zeros(self, *shape: int) -> list[Tensor]:
        """q, k and v of a shape but for their head dims."""
        head_dims = self.D, self.D, self.Dv or self.D
        return [torch.zeros(*shape, D, dtype=self.dtype) for D in head_dims]


_BOTH = (
    Build(64, True),
    Build(128),
    Build(256),
    Build(64, True, packed=True),
    Build(64, window=(150, 20)),
    Build(128, True, has_more=True),
    Build(128, True, dtype=torch.float16),
)
# Long heads have other tiles in the forward.
_LONG = (Build(64, S=16384), Build(64, True, S=16384), Build(128, True, S=16384))
# Causal ones of up to a thousand keys have one loop.
_SHORT = (Build(128, True), Build(64, True, S=2048))
FORWARD = (*_BOTH, Build(192, True, packed=True), Build(192, True, Dv=128), *_SHORT, *_LONG)
BACKWARD = (
    *_BOTH,
    Build(192, True),
    Build(192, True, packed=True, Dv=128),
    Build(256, True, packed=True),
)


def builds() -> Iterator[tuple[str, Find]]:
    """Every build by name, and what looks for leaks in it."""
    for build in FORWARD:
        yield f"hopper: forward, {build.name}", partial(forward_leaks, build)
    for build in BACKWARD:
        yield f"hopper: backward, {build.name}", partial(backward_leaks, build)


def forward_leaks(build: Build) -> list[Leak]:
    """Leaks in the kernels of a forward."""
    tensors = build.tensors
    problem = describe(tensors, build.options)
    return leaks_of_call(forward_launches(problem, tensors, PROCESSORS), tensors, CAPABILITY)


def backward_leaks(build: Build) -> list[Leak]:
    """Leaks in the kernels of a backward."""
    tensors = build.tensors
    problem, out = describe(tensors, build.options), tensors.q[..., : tensors.v.shape[-1]]
    given = BackwardTensors(*tensors, out, out[..., :2].float().contiguous(), out, None)
    needs = Needs(True, True, True, False, tensors.sinks is not None)
    prepare: Any = KERNEL.prepare_backward
    with (
        patch.object(narrow, "processors", lambda _: PROCESSORS),
        patch.object(medium, "processors", lambda _: PROCESSORS),
    ):
        call = prepare(problem, given, needs)
    return leaks_of_call(call, given, CAPABILITY)
