"""Calls of the Hopper forward on a GPU, for its tests."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_calls import forward
from problems import Case, assert_allowed, draw, pose, same_bits

from lockstep.kernels import hopper

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

DTYPES = (torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
# Each pair is a build of its own, and most of the time goes into builds.
by_build = pytest.mark.parametrize(
    ("D", "dtype"),
    [(64, torch.bfloat16), (128, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)],
    ids=["64-bf16", "128-fp16", "128-bf16", "256-bf16"],
)


def on_gpu(case: Case) -> Case:
    return Case({name: x.cuda() for name, x in case.tensors.items()}, case.options)


def launch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the Hopper kernel for a case on the GPU, whether dispatch would choose it
    or not."""
    return forward(hopper.KERNEL, *pose(case))[:2]


def hopper_run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a case on the CPU, back on the CPU."""
    out, lse = launch(on_gpu(case))
    return out.cpu(), lse.cpu()


def check(case: Case) -> None:
    """The error rule."""
    assert_allowed(case, dict(zip(("out", "lse"), hopper_run(case), strict=True)), kernel="hopper")


def with_lengths(case: Case) -> Case:
    """The same sequences with their numbers of keys, which the kernel for all calls takes."""
    B, _, Skv, _ = case.tensors["k"].shape
    return Case(case.tensors | {"kv_lens": torch.full((B,), Skv)}, case.options)


def as_packed(case: Case) -> Case:
    """The same sequences one behind the other."""
    tensors = dict(case.tensors)
    for name, offsets in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", None)):
        x = tensors[name]
        B, H, S, D = x.shape
        tensors[name] = x.transpose(1, 2).reshape(B * S, H, D)
        if offsets:
            tensors[offsets] = torch.arange(B + 1) * S
    return Case(tensors, case.options)


def check_bits(case: Case) -> None:
    """The error rule, and the bits of the kernel for all calls and of packed sequences."""
    B, Hq, Sq, _ = case.tensors["q"].shape
    out, lse = hopper_run(case)
    assert_allowed(case, {"out": out, "lse": lse}, kernel="hopper")
    other, other_lse = hopper_run(with_lengths(case))
    assert same_bits(out, other)
    assert same_bits(lse, other_lse)
    packed, packed_lse = hopper_run(as_packed(case))
    assert same_bits(out.transpose(1, 2).reshape(packed.shape), packed)
    assert same_bits(lse.transpose(1, 2).reshape(B * Sq, Hq), packed_lse)


def check_what_is_not_finite(Skv: int) -> None:
    """It stays in its head."""
    torch.manual_seed(0)
    case = draw(100, Skv, B=2, Hq=2, Hkv=2, D=64, dtype=torch.bfloat16)
    clean, _ = hopper_run(case)
    case.tensors["v"][0, 1, 3, 5] = math.nan
    case.tensors["k"][1, 0, 3, 5] = math.nan
    out, _ = hopper_run(case)
    assert same_bits(out[0, 0], clean[0, 0])
    assert same_bits(out[1, 1], clean[1, 1])
    assert out[0, 1, :, 5].isnan().all()
    assert not out[0, 1, :, :5].isnan().any()
    assert out[1, 0].isnan().all()
