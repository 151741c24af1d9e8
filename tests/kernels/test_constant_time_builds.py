"""Constant-time builds as machine code: no secret reaches a branch, an address or a predicate."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from problems import draw, unwritten

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("not for the interpreter", allow_module_level=True)

from hopper_build import compile_for_hopper
from taint_builds import compile_bound, leaks_of
from test_hopper_backward_wide import compiled as compiled_wide
from triton_builds import DEVICES

from lockstep.audit.timing import hopper_code, triton_code
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.forward import launch as hopper_launch
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.triton import backward, launch, plan
from lockstep.problem import Options, Tensors, describe

BF16 = torch.bfloat16


def given(case, **options):
    tensors = Tensors(**case.tensors)
    return describe(tensors, Options(constant_time=True, **options)), tensors


def saved(tensors: Tensors) -> BackwardTensors:
    q, v = tensors.q, tensors.v
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return BackwardTensors(*tensors, out, out[..., :2].float().contiguous(), out, None)


# The tensors of `test_hopper_build.py`, so that builds are the same.
@pytest.mark.parametrize(("D", "causal"), [(64, True), (128, False)])
def test_hopper_forward(D, causal):
    tensors = unwritten(5000, 512, D=D)
    problem = describe(tensors, Options(constant_time=True, causal=causal))
    call = hopper_launch.forward_launches(problem, tensors, 132)
    assert not leaks_in(call, tensors, 90)


def test_the_ordinary_hopper_build_leaks():
    """Its second pass, its fixed maxima and its votes: the analysis finds each."""
    tensors = unwritten(5000, 512, D=128)
    call = hopper_launch.forward_launches(describe(tensors, Options(causal=True)), tensors, 132)
    found = {leak.file.rpartition("/")[2] for leak in leaks_in(call, tensors, 90)}
    assert {"second_pass.py", "scheduler.py", "exact_weights.py", "softmax.py"} <= found


def test_hopper_backward():
    problem, tensors = given(draw(512, 512, B=2, D=128, dtype=BF16))
    tensors = saved(tensors)
    needs = Needs(True, True, True, False, False)
    with patch.object(narrow, "processors", lambda _: 132):
        call = narrow.prepare_backward(problem, tensors, needs)
    assert not leaks_in(call, tensors, 90)


def test_wide_and_packed_hopper_forward():
    assert not hopper_code.forward_leaks(hopper_code.Build(192, causal=True, packed=True))


# `lockstep audit timing` reads every build.
@pytest.mark.parametrize(("D", "Dv"), [(64, 0), (192, 128)])
def test_packed_hopper_backward(D, Dv):
    build = hopper_code.Build(D, causal=True, packed=True, Dv=Dv)
    assert not hopper_code.backward_leaks(build)


@pytest.mark.parametrize(("which", "causal"), [("keys", False), ("queries", True)])
def test_wide_hopper_backward(which, causal):
    """Its kernels are those of other calls: builds that `test_hopper_backward_wide.py` reads."""
    built = compiled_wide(which, 256, 256, causal=causal, constant_time=True)
    assert not leaks_of(built.kernel)


LENGTHS = torch.tensor([5000, 100], dtype=torch.int32)
TRITON = {
    "causal": (unwritten(20000, 5000, Hq=4, Hkv=1, D=64), {"causal": True}),
    "bias": (
        unwritten(20000, 300, Hq=4, Hkv=4, D=64, dtype=torch.float32)._replace(
            bias=torch.zeros(1, 1, 1, 300), kv_lens=LENGTHS[1:]
        ),
        {},
    ),
    "decode": (
        draw(1, 5120, B=2, Hq=8, Hkv=2, D=128, dtype=BF16, kv_lens=LENGTHS),
        {"causal": True},
    ),
}


@pytest.mark.parametrize(
    ("name", "secret", "capability"),
    [
        ("causal", False, 90),
        ("bias", True, 80),
        ("decode", True, 90),
    ],
)
def test_triton_forward(name, secret, capability):
    case, options = TRITON[name]
    tensors = case if isinstance(case, Tensors) else Tensors(**case.tensors)
    problem = describe(tensors, Options(constant_time=True, secret_lengths=secret, **options))
    device = DEVICES[capability]
    chosen = plan.plan_of(problem, device)
    call = launch.forward_launches(problem, tensors, chosen, device)
    assert (len(call.launches) == 2) == (name == "decode")
    assert not leaks_in(call, tensors, capability, secret)


def test_triton_pages_with_secret_lengths():
    [build] = [x for x in triton_code.calls() if x.name == "pages, secret lengths"]
    assert not triton_code.leaks_in(build, 80)


def test_triton_backward():
    bias = torch.zeros(1, 1, 300, 300, dtype=BF16)
    case = draw(300, 300, D=64, dtype=BF16, bias=bias, sinks=torch.zeros(2))
    problem, tensors = given(case, causal=True)
    with patch.object(backward, "device_of", lambda _: DEVICES[90]):
        call = backward.backward_launches(problem, saved(tensors), Needs(*[True] * 5))
    assert len(call.launches) == 5
    assert not leaks_in(call, saved(tensors), 90)


def leaks_in(call, tensors, capability, secret_lengths=False):
    """Leaks of all launches of a call."""
    kernels = [compiled(bound, capability) for bound in bindings(call, tensors)]
    return [leak for kernel in kernels for leak in leaks_of(kernel, secret_lengths)]


def compiled(bound, capability):
    if not bound.launch.kernel.is_gluon():
        return compile_bound(bound, capability)
    # As other tests of machine code do, which look at some of these builds as well.
    return compile_for_hopper(bound.launch.kernel, bound.arguments, **bound.launch.options).kernel


def bindings(call, tensors):
    from launch_arguments import bind

    return list(bind(call, tensors).values())
