"""Every kind of forward fits the shared memory of the GPUs it is for.

How much a build takes is known before it is assembled, so these stop there.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from problems import draw_varlen, unwritten

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("not for the interpreter", allow_module_level=True)

from triton_builds import DEVICES, build

from lockstep.kernels import triton as triton_kernels
from lockstep.kernels.triton import launch, plan
from lockstep.kernels.triton.forward import attend
from lockstep.problem import Tensors, describe, make_options

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
BF16 = torch.bfloat16


def prefill(**sizes) -> Tensors:
    return unwritten(17_000, 1100, Hq=1, Hkv=1, **sizes)


def chunk(**sizes) -> Tensors:
    return unwritten(111, 1100, Hq=1, Hkv=1, **sizes)


def biased(**sizes) -> Tensors:
    return chunk(**sizes)._replace(bias=torch.zeros(1, 1, 111, 1100))


def packed(**sizes) -> Tensors:
    return Tensors(**draw_varlen([300, 5], [300, 5000], Hq=4, Hkv=4, **sizes).tensors)


def paged(page_size: int, D: int, dtype: torch.dtype) -> Tensors:
    pages = torch.zeros(2, page_size, 1, D, dtype=dtype)
    table = torch.zeros(1, 2048 // page_size, dtype=torch.int32)
    lens = torch.tensor([2000], dtype=torch.int32)
    q = torch.zeros(1, 8, 1, D, dtype=dtype)
    return Tensors(q, pages, pages, kv_lens=lens, page_table=table)


KINDS = {
    "prefill": prefill,
    "chunk": chunk,
    "bias": biased,
    "packed": packed,
    "pages of 16": lambda **sizes: paged(16, **sizes),
    "pages of 256": lambda **sizes: paged(256, **sizes),
}


def shared_bytes(capability: int, tensors: Tensors, **flags: bool) -> int:
    device = DEVICES[capability]
    problem = describe(tensors, make_options(True, None, None, None, **flags))
    chosen = plan.plan_of(problem, device)
    arguments = launch.attend_arguments(problem, tensors, chosen)
    absent = [name for name, tensor in tensors._asdict().items() if tensor is None]
    absent += launch.NO_STATE if chosen.n_runs > 1 else [*launch.NO_STATE, "parts", "part_stats"]
    constants = {name: value for name, value in arguments.items() if name.isupper() and name != "B"}
    options = launch.options_of(problem, chosen, device)
    nothing = {f"{name}_ptr": None for name in absent}
    built = build(attend, capability, NAMES[problem.dtype], options, **constants, **nothing)
    return built.shared_bytes


def assert_fits(capability, D, dtype, kind, **flags):
    tensors = KINDS[kind](D=D, dtype=dtype)
    limit = DEVICES[capability].shared_bytes
    assert shared_bytes(capability, tensors, **flags) <= limit


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    ("capability", "D", "kind"),
    [
        *[(90, 256, kind) for kind in ("chunk", "packed", "pages of 256")],
        *[(capability, 256, "chunk") for capability in (86, 100, 120)],
    ],
)
def test_fits(capability, D, kind):
    assert_fits(capability, D, BF16, kind)


@pytest.mark.usefixtures("unlowered")
def test_query_invariant_fits():
    assert_fits(90, 256, BF16, "prefill", query_invariant=True)


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(("capability", "D"), [(86, 256), (120, 128)])
def test_tf32_fits(capability, D):
    assert_fits(capability, D, torch.float32, "chunk", allow_tf32=True)


@pytest.mark.parametrize(
    ("capability", "kilobytes", "dtype", "D", "refusal"),
    [
        ((7, 5), 64, BF16, 64, "needs compute capability 8.0, this device has 7.5"),
        ((8, 6), 99, BF16, 512, None),
        ((8, 6), 99, torch.float32, 256, None),
        ((8, 6), 99, torch.float32, 257, "takes float32 head dims up to 256 on this device, "),
        ((8, 0), 163, torch.float32, 512, None),
    ],
)
def test_what_a_device_refuses(monkeypatch, capability, kilobytes, dtype, D, refusal):
    monkeypatch.setattr(triton_kernels, "_capability", lambda _: capability)
    monkeypatch.setattr(triton_kernels, "_shared_bytes", lambda _: kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    problem = describe(chunk(D=D, dtype=dtype), make_options(True, None, None, None))
    said = triton_kernels.supports(replace(problem, device_type="cuda"))
    assert said == refusal if refusal is None else said.startswith(refusal)


@pytest.mark.usefixtures("unlowered")
def test_wide_heads_in_float32_take_what_is_asked_for():
    limit = triton_kernels.WIDE_SINGLE_BYTES
    assert shared_bytes(86, KINDS["bias"](D=512, dtype=torch.float32)) <= limit
