"""A launch leaves the caller's allocator of Triton's scratch memory as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime._allocation import _allocator

from lockstep.kernels import driver
from lockstep.kernels.triton import launch


class Compiled:
    """What Triton returns of a kernel's first launch; notes who would give memory at each."""

    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(global_scratch_size=128)

    def __init__(self) -> None:
        self.allocators: list[Any] = []
        self.arguments: tuple[Any, ...] = ()

    def run(self, *arguments: Any) -> None:
        self.allocators.append(_allocator.get())
        self.arguments = arguments


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
    """An allocator that somebody else has set; and launches go Triton's way."""

    def allocator(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError("not for these kernels")

    monkeypatch.setattr(driver, "parameters_of", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    before = _allocator.set(allocator)
    yield allocator
    _allocator.reset(before)


def test_first_and_later_launches(of_the_caller, monkeypatch):
    lent = torch.zeros(2 * 128)
    monkeypatch.setattr(launch, "allocate", lambda *size: lent)
    kernel = Kernel()
    start = launch.Launch(kernel, (2,), {})
    for _ in range(2):
        start(torch.zeros(1))
        assert _allocator.get() is of_the_caller
    assert start.scratch_bytes == 2 * 128
    assert [give(256, 16, 0) for give in kernel.compiled.allocators] == [lent, lent.data_ptr()]


def test_a_launch_that_fails(of_the_caller):
    start = launch.Launch(Kernel(ValueError("no")), (2,), {})
    with pytest.raises(ValueError, match="no"):
        start(torch.zeros(1))
    assert _allocator.get() is of_the_caller
