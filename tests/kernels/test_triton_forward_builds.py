"""The Triton forward as machine code for GPUs that are not here."""

from __future__ import annotations

import os
import re

import pytest
import torch
from operand_addresses import lost_operands
from problems import unwritten

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("not for the interpreter", allow_module_level=True)

from triton_builds import DEVICES, Build, at_once_on_hopper, build, spills

from lockstep.kernels.triton import launch, plan, split_kv
from lockstep.kernels.triton.forward import attend
from lockstep.problem import describe, make_options

PREFILL, DECODE = 40_000, 1


def built(
    capability: int,
    D: int,
    Sq: int,
    Dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    query_invariant: bool = False,
    allow_tf32: bool = False,
) -> Build:
    """The kernel that a causal call would launch."""
    Dv = Dv or D
    tensors = unwritten(Sq, 5000, Hq=4, Hkv=1, D=D, Dv=Dv, dtype=dtype)
    device = DEVICES[capability]
    problem = describe(tensors, make_options(True, None, None, None, query_invariant, allow_tf32))
    chosen = plan.plan_of(problem, device)
    assert (chosen.n_runs > 1) == (Sq == DECODE)
    arguments = launch.attend_arguments(problem, tensors, chosen)
    assert arguments["TMA"] == (device.tma and Dv % 8 == 0)
    absent = ["bias", "sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table", "kv_starts"]
    absent += ["alibi_slopes", *launch.NO_STATE]
    absent += [] if chosen.n_runs > 1 else ["parts", "part_stats"]
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    for size in ("B", "D", "DV"):
        constants.pop(size, None)
    options = launch.options_of(problem, chosen, device)
    nothing = {f"{name}_ptr": None for name in absent} | {"stride_ab": None}
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return build(attend, capability, name, options, **constants, **nothing, D=D, DV=Dv)


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
    assert not lost_operands(kernel.kernel.asm["cubin"])
    assert any(text.startswith("UTMALDG") for _, text in kernel.instructions)


@pytest.mark.parametrize("query_invariant", [False, True])
def test_three_programs_share_a_multiprocessor(query_invariant):
    assert at_once_on_hopper(built(90, 64, PREFILL, query_invariant=query_invariant)) == 3


@pytest.mark.parametrize(("D", "Dv", "dtype"), [(128, 17, torch.bfloat16), (64, 8, torch.float32)])
def test_products_find_their_operands(D, Dv, dtype):
    assert not lost_operands(built(90, D, PREFILL, Dv=Dv, dtype=dtype).kernel.asm["cubin"])


def test_prefill_on_ampere():
    kernel = built(80, 64, PREFILL)
    assert_loops_in_registers(kernel, "HMMA")
    assert kernel.shared_bytes <= DEVICES[80].shared_bytes


@pytest.mark.usefixtures("unassembled")
def test_prefill_on_blackwell():
    assert built(100, 128, PREFILL).shared_bytes <= DEVICES[100].shared_bytes


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize("capability", [80, 90])
def test_decode_fits(capability):
    """Machine code of it is among the builds in constant time."""
    assert built(capability, 128, DECODE).shared_bytes <= DEVICES[capability].shared_bytes


@pytest.mark.usefixtures("unlowered")
def test_chains_of_float32_are_short():
    """Triton's own simplifications would make one long chain of products that are added. On GPUs
    before Hopper, tensor cores make none of them."""
    kernel = built(80, 64, PREFILL, dtype=torch.float32).kernel
    assert "nvidia_mma" not in kernel.asm["ttgir"]
    products = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", kernel.asm["ttir"])
    # In each loop: two for the scores, one for the values.
    assert products
    assert len(products) % 3 == 0
    assert all(start.startswith("%cst") for start in products)


def test_tensor_cores_take_float32_if_they_may():
    kernel = built(90, 64, PREFILL, dtype=torch.float32, allow_tf32=True)
    assert_loops_in_registers(kernel, "HGMMA.64x64x8.F32.TF32")


@pytest.mark.usefixtures("unlowered")
def test_tensor_cores_before_hopper_take_float32_if_they_may():
    ttgir = built(80, 64, PREFILL, dtype=torch.float32, allow_tf32=True).kernel.asm["ttgir"]
    products = [line for line in ttgir.splitlines() if "tt.dot " in line]
    assert products
    assert all("inputPrecision = tf32" in line for line in products)
    assert "#ttg.nvidia_mma<{versionMajor = 2" in ttgir


def test_six_products_of_bf16_for_one_of_float32():
    """On Hopper tensor cores make all products of float32 factors."""
    by_tensor_cores = built(90, 64, PREFILL, dtype=torch.float32)
    assert_loops_in_registers(by_tensor_cores, "HGMMA")
    for body in by_tensor_cores.loops("HGMMA"):
        products = [text for text in body if text.startswith("HGMMA")]
        assert all(".F32.BF16" in text for text in products)
        # Steps of 16 of the head dim for the scores, and of a tile's keys for the values.
        assert len(products) == 6 * (64 + plan._BF16X6[64][0].BLOCK_KV) // 16


@pytest.mark.parametrize("function", [split_kv.reduce_parts, split_kv.merge_rows])
def test_reduction_spills_nothing(function):
    absent = {
        name: None
        for name in function.arg_names
        if name.startswith(("sinks", "kv_lens", "kv_starts", "cu_seqlens"))
    }
    flags = {"GROUP": 4, "HAS_LEFT": False, "HAS_RIGHT": True, "LEAST_SPAN": 256, "EARLY": True}
    flags["TOKENS_FIRST"] = False
    constants = {name: value for name, value in flags.items() if name in function.arg_names}
    sizes = {"DV": 128, "BLOCK_DV": 128}
    kernel = build(function, 90, "fp32", {"num_warps": 1}, **constants, **sizes, **absent)
    assert kernel.stack_bytes == 0
    # Loads run ahead of the chain of sums.
    (body,) = kernel.loops("MUFU.EX2")
    operations = [text.split(".")[0] for text in body]
    assert operations[: operations.index("MUFU")].count("LDG") >= split_kv.BATCH.value
