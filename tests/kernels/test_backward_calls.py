"""Gradients of a call like an earlier one: kernels get the addresses that a first call gives them.

Without a GPU, kernels are neither compiled nor run: it is looked at what they are given."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.runtime.jit import JITFunction
from triton_builds import DEVICES

from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.kernels import launch
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.triton import launch as triton_launch
from lockstep.problem import AttentionProblem, Tensors, describe, make_options

BF16 = torch.bfloat16
STREAM = 5
COPIED = ("q", "k", "v", "dout")


def addresses_of(tensors: list[torch.Tensor | None]) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def first_bytes(address: int) -> bytes:
    return ctypes.string_at(address, 4)


@dataclass
class Launches:
    """What would have been launched: kernel, grid, addresses, those of tensor maps, and what stands
    there then, as copies are gone when the kernels have run."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    by_driver: int = 0
    during_compilation: Any = None

    def compile(self, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> Any:
        self.note(kernel.__name__, grid, (*arguments, *constants.values()))
        if self.during_compilation is not None:
            during, self.during_compilation = self.during_compilation, None
            during(kernel.__name__)
        return Compiled(kernel.__name__, self)

    def note(self, name: str, grid: Any, arguments: tuple[Any, ...]) -> None:
        pointers = [x for x in arguments if isinstance(x, torch.Tensor)]
        bases = [x.base for x in arguments if hasattr(x, "block_shape")]
        self.read(name, grid, addresses_of(pointers), addresses_of(bases))

    def launcher(self, compiled: Any, grid: Any, arguments: tuple[Any, ...]) -> Any:
        n_maps = sum(hasattr(x, "block_shape") for x in arguments)

        def launch(stream: int, *addresses: int) -> None:
            assert stream == STREAM
            self.by_driver += 1
            self.read(compiled.name, grid, addresses[n_maps:], addresses[:n_maps])

        return launch

    def read(self, name: str, grid: Any, addresses: Any, bases: Any) -> None:
        begins = {x: first_bytes(x) for x in (*addresses, *bases) if x}
        self.log.append((name, tuple(grid), tuple(addresses), tuple(bases), begins))


@dataclass
class Compiled:
    name: str
    launches: Launches

    class metadata:
        global_scratch_size = 0

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.note(self.name, grid, arguments)


@pytest.fixture
def launches(monkeypatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(JITFunction, "__getitem__", lambda k, grid: partial(found.compile, k, grid))
    monkeypatch.setattr(launch, "launcher_of", found.launcher)
    monkeypatch.setattr(launch, "_COMPILED", Cache(limit=100))
    monkeypatch.setattr(narrow, "processors", lambda _: 132)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    return found


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def dense(S: int = 70, D: int = 64, **more: Any) -> BackwardTensors:
    q, dout = drawn(2, 4, S, D), drawn(2, 4, S, D)
    k, v = drawn(2, 2, 300, D), drawn(2, 2, 300, D)
    statistics, dlse = torch.rand(2, 4, S, 2), torch.randn(2, 4, S)
    tensors = Tensors(q, k, v, **more)
    return BackwardTensors(*tensors, drawn(2, 4, S, D), statistics, dout, dlse)


def varlen(D: int = 64) -> BackwardTensors:
    q, dout, k, v = (drawn(300, 4, D) for _ in range(4))
    offsets = [torch.tensor([0, n, 300], dtype=torch.int32) for n in (100, 120)]
    tensors = Tensors(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    out, statistics, dlse = drawn(300, 4, D), torch.rand(300, 4, 2), torch.randn(300, 4)
    return BackwardTensors(*tensors, out, statistics, dout, dlse)


def odd(D: int = 64) -> BackwardTensors:
    """q and dout at addresses that are copied."""
    given = dense(D=D)
    q, dout = (drawn(x.numel() + 1)[1:].view_as(x) for x in (given.q, given.dout))
    return given._replace(q=q, dout=dout)


CASES = {
    "dense": dense,
    "without dlse": lambda **sizes: dense(**sizes)._replace(dlse=None),
    "sinks": lambda **sizes: dense(sinks=torch.randn(4), **sizes),
    "kv_lens": lambda **sizes: dense(kv_lens=torch.tensor([7, 300]), **sizes),
    "varlen": varlen,
    "odd": odd,
}


def needs_of(given: BackwardTensors, names: str = "qkv") -> Needs:
    return Needs(*(name in names for name in "qkv"), bias=False, sinks=given.sinks is not None)


def problem_of(tensors: Tensors) -> AttentionProblem:
    problem = describe(tensors, make_options(True, None, None, None))
    return replace(problem, device_type="cuda")


def prepare(kernel: str, given: BackwardTensors, needs: Needs | None = None) -> Any:
    (found,) = dispatch.candidates(kernel)
    return found.prepare_backward(problem_of(given.inputs), given, needs or needs_of(given))


def run(call: Any, launches: Launches, given: BackwardTensors) -> list[Any]:
    """Launches of a call, with names in place of addresses, and places in workspaces."""
    start = len(launches.log)
    grads = call(given, given.addresses())
    fields = BackwardTensors._fields
    names = dict(zip(given.addresses(), fields, strict=True))
    names |= {x.data_ptr(): f"d{name}" for name, x in grads._asdict().items() if x is not None}
    names[0] = None
    # Others are not copied, but what a draw left in memory may look like them.
    addresses = {n: getattr(given, n).data_ptr() for n in COPIED}
    copies = {first_bytes(x): f"a copy of {n}" for n, x in addresses.items() if x % 16}
    # The only one that the first kernel takes besides: rows or stats, at the beginning.
    _, _, first, _, begins = launches.log[start]
    workspace = next(x for x in first if x not in names and begins[x] not in copies)
    n_bytes = call.workspace_bytes

    def meaning(address: int, begins: dict[int, bytes]) -> Any:
        place = address - workspace
        if address in names or 0 <= place < n_bytes:
            return names.get(address, place)
        return copies.get(begins[address], "something else")

    return [
        (name, grid, [meaning(x, begins) for x in addresses], [meaning(x, begins) for x in bases])
        for name, grid, addresses, bases, begins in launches.log[start:]
    ]


by_kernel = pytest.mark.parametrize(
    ("kernel", "D"), [("triton", 64), ("hopper", 64), ("hopper", 256)]
)


@pytest.mark.parametrize(
    ("case", "needs"), [*((case, "qkv") for case in CASES), ("dense", "q"), ("dense", "kv")]
)
@by_kernel
def test_later_calls_launch_what_the_first_does(launches, kernel, D, case, needs):
    given = CASES[case](D=D)
    needs = needs_of(given, needs)
    call = prepare(kernel, given, needs)
    first = run(call, launches, given)
    for n in range(4):
        other = CASES[case](D=D)
        assert run(call, launches, other) == first
        assert launches.by_driver == n * len(first)
    used = {x for _, _, addresses, bases in first for x in (*addresses, *bases)}
    copied = {"q", "dout"} if case == "odd" else set()
    results = {f"d{name}" for name in "qkv" if getattr(needs, name)}
    expected = {"q", "k", "v", "dout", "out", "statistics", *results} - copied
    expected |= {f"a copy of {name}" for name in copied}
    expected |= set() if case == "without dlse" else {"dlse"}
    expected |= {"kv_lens"} if case == "kv_lens" else set()
    expected |= {"cu_seqlens_q", "cu_seqlens_k"} if case == "varlen" else set()
    assert expected <= used
    # The narrow Hopper kernel writes dK and dV in any case.
    unused = kernel == "hopper" and D == 64 and not needs.k
    assert ("something else" in used) == unused


@pytest.mark.parametrize("D", [64, 256])
def test_another_shape_takes_the_kernel_that_is_there(launches, D):
    """As all Hopper gradients do: it depends on no size."""
    calls = [(prepare("hopper", given), given) for given in (dense(S=70, D=D), dense(S=71, D=D))]
    first, second = (run(call, launches, given) for call, given in calls)
    assert second == first
    assert len(launch._COMPILED) == len(first)


@by_kernel
def test_no_tensor_is_kept(launches, kernel, D):
    given = dense(D=D)
    call = prepare(kernel, given)
    for _ in range(3):
        grads = call(given, given.addresses())
    seen = [weakref.ref(x) for x in (*given, *grads) if x is not None]
    del given, grads
    assert [x() for x in seen] == [None] * len(seen)


@by_kernel
def test_threads_that_come_while_another_compiles(launches, kernel, D):
    given = dense(D=D)
    call = prepare(kernel, given)
    inner = []

    def others_come(name: str) -> None:
        inner.extend(run(call, launches, given) for _ in range(4))

    launches.during_compilation = others_come
    call(given, given.addresses())
    assert inner == [run(call, launches, given)] * 4


def test_a_thread_that_comes_while_a_split_forward_compiles(launches, monkeypatch):
    """Two kernels, and the second is not there yet."""
    tensors = Tensors(drawn(1, 4, 1, 64), *(drawn(1, 2, 8192, 64) for _ in range(2)))
    monkeypatch.setattr(triton_launch, "device_of", lambda _: DEVICES[90])
    call = triton_launch.prepare(problem_of(tensors), tensors)
    names = []

    def another_comes(name: str) -> None:
        assert name == "attend"
        launches.during_compilation = lambda name: (
            names.append(name),
            call(tensors, tensors.addresses()),
        )

    launches.during_compilation = another_comes
    call(tensors, tensors.addresses())
    assert names == ["reduce_parts"]
    assert [x[0] for x in launches.log] == ["attend", "reduce_parts", "attend", "reduce_parts"]
