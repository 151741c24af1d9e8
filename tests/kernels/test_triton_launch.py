"""A launch leaves the caller's allocator of Triton's scratch memory as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime._allocation import _allocator

from lockstep.kernels.triton import launch, scratch
from lockstep.kernels.triton.plan import INTERPRETER, plan_of
from lockstep.problem import Options, Tensors, describe


class Compiled:
    """What Triton returns of a kernel's first launch; notes who would give memory at each."""

    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(global_scratch_size=128)

    def __init__(self) -> None:
        self.allocators: list[Any] = []

    def run(self, *arguments: Any) -> None:
        self.allocators.append(_allocator.get())


class Kernel:
    """A jitted kernel without arguments but pointers."""

    arg_names = ("x_ptr",)

    def __init__(self, error: Exception | None = None) -> None:
        self.compiled, self.error = Compiled(), error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **options: Any) -> Compiled:
            if self.error is not None:
                raise self.error
            self.compiled.run()
            return self.compiled

        return start


@pytest.fixture
def of_the_caller(monkeypatch):
    """An allocator that somebody else has set."""

    def allocator(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError("not for these kernels")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    before = _allocator.set(allocator)
    yield allocator
    _allocator.reset(before)


def test_first_and_later_launches(of_the_caller):
    kernel = Kernel()
    start = launch.Launch(kernel, (2,), {})
    for _ in range(2):
        start(torch.zeros(1))
        assert _allocator.get() is of_the_caller
    assert kernel.compiled.allocators == [scratch.allocate] * 2
    assert start.scratch_bytes == 2 * 128


def test_a_launch_that_fails(of_the_caller):
    start = launch.Launch(Kernel(ValueError("no")), (2,), {})
    with pytest.raises(ValueError, match="no"):
        start(torch.zeros(1))
    assert _allocator.get() is of_the_caller


def test_a_forward_call_lends_its_workspace(of_the_caller):
    """And for that launch only: another's kernel must not get memory that is free again."""
    compiled = Compiled()
    q = torch.randn(1, 2, 5, 64)
    tensors = Tensors(q, q, q)
    problem = describe(tensors, Options())
    call = launch.Call(problem, tensors, plan_of(problem, INTERPRETER), INTERPRETER)
    call.attend._run, call.attend.scratch_bytes = compiled.run, 128
    call.attend._function = call.attend._metadata = None
    call.workspace_bytes += 128
    out, lse = call(tensors, [None] * len(tensors), 0)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    assert _allocator.get() is of_the_caller
    (lent,) = compiled.allocators
    assert lent is not of_the_caller
    assert isinstance(lent(128, 16, 0), int)
