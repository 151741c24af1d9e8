"""Where tests of the Triton kernels run: on a GPU if there is one, otherwise in the interpreter.

The interpreter has to be chosen before Triton sees a kernel, with TRITON_INTERPRET=1:
`test_triton_interpreter.py` runs these tests so in a process of its own. Without either they skip.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_calls import forget_calls as forget_calls
from problems import Case, Result, assert_allowed, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreter  # noqa: F401

from lockstep.kernels.triton import launch, plan  # noqa: E402

GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

needs_triton = pytest.mark.skipif(
    not (GPU or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1 in the environment"
)


def attend(case: Case) -> Result:
    """What the kernel makes of a case, on the device under test; the result comes back."""
    tensors = {name: tensor.to(DEVICE) for name, tensor in case.tensors.items()}
    result = run(Case(tensors, case.options), kernel="triton")
    return Result(result.out.cpu(), result.lse.cpu())


def check(case: Case) -> None:
    """The error rule; the oracle and PyTorch's operators run on the CPU."""
    assert_allowed(case, attend(case).items(), kernel="triton")


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys and spans of 32, so that small problems have several of both."""
    tiles = plan.Tiles(16, 16, 1, 2)
    for module in (plan, launch):
        monkeypatch.setattr(module, "LEAST_SPAN", 32)
    table = dict.fromkeys((64, 128, 256, 512), (tiles, tiles))
    for name in ("_HALF", "_HALF_BY_POINTERS", "_SINGLE", "_SINGLE_BY_POINTERS", "_BF16X6"):
        monkeypatch.setattr(plan, name, table)
    forget_calls(monkeypatch)


def use_multiprocessors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Plans for a device of another size: 1 splits nothing, 1000 gives every span a program."""
    real = launch.device_of(torch.device(DEVICE))
    device = replace(real, multiprocessors=number)
    monkeypatch.setattr(launch, "device_of", lambda _: device)
    forget_calls(monkeypatch)
