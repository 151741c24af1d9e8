"""The Triton backward as machine code: cross-compiled for GPUs that need not be there."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from launch_arguments import bind
from operand_addresses import lost_operands
from problems import draw, unwritten

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from taint_builds import compile_bound, leaks_of
from triton_builds import DEVICES, Build, at_once_on_hopper, build, spills

from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.triton import backward
from lockstep.kernels.triton.dkdv import sum_keys
from lockstep.kernels.triton.dq import sum_queries
from lockstep.kernels.triton.plan import blocks_of
from lockstep.problem import Options, Tensors, describe, make_options


def constants(D: int, Dv: int, cut: backward.Cut) -> dict:
    absent = (
        *("bias_ptr", "kv_lens_ptr", "kv_starts_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr"),
        *("dq_sums_ptr", "dk_sums_ptr", "dv_sums_ptr"),
    )
    return {
        **dict.fromkeys((*absent, "alibi_slopes_ptr", "stride_ab")),
        "D": D,
        "DV": Dv,
        "GROUP": 1,
        "ALIGN": 8,
        "HAS_LEFT": False,
        "HAS_RIGHT": True,
        "HAS_SOFTCAP": False,
        "PRECISION": "ieee",
        "BLOCK_Q": cut.BLOCK_Q,
        "BLOCK_KV": cut.BLOCK_KV,
        "RAW": True,
        "ASCENDING": False,
        **{f"{x}_TOKENS_FIRST": False for x in "QKV"},
        "COPIES": backward.copies_of(cut),
    }


# The devices, and how a matrix product is spelled there. The build for sm_80 is that of all GPUs
# with less shared memory than Hopper: it has to fit the least of them.
TARGETS = {80: (DEVICES[86], "HMMA"), 90: (DEVICES[90], "HGMMA"), 100: (DEVICES[100], "UTC")}


def build_passes(
    D: int, capability: int, Dv: int | None = None, present: tuple[str, ...] = (), **more: bool
):
    """dK and dV, then dQ; `present` are the optional tensors of the call, `more` constants."""
    device, Dv = TARGETS[capability][0], Dv or D
    case = draw(1, 1, D=D, Dv=Dv, dtype=torch.bfloat16)
    problem = describe(Tensors(**case.tensors), make_options(True, None, None, None))
    cuts = backward.cuts_of(problem, device)
    blocks = dict(zip(("BLOCK_D", "BLOCK_DV"), blocks_of(problem, device), strict=True))
    for function, cut in zip((sum_keys, sum_queries), cuts, strict=True):
        known = {**constants(D, Dv, cut), **blocks, **more}
        known = {
            name: value
            for name, value in known.items()
            if name in function.arg_names and name not in present
        }
        yield build(function, capability, "bf16", cut.options, **known)


@pytest.mark.parametrize(("capability", "D"), [(80, 128), (90, 64), (90, 128), (100, 128)])
def test_loops_keep_everything_in_registers(capability, D):
    device, product = TARGETS[capability]
    for built in build_passes(D, capability):
        assert built.shared_bytes <= device.shared_bytes
        loops = built.loops(product)
        assert loops, "no matrix products"
        for body in loops:
            assert not spills(body)


@pytest.mark.parametrize("D", [64, 128])
def test_the_main_loop_on_hopper(D):
    """The pipelined one, with asynchronous copies, for tiles that need no mask."""
    for built in build_passes(D, 90):
        (main,) = (b for b in built.loops("HGMMA") if any(t.startswith("LDGSTS") for t in b))
        selects = [text for text in main if text.startswith(("FSEL", "ISETP.GE", "ISETP.GT"))]
        assert len(selects) < 8, f"positions are compared: {selects}"
        # A product by itself would be waited for before the next.
        waits = [text for text in main if text.startswith("WARPGROUP.DEPBAR")]
        assert len(waits) <= 4, "ptxas has serialised the products"
        copies = [text for text in main if text.startswith("LDGSTS")]
        assert len(copies) <= 10, "statistics are copied by every thread that needs them"


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(("capability", "D"), [(80, 512), (100, 256)])
def test_wide_heads_fit(capability, D):
    for built in build_passes(D, capability):
        assert built.shared_bytes <= TARGETS[capability][0].shared_bytes


@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(("capability", "D"), [(80, 256), (90, 256)])
def test_sums_in_ascending_order_fit(capability, D):
    """Masked tiles are as large as the others then."""
    for built in build_passes(D, capability, ASCENDING=True):
        assert built.shared_bytes <= TARGETS[capability][0].shared_bytes


@pytest.mark.usefixtures("unlowered")
def test_wide_heads_of_a_packed_batch_fit():
    packed = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr")
    for built in build_passes(256, 90, present=packed):
        assert built.shared_bytes <= TARGETS[90][0].shared_bytes


def test_three_programs_of_dq_share_a_multiprocessor():
    _, queries = build_passes(64, 90)
    assert at_once_on_hopper(queries) == 3


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (16, 32)])
def test_products_on_hopper_find_their_operands(D, Dv):
    for built in build_passes(D, 90, Dv):
        assert not lost_operands(built.kernel.asm["cubin"])


def float32_builds(D: int, has_bias: bool = False, **options: bool) -> dict[str, Build]:
    """The kernels of a float32 call on Hopper, by name: they load terms."""
    tensors, device = unwritten(300, 300, D=D, dtype=torch.float32), TARGETS[90][0]
    if has_bias:
        tensors = tensors._replace(bias=torch.empty(1, 1, 300, 300))
    out = torch.empty_like(tensors.q)
    given = BackwardTensors(*tensors, out, torch.empty(*out.shape[:-1], 2), out, None)
    problem, needs = describe(tensors, Options(**options)), Needs(True, True, True, has_bias, False)
    with patch.object(backward, "device_of", lambda _: device):
        call = backward.backward_launches(problem, given, needs)
    kernels = {name: compile_bound(bound, 90) for name, bound in bind(call, given).items()}
    return {name: Build(kernel) for name, kernel in kernels.items()}


# Head dims of 64 and 256 take less than half of what there is.
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize("D", [128, 512])
@pytest.mark.parametrize("options", [{"has_bias": True}, {"causal": True, "query_invariant": True}])
def test_terms_of_float32_fit(D, options):
    for built in float32_builds(D, **options).values():
        assert built.shared_bytes <= TARGETS[90][0].shared_bytes


def test_terms_of_float32_on_hopper():
    built = float32_builds(64, causal=True, constant_time=True)
    assert set(built) == {"prepare_rows", "cut_factors", "sum_keys", "sum_queries"}
    assert not [leak for one in built.values() for leak in leaks_of(one.kernel)]
    # A term takes 16 bytes for 8 numbers, and goes there in one or two stores.
    stores = [text for _, text in built["cut_factors"].instructions if text.startswith("STG")]
    assert stores
    assert all(".128" in text or ".64" in text for text in stores)
    for name in ("sum_keys", "sum_queries"):
        assert at_once_on_hopper(built[name]) == 2
        assert not lost_operands(built[name].kernel.asm["cubin"])
        for body in built[name].loops("HGMMA"):
            # With and without a mask a sum has the same bits: no product is joined to it.
            joined = [text for text in body if text.startswith("FFMA") and "RZ" not in text]
            assert not joined
