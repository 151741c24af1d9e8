"""Launches refuse arguments that their kernels do not take, and allocate what calls return."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.runtime._allocation import _allocator

from lockstep.kernels import launch
from lockstep.kernels.launch import Buffer, Launch, Launches

BF16 = torch.bfloat16


def jitted(*names: str, constants: tuple[str, ...] = ()) -> Any:
    parameters = [
        SimpleNamespace(
            name=x, is_constexpr=x in constants, do_not_specialize=not x.endswith("_special")
        )
        for x in names
    ]
    return SimpleNamespace(__name__="toy", arg_names=names, params=parameters, hash="toy")


def test_a_missing_and_an_unknown_argument_raise():
    toy = jitted("x_ptr", "n", "SIZE", constants=("SIZE",))
    Launch(toy, (1,), {"n": 1, "SIZE": 2})
    with pytest.raises(TypeError, match=r"toy takes the arguments .*: missing \['SIZE'\]"):
        Launch(toy, (1,), {"n": 1})
    with pytest.raises(TypeError, match=r"missing \[\], unknown \['m'\]"):
        Launch(toy, (1,), {"n": 1, "SIZE": 2, "m": 3})
    with pytest.raises(TypeError, match=r"takes the maps \[\]: missing \[\], unknown \['x'\]"):
        Launch(toy, (1,), {"n": 1, "SIZE": 2}, maps={"x": lambda x: x})
    with pytest.raises(TypeError, match=r"has no pointers or maps \['y'\]"):
        Launch(toy, (1,), {"n": 1, "SIZE": 2}, names={"y": "x"})
    with pytest.raises(TypeError, match=r"has no pointers or maps \['y'\]"):
        Launch(toy, (1,), {"n": 1, "SIZE": 2}, absent=("y",))
    with pytest.raises(TypeError, match=r"takes the maps \['x'\]: missing \['x'\]"):
        Launch(jitted("x_desc"), (1,), {})


def test_a_number_that_would_be_compiled_for_raises():
    """A compiled kernel serves all numbers: it must not be one for multiples of 16."""
    with pytest.raises(TypeError, match=r"toy would be compiled for each value of \['n_special'\]"):
        Launch(jitted("n_special"), (1,), {"n_special": 1})
    Launch(jitted("n_special"), (1,), {"n_special": 1.0})


def test_a_tensor_that_the_call_does_not_have_raises():
    where, pointer = torch.device("cpu"), Launch(jitted("x_ptr"), (1,), {})
    Launches(where, ("x",), {}, {}, [pointer])
    Launches(where, (), {"x": None}, {}, [pointer])
    with pytest.raises(TypeError, match=r"toy takes \['x'\], which the call does not have"):
        Launches(where, ("y",), {}, {}, [pointer])
    with pytest.raises(TypeError, match="two tensors of one call have one name"):
        Launches(where, ("x",), {"x": Buffer((1,), torch.float32)}, {}, [pointer])
    described = Launch(jitted("x_desc"), (1,), {}, maps={"x": lambda x: x})
    with pytest.raises(TypeError, match=r"toy takes \['x'\]"):
        Launches(where, ("y",), {}, {}, [described])


def test_no_number_makes_another_binary():
    def kernel(x_ptr, kv_lens_ptr, y_desc, n, scale, SIZE: Any):
        pass

    kernel.__annotations__["SIZE"] = "tl.constexpr"
    jit = lambda **options: lambda function: options  # noqa: E731
    found = launch.unspecialized(jit, any_address=("kv_lens_ptr",))(kernel)
    assert found == {"do_not_specialize": ["n", "scale", "kv_lens_ptr"]}
    with pytest.raises(TypeError, match=r"kernel has no parameters \['page_table_ptr'\]"):
        launch.unspecialized(jit, any_address=("page_table_ptr",))(kernel)


class TestAllocator:
    """A launch leaves the caller's allocator of Triton's scratch memory as it was."""

    @pytest.fixture
    def of_the_caller(self):
        def allocator(size: int, alignment: int, stream: int | None) -> torch.Tensor:
            raise AssertionError("not for these kernels")

        before = _allocator.set(allocator)
        yield allocator
        _allocator.reset(before)

    def toy(self, start: Callable[..., Any]) -> Any:
        class Toy(SimpleNamespace):
            __hash__ = object.__hash__

            def __getitem__(self, grid: Any) -> Any:
                return start

        return Toy(
            __name__="toy", arg_names=("x_ptr",), params=(), hash="toy", is_gluon=lambda: False
        )

    def test_first_and_later_launches(self, of_the_caller, monkeypatch):
        lent = torch.zeros(2 * 128)
        monkeypatch.setattr(launch, "allocate", lambda *size: lent)
        seen = []

        class Again:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *_: seen.append(_allocator.get()(256, 16, 0))

        def start(*_: Any, enable_fp_fusion: bool) -> Any:
            assert enable_fp_fusion
            seen.append(_allocator.get()(256, 16, 0))
            return Again()

        once = Launch(self.toy(start), (2,), {})
        for _ in range(2):
            once.run((torch.zeros(1),), 0)
            assert _allocator.get() is of_the_caller
        assert [x is lent for x in seen] == [True, True]

    def test_a_launch_that_fails(self, of_the_caller):
        def start(*_: Any, **options: Any) -> Any:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            Launch(self.toy(start), (2,), {}).run((torch.zeros(1),), 0)
        assert _allocator.get() is of_the_caller
