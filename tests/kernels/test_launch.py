"""Launches by name: what the driver reads at the place of every parameter of every kernel.

No kernel is compiled or run. A driver of our own reads the memory of a launch by the signature of
the kernel, and each parameter is held against the tensor or the number of its name.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from fake_driver import Driver, Read
from triton.runtime.jit import JITFunction
from triton_builds import DEVICES

from lockstep.cache import Cache
from lockstep.kernels import driver, graphs, hopper, launch, straight_line
from lockstep.kernels.allocate import allocator
from lockstep.kernels.hopper import decode
from lockstep.kernels.hopper.backward.medium import call as medium
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.common.gluon_shim import VIEWS_GROW
from lockstep.kernels.hopper.decode import launch as hopper_decode
from lockstep.kernels.hopper.forward import launch as hopper_forward
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.launch import Launch, Launches
from lockstep.kernels.triton import backward as triton_backward
from lockstep.kernels.triton import launch as triton_forward
from lockstep.problem import Tensors, describe, make_options

BF16 = torch.bfloat16
STREAM, SCRATCH = 5, 256
# Parameters of the Hopper kernels that have other names than their tensors.
TENSORS = {
    "cu_q": "cu_seqlens_q",
    "cu_kv": "cu_seqlens_k",
    "order": "sequence_order",
    "o": "out",
    "q_rest": "q",
    "k_rest": "k",
    "dk_rest": "dk",
    "chunk": "sums",
    "middle": "sums",
}


@pytest.fixture
def fake(monkeypatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_COMPILED", Cache(limit=100))
    monkeypatch.setattr(JITFunction, "__getitem__", lambda k, grid: partial(fake.compile, k, grid))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    for module in (narrow, medium, hopper_forward, hopper_decode):
        monkeypatch.setattr(module, "processors", lambda _: 132)
    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "device_of", lambda _: DEVICES[90])
    return fake


def drawn(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


# That of values, where it is another.
DV = {192: 128}


def dense(Sq: int = 70, Skv: int = 300, D: int = 64, **more: Any) -> Tensors:
    v = drawn(2, 2, Skv, DV.get(D, D))
    return Tensors(drawn(2, 4, Sq, D), drawn(2, 2, Skv, D), v, **more)


def packed(D: int = 64, B: int = 2, **more: Any) -> Tensors:
    offsets = [torch.zeros(B + 1, dtype=torch.int32) for _ in range(2)]
    q, k, v = (drawn(300, 4, d) for d in (D, D, DV.get(D, D)))
    return Tensors(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **more)


def paged() -> Tensors:
    pages = drawn(8, 256, 2, 64), drawn(8, 256, 2, 64)
    table = torch.zeros(2, 16, dtype=torch.int32)
    return Tensors(drawn(2, 4, 1, 64), *pages, kv_lens=torch.tensor([5, 7]), page_table=table)


SINKS = torch.zeros(4)
INPUTS = {
    "dense": dense,
    "sinks": lambda **sizes: dense(sinks=SINKS, **sizes),
    "kv_lens": lambda **sizes: dense(kv_lens=torch.tensor([7, 300]), **sizes),
    "packed": packed,
    "many packed": lambda **sizes: packed(B=200, sinks=SINKS, **sizes),
    "bias": lambda **sizes: dense(bias=drawn(1, 4, 1, 300), **sizes),
    "a bias of each": lambda **sizes: dense(bias=drawn(2, 4, 70, 300), **sizes),
    "split": lambda **sizes: dense(Sq=1, Skv=9000, sinks=SINKS, **sizes),
    "paged": lambda **sizes: paged(),
}


def saved_of(tensors: Tensors) -> BackwardTensors:
    q = tensors.q
    out = q.new_empty(*q.shape[:-1], tensors.v.shape[-1])
    rows = torch.zeros(q.shape[:-1])
    return BackwardTensors(*tensors, out, torch.stack((rows, rows), -1), drawn(*out.shape), rows)


def problem_of(tensors: Tensors, window: Any = None, **options: Any) -> Any:
    options = make_options(True, window, None, None, **options)
    return replace(describe(tensors, options), device_type="cuda")


def forward_of(kernel: str, tensors: Tensors, **options: Any) -> Any:
    prepare = {
        "triton": triton_forward.prepare,
        "hopper": hopper.KERNEL.prepare,
        "hopper_decode": decode.KERNEL.prepare,
    }[kernel]
    return prepare(problem_of(tensors, **options), tensors)


def backward_of(kernel: str, saved: BackwardTensors) -> Any:
    prepare = triton_backward.prepare_backward
    if kernel == "hopper":
        prepare = hopper.KERNEL.prepare_backward
    needs = Needs(True, True, True, saved.bias is not None, saved.sinks is not None)
    return prepare(problem_of(saved.inputs), saved, needs)


def check(fake: Driver, call: Launches, given: Any) -> None:
    """All later calls, with other tensors, have each parameter at its place."""
    # In place of gradients and the like: every tensor of a call by its name.
    call._finish = call.named
    for _ in range(2):
        call(given, given.addresses())
    assert not fake.launches, "the first two go through Triton"
    for _ in range(3):
        given = type(given)(*(None if x is None else x.clone() for x in given))
        fake.launches.clear()
        expected = call(given, given.addresses())
        assert len(fake.launches) == len(call.launches)
        for read, planned in zip(fake.launches, call.launches, strict=True):
            assert (read.kernel, read.grid) == (planned.name, planned.grid)
            assert read.stream == STREAM
            assert read.scratch == 0
            for name, found in read.found.items():
                check_parameter(name, found, planned, expected)


def check_parameter(name: str, found: float, planned: Launch, expected: dict[str, Any]) -> None:
    if not name.endswith(("_ptr", "_desc")):
        value = planned._arguments[name]
        assert found == (ctypes.c_float(value).value if isinstance(value, float) else value), name
        return
    tensor = name.removesuffix("_ptr").removesuffix("_desc")
    if name == "dq_desc" and not planned._arguments.get("FINISHED", True):
        # It is not used, and one build serves calls that want no dq.
        tensor = "sums"
    of = expected.get(TENSORS.get(tensor, tensor))
    if of is None:
        # Hopper kernels take any pointer for one that they do not use.
        of = expected["lse"]
    assert found == of.data_ptr(), f"{planned.name}: {name}"


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_forward(fake, kernel, case):
    tensors = INPUTS[case](D=64)
    if kernel == "hopper" and (tensors.bias is not None or case in ("paged", "split")):
        pytest.skip("hopper refuses it")
    call = forward_of(kernel, tensors)
    check(fake, call, tensors)
    names = {read.kernel for read in fake.launches}
    assert ("reduce_parts" in names) == (case in ("split", "paged") and kernel == "triton")
    assert ("sort_sequences_kernel" in names) == (case == "many packed" and kernel == "hopper")


# Of tiles whose keys have one part, and of others.
FORWARDS = ("forward_kernel",) * 2


@pytest.mark.parametrize(
    ("Tq", "B", "pages_of_each", "bound", "expected"),
    [
        (64, 3, 16, None, ["list_tiles", "decode_kernel", "fold_slots"]),
        # All have fewer queries than have tiles of their own.
        (100, 3, 16, None, ["list_tiles", "decode_kernel", "forward_kernel", "fold_slots"]),
        (300, 3, 16, None, ["list_tiles", "decode_kernel", *FORWARDS, "fold_slots"]),
        # No sequence has so many queries.
        (300, 3, 16, 127, ["list_tiles", "decode_kernel", *FORWARDS, "fold_slots"]),
        (300, 3, 16, 64, ["list_tiles", "decode_kernel", "fold_slots"]),
        (300, 3, 16, 5, ["list_tiles", "decode_kernel", "fold_slots"]),
        (300, 3, 4, 2, ["list_tiles", "decode_kernel"]),
    ],
)
def test_ragged_queries_in_pages(fake, Tq, B, pages_of_each, bound, expected):
    q, pages = drawn(Tq, 32, 64), [drawn(8, 256, 8, 64) for _ in range(2)]
    offsets, lens = torch.zeros(B + 1, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    table = torch.zeros(B, pages_of_each, dtype=torch.int32)
    tensors = Tensors(q, *pages, kv_lens=lens, cu_seqlens_q=offsets, page_table=table)
    call = forward_of("hopper_decode", tensors, max_seqlen_q=bound)
    for _ in range(3):
        call(tensors, tensors.addresses())
    assert [read.kernel for read in fake.launches] == expected


@pytest.mark.skipif(not VIEWS_GROW, reason="this Triton has no views that grow")
@pytest.mark.parametrize(("Tq", "bound"), [(3, None), (3, 1), (300, None)])
def test_ragged_queries_behind_a_narrow_window(fake, Tq, bound):
    q, pages = drawn(Tq, 32, 64), [drawn(8, 256, 8, 64) for _ in range(2)]
    offsets, lens = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(3, 16, dtype=torch.int32)
    tensors = Tensors(q, *pages, kv_lens=lens, cu_seqlens_q=offsets, page_table=table)
    options = {"window": (127, 0), "max_seqlen_q": bound}
    call = forward_of("hopper_decode", tensors, **options)
    for _ in range(3):
        call(tensors, tensors.addresses())
    assert [read.kernel for read in fake.launches] == ["list_tiles", "narrow_window_kernel"]


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("kernel", ["triton", "hopper", "hopper_decode"])
def test_out_alone(fake, monkeypatch, kernel, case):
    """What a caller does not get is in the workspace, apart from all else, while it is needed."""
    tensors = INPUTS[case](D=64)
    if kernel == "hopper" and (tensors.bias is not None or case in ("paged", "split")):
        pytest.skip("hopper refuses it")
    if kernel == "hopper_decode" and case not in ("paged", "split"):
        pytest.skip("hopper_decode refuses it")
    allocated: list[torch.Tensor] = []

    def recorded(new: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: allocated.append(new()) or allocated[-1]

    monkeypatch.setattr(launch, "allocator", lambda *how: recorded(allocator(*how)))
    call = forward_of(kernel, tensors)
    for _ in range(3):
        call.out_of(tuple(tensors), tensors.addresses())
    tensors = Tensors(*(None if x is None else x.clone() for x in tensors))
    allocated.clear(), fake.launches.clear()
    out = call.out_of(tuple(tensors), tensors.addresses())
    assert out is allocated[0]
    assert len(fake.launches) == len(call.launches)
    workspace = {} if len(allocated) == 1 else call_regions(call, fake.launches, allocated[1])
    expected = dict(zip(Tensors._fields, tensors, strict=True)) | {"out": out} | workspace
    if kernel == "hopper_decode":
        expected["tiles"] = workspace["slots"]
        expected["kv_lens"] = call._kept.get("lengths", tensors.kv_lens)
    for read, planned in zip(fake.launches, call.launches, strict=True):
        for name, found in read.found.items():
            check_parameter(name, found, planned, expected)


def call_regions(
    call: Launches, launches: list[Read], workspace: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Regions of a workspace where kernels were told that they are, checked not to overlap."""
    buffers = call._regions | dict(list(call._results.items())[1:])
    starts = {}
    for read in launches:
        for name, found in read.found.items():
            if name.removesuffix("_ptr") in buffers:
                starts.setdefault(name.removesuffix("_ptr"), found)
    ends = [workspace.data_ptr() + workspace.numel()]
    for name, start in sorted(starts.items(), key=lambda named: -named[1]):
        assert start % straight_line.ALIGNMENT == workspace.data_ptr() % straight_line.ALIGNMENT
        assert start + buffers[name].n_bytes <= ends[-1]
        ends.append(start)
    assert workspace.data_ptr() <= ends[-1]
    assert set(starts) == set(buffers)
    offsets = {name: start - workspace.data_ptr() for name, start in starts.items()}
    return {name: workspace[at:] for name, at in offsets.items()}


@pytest.mark.parametrize(
    "case", ["dense", "sinks", "kv_lens", "packed", "many packed", "bias", "a bias of each"]
)
@pytest.mark.parametrize(
    ("kernel", "D"), [("triton", 64), ("hopper", 64), ("hopper", 192), ("hopper", 256)]
)
def test_backward(fake, kernel, D, case):
    saved = saved_of(INPUTS[case](D=D))
    if kernel == "hopper" and saved.bias is not None:
        pytest.skip("hopper takes no bias")
    check(fake, backward_of(kernel, saved), saved)
    names = {read.kernel for read in fake.launches}
    expected = {
        "triton": {"prepare_rows", "sum_keys", "sum_queries"},
        "hopper": {"prepare_rows", "backward_kernel"},
    }[kernel]
    problem = problem_of(saved.inputs)
    if kernel == "hopper" and (problem.Hq > problem.Hkv or problem.window[1] is None):
        expected |= {"finish_queries"}
    if D == 192:
        expected = {"prepare_rows", "medium_kernel", "finish_queries"}
    if D == 256:
        expected = {"prepare_rows", "keys_kernel", "queries_kernel"}
    if kernel == "triton":
        expected |= {"sum_bias"} if saved.bias is not None else set()
    expected |= {"sum_sinks"} if saved.sinks is not None else set()
    assert names == expected


def test_scratch_memory_is_behind_the_workspace(fake):
    fake.scratch = SCRATCH
    tensors = INPUTS["split"](D=64)
    call = forward_of("triton", tensors)
    call._finish = lambda tensors, results, workspace: workspace
    for _ in range(3):
        workspace = call(tensors, tensors.addresses())
    attend, reduce_parts = fake.launches
    of_attend, of_reduce = attend.scratch - workspace.data_ptr(), reduce_parts.scratch
    assert 0 < call.workspace_bytes <= of_attend
    assert of_attend + SCRATCH * math.prod(attend.grid) <= of_reduce - workspace.data_ptr()
    end = of_reduce - workspace.data_ptr() + SCRATCH * math.prod(reduce_parts.grid)
    assert end <= workspace.numel()


@pytest.mark.parametrize("captured", [True, False])
def test_what_a_graph_has_the_address_of_is_kept(monkeypatch, captured):
    monkeypatch.setattr(graphs, "_CAPTURED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    kept = torch.zeros(3)
    seen = weakref.ref(kept)
    for _ in range(2):
        graphs.keep_if_captured([kept])
    assert len(graphs._CAPTURED) == captured
    del kept
    assert (seen() is not None) is captured
