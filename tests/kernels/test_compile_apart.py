"""Builds that another process leaves on disk, without a GPU, are those that a launch looks for."""

from __future__ import annotations

import os
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from hopper_build import compile_for_hopper
from toy_kernel import ARGUMENTS, toy
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lockstep.build_processes import processes
from lockstep.kernels.compile_apart import BuildApart

SM_90 = GPUTarget("cuda", 90, 32)


def launcher(source, metadata):
    """Stands for Triton's, which would look for a CUDA driver."""


@pytest.fixture
def apart(monkeypatch):
    """The toy kernel as another process compiles it."""
    fake = SimpleNamespace(get_current_target=lambda: SM_90, launcher_cls=launcher)
    monkeypatch.setattr(driver, "_active", fake)
    return BuildApart.of(toy, ARGUMENTS, {"num_warps": 4})


@pytest.mark.parametrize("can_copy", [True, False])
def test_another_process_compiles_what_this_one_looks_for(can_copy, apart, tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    # A process that does not begin as a copy of this one imports what stands beside the tests, too.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with processes(2, int, can_copy) as others:
        assert list(others.share([apart.compile])) == [0]
    left = {path for path in tmp_path.iterdir() if path.is_dir()}
    assert any(path.glob("*.cubin") for path in left)
    compile_for_hopper(toy, ARGUMENTS, num_warps=4)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == left


def test_a_build_apart_has_no_memory(apart):
    back = pickle.loads(pickle.dumps(apart))
    assert back.kernel is toy
    tensors = [getattr(x, "base", x) for x in back.arguments]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    assert tensors
    assert {x.device.type for x in tensors} == {"meta"}
    assert len(pickle.dumps(apart)) < 10_000
