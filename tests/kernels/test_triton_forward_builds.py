"""The Triton forward as machine code for GPUs that are not here."""

from __future__ import annotations

import os

import pytest
import torch
from problems import draw

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("not for the interpreter", allow_module_level=True)

from triton_builds import Build, build, spills

from lockstep.kernels.triton import launch, plan, split_kv
from lockstep.kernels.triton.forward import attend
from lockstep.problem import Tensors, describe, make_options

DEVICES = {
    80: plan.Device(multiprocessors=108, shared_bytes=163 << 10, tma=False),
    90: plan.Device(multiprocessors=132, shared_bytes=227 << 10, tma=True),
    100: plan.Device(148, shared_bytes=227 << 10, tma=True, tensor_memory=True),
}
PREFILL, DECODE = 40_000, 1


def built(capability: int, D: int, Sq: int) -> Build:
    """The kernel that a causal bf16 call would launch."""
    case = draw(Sq, 5000, Hq=4, Hkv=1, D=D, dtype=torch.bfloat16)
    tensors, device = Tensors(**case.tensors), DEVICES[capability]
    problem = describe(tensors, make_options(True, None, None, None))
    chosen = plan.plan_of(problem, device)
    assert (chosen.n_runs > 1) == (Sq == DECODE)
    arguments = launch.attend_arguments(problem, tensors, chosen)
    assert arguments["TMA"] == device.tma
    absent = ["bias", "sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table"]
    absent += [] if chosen.n_runs > 1 else ["parts", "part_lse"]
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    for size in ("B", "D", "DV"):
        constants.pop(size, None)
    options = {
        "num_warps": chosen.tiles.num_warps,
        "num_stages": launch.stages_of(problem, chosen.tiles, device.shared_bytes),
    }
    nothing = {f"{name}_ptr": None for name in absent}
    return build(attend, capability, "bf16", options, **constants, **nothing, D=D, DV=D)


def assert_loops_in_registers(kernel: Build, product: str) -> None:
    """No loop over tiles keeps anything in local memory."""
    loops = kernel.loops(product)
    assert loops
    assert not any(spills(body) for body in loops)


@pytest.mark.parametrize("D", [64, 128])
def test_prefill_on_hopper(D):
    kernel = built(90, D, PREFILL)
    assert_loops_in_registers(kernel, "HGMMA")
    assert kernel.shared_bytes <= DEVICES[90].shared_bytes
    assert any(text.startswith("UTMALDG") for _, text in kernel.instructions)


def test_prefill_on_ampere():
    kernel = built(80, 64, PREFILL)
    assert_loops_in_registers(kernel, "HMMA")
    assert kernel.shared_bytes <= DEVICES[80].shared_bytes


@pytest.mark.parametrize(("capability", "Sq"), [(90, DECODE), (80, DECODE), (100, PREFILL)])
def test_builds(capability, Sq):
    kernel = built(capability, 128, Sq)
    assert kernel.shared_bytes <= DEVICES[capability].shared_bytes


@pytest.mark.parametrize("function", [split_kv.reduce_parts, split_kv.merge_rows])
def test_reduction_spills_nothing(function):
    absent = {
        name: None
        for name in function.arg_names
        if name.startswith(("sinks", "kv_lens", "cu_seqlens"))
    }
    flags = {"HAS_LEFT": False, "HAS_RIGHT": True, "SPAN": 512}
    constants = {name: value for name, value in flags.items() if name in function.arg_names}
    sizes = {"DV": 128, "BLOCK_DV": 128, "CHUNK": 128}
    kernel = build(function, 90, "fp32", {"num_warps": 1}, **constants, **sizes, **absent)
    assert kernel.stack_bytes == 0
    # Loads run ahead of the chain of sums.
    assert any(text.startswith("LDGSTS") for _, text in kernel.instructions)
