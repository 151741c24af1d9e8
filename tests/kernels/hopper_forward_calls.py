"""Calls of the Hopper forward on a GPU, for its tests."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import forward
from problems import Case, assert_allowed, pose

from lockstep.kernels import hopper

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

DTYPES = (torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
# Each pair is a build of its own, and most of the time goes into builds.
by_build = pytest.mark.parametrize(
    ("D", "dtype"),
    [(64, torch.bfloat16), (128, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)],
    ids=["64-bf16", "128-fp16", "128-bf16", "256-bf16"],
)


def on_gpu(case: Case) -> Case:
    return Case({name: x.cuda() for name, x in case.tensors.items()}, case.options)


def launch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the Hopper kernel for a case on the GPU, whether dispatch would choose it
    or not."""
    return forward(hopper.KERNEL, *pose(case))[:2]


def hopper_run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a case on the CPU, back on the CPU."""
    out, lse = launch(on_gpu(case))
    return out.cpu(), lse.cpu()


def check(case: Case) -> None:
    """The error rule."""
    assert_allowed(case, dict(zip(("out", "lse"), hopper_run(case), strict=True)), kernel="hopper")
