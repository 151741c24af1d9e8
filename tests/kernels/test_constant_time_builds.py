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
from triton_builds import DEVICES

from lockstep.audit.timing import gpu_code
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


# `make audit`, which CI runs, reads every build of `lockstep audit timing`; the tests read one of
# each folder of kernels.
AUDITED = dict(gpu_code.builds())
READ = [
    "triton: forward for sm_90",
    "hopper: forward, D 128, causal for sm_90",
    "ladder: persistent_mma, persistent_mma for sm_90",
]


@pytest.mark.parametrize("name", READ)
def test_no_secret_shows(name):
    if name.startswith("ladder"):
        pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
    assert not AUDITED[name]()


def test_the_ordinary_hopper_build_leaks():
    """Its second pass, its fixed maxima and its votes: the analysis finds each."""
    tensors = unwritten(5000, 2000, D=128)
    call = hopper_launch.forward_launches(describe(tensors, Options(causal=True)), tensors, 132)
    found = {leak.file.rpartition("/")[2] for leak in leaks_in(call, tensors, 90)}
    assert {"second_pass.py", "scheduler.py", "exact_weights.py", "softmax.py"} <= found


def test_triton_forward_with_a_bias_and_secret_lengths():
    bias, lengths = torch.zeros(1, 1, 1, 300), torch.tensor([100], dtype=torch.int32)
    tensors = unwritten(20000, 300, Hq=4, Hkv=4, D=64, dtype=torch.float32)
    tensors = tensors._replace(bias=bias, kv_lens=lengths)
    problem = describe(tensors, Options(constant_time=True, secret_lengths=True))
    chosen = plan.plan_of(problem, DEVICES[80])
    call = launch.forward_launches(problem, tensors, chosen, DEVICES[80])
    assert not leaks_in(call, tensors, 80, secret_lengths=True)


def test_triton_backward_with_a_bias_and_sinks():
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
