"""Kernels compile for a Hopper GPU, up to LLVM's code, with every kind of number that says where
keys are: as a launch would, with its arguments."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from problems import Case, draw, draw_varlen, paginate, pose, ragged

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from launch_arguments import source_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton_builds import DEVICES

from lockstep.cache import Cache
from lockstep.kernels import hopper
from lockstep.kernels import launch as protocol
from lockstep.kernels.hopper.forward.scheduling import sequence_order
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.sequences import bounds_of
from lockstep.kernels.triton import backward, launch, split_kv

BF16 = torch.bfloat16
HOPPER = DEVICES[90]
LENS, OFFSETS = torch.tensor([2000, 3, 700]), [300, 0, 17, 900]


def lengths(dtype: torch.dtype, Sq: int, page_size: int = 0, **more: Any) -> Case:
    case = draw(Sq, 2000, B=3, Hq=8, dtype=BF16, kv_lens=LENS.to(dtype), causal=True, **more)
    return paginate(case, page_size) if page_size else case


def packed(
    dtype: torch.dtype, lens: list[int] = OFFSETS, D: int = 64, Hkv: int | None = None
) -> Case:
    heads = {"Hq": 8} if Hkv is None else {"Hq": 8, "Hkv": Hkv}
    sinks = torch.zeros(8)
    case = draw_varlen(lens, OFFSETS, **heads, D=D, dtype=BF16, causal=True, sinks=sinks)
    for n in ("cu_seqlens_q", "cu_seqlens_k"):
        case = case.replaced(**{n: case.tensors[n].to(dtype)})
    return case


@pytest.fixture
def compiled(monkeypatch, unassembled, keep_builds_in) -> dict[str, str]:
    """What would have been launched, by name, and the layouts that Triton chose; Gluon's kernels
    have tests of their own."""
    found: dict[str, str] = {}

    def compile(function: JITFunction, *arguments: Any, **options: Any) -> None:
        if function.is_gluon():
            return
        kernel = source_of(function, arguments, options, 90).compile()
        found[function.__name__] = kernel.asm["ttgir"]

    monkeypatch.setattr(
        JITFunction, "__getitem__", lambda function, _: lambda *a, **k: compile(function, *a, **k)
    )
    monkeypatch.setattr(protocol, "_COMPILED", Cache(limit=100))
    # Sixteen do the same sixteen times. Keys may have been made with sixteen before.
    monkeypatch.setattr(split_kv, "BATCH", tl.constexpr(2))
    keep_builds_in("batches_of_two")
    return found


def layouts_of_sums(ttgir: str) -> set[str]:
    """The layouts in which fp32 values are summed along rows, but for the search for NaN."""
    found = re.findall(
        r"%(\w+) = \"tt.reduce\"\(\S+ <{axis = 1 : i32}> \(\{[^}]*arith\.addf[^}]*"
        r"\}\) : \(tensor<\w+xf32, (#\w+)>",
        ttgir,
    )
    return {layout for name, layout in found if not name.startswith("nan_sum")}


def derive(prepare: Any, case: Case) -> None:
    problem, tensors = pose(case)
    out, lse = torch.empty(problem.out_shape, dtype=BF16), torch.empty(problem.lse_shape)
    given = BackwardTensors(*tensors, out, lse, out, lse)
    needs = Needs(True, True, True, tensors.bias is not None, tensors.sinks is not None)
    prepare(replace(problem, device_type="cuda"), given, needs)(given, given.addresses())


def attend(case: Case) -> None:
    problem, tensors = pose(case)
    with patch.object(launch, "device_of", lambda _: HOPPER):
        launch.prepare(problem, tensors)(tensors, tensors.addresses())


# A row's weights are added up in one order in every loop. The order follows the layout.
def test_forward(compiled):
    attend(ragged(lengths(torch.int32, 100, page_size=16), [100, 1, 17]))
    assert len(layouts_of_sums(compiled["attend"])) == 1


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    "case",
    [
        lengths(torch.int64, 1),
        lengths(torch.int64, 1, page_size=256),
        lengths(torch.int32, 100, page_size=16, bias=torch.zeros(2000)),
        lengths(torch.int32, 129, page_size=64, D=8, bias=torch.zeros(1)),
        packed(torch.int64),
        packed(torch.int32, [1, 1, 2, 3]),
    ],
    ids=["decode", "pages of 256", "bias", "bias of one", "packed", "packed decode"],
)
def test_forward_up_to_its_layouts(compiled, case):
    """The others go further with the same operations."""
    attend(case)
    assert len(layouts_of_sums(compiled["attend"])) == 1


@pytest.mark.parametrize(
    "case",
    [
        lengths(
            torch.int64, 100, bias=torch.zeros(3, 1, 100, 2000), kv_starts=torch.tensor([1, 0, 9])
        ),
        packed(torch.int64),
    ],
    ids=["lengths", "packed"],
)
def test_backward(compiled, monkeypatch, case):
    monkeypatch.setattr(backward, "device_of", lambda _: HOPPER)
    derive(backward.prepare_backward, case)
    assert {"prepare_rows", "sum_keys", "sum_queries"} <= set(compiled)


@pytest.mark.parametrize(("D", "dtype"), [(64, torch.int64), (256, torch.int32)])
def test_short_launches_of_the_hopper_kernels(compiled, monkeypatch, D, dtype):
    from lockstep.kernels.hopper.backward.narrow import call as narrow

    monkeypatch.setattr(narrow, "processors", lambda _: 132)
    case = packed(dtype, D=D)
    derive(hopper.KERNEL.prepare_backward, case)
    if D == 64:
        # Where heads are not grouped, dq of tiles that see no key is written by the first launch.
        grouped = compiled["prepare_rows"]
        derive(hopper.KERNEL.prepare_backward, packed(dtype, D=D, Hkv=8))
        assert compiled["prepare_rows"] != grouped
    problem, tensors = pose(case)
    sorting = sequence_order.sort_launch(problem, 128)
    order = torch.empty(1000, dtype=torch.int32)
    sorting.run(sorting.bind({**tensors._asdict(), "sequence_order": order}), 0)
    expected = {"prepare_rows", "finish_keys", "sum_sinks", "sort_sequences_kernel"} | (
        {"finish_queries"} if D == 64 else set()
    )
    assert set(compiled) == expected


@triton.jit
def _bounds(cu_ptr, to_ptr, B, T):
    b = tl.program_id(0)
    start, end, _ = bounds_of(b, T > 0, cu_ptr, B, T)
    tl.store(to_ptr + b * 2, start)
    tl.store(to_ptr + b * 2 + 1, end)


def test_the_start_of_a_sequence_is_carried_through_the_loop():
    """Triton 3.6 leaves `start = end` out of a loop; its interpreter does not."""
    kinds = {"cu_ptr": "*i32", "to_ptr": "*i64", "B": "i32", "T": "i32"}
    built = triton.compile(ASTSource(_bounds, kinds), target=GPUTarget("cuda", 90, 32))
    (loop,) = (line for line in built.asm["ttir"].splitlines() if "scf.for" in line)
    assert "-> (i64, i64)" in loop, loop
