"""The portable GPU path: Triton kernels, from sm_80 on.

Importing this package does not import Triton.

    tiles.py      what is done to one tile of keys          groups.py  what functions take together
    spans.py      from a program to its rows, and over their keys span by span
    forward.py    the kernel: rows against all the keys they see, or against a run of spans
    split_kv.py   the second kernel of split-KV: parts folded into results; and merge
    nonfinite.py  values that are not finite stay with the rows that see them
    plan.py       tile sizes, and which program computes what
    launch.py     from a problem to a launch
    products.py   products of two tiles                     terms.py   float32 as sums of bf16
    backward.py   gradients: dq.py, dkdv.py, dbias.py, with gradient_rows.py and gradient_tiles.py
    carry.py      the same over keys, or rows, that come in blocks

A row's bits depend on its own sequence, the heads and the head dims alone; with `query_invariant`
not on the other queries of the sequence either. Which program computes a span of keys, and which
kernel folds it, may follow the batch and the device: it changes no number.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lockstep.kernels.carry import Carry
from lockstep.kernels.kernel import (
    BackwardTensors,
    Kernel,
    Merge,
    Needs,
    Prepared,
    PreparedBackward,
)
from lockstep.problem import AttentionProblem, Tensors

MAX_HEAD_DIM = 512
# The same for float32 where a program cannot have that much shared memory, as on most GPUs that are
# not for data centres: the least tiles of wider heads take it, forward or backward.
MAX_SINGLE_HEAD_DIM, WIDE_SINGLE_BYTES = 256, 130 << 10
# Positions are int32, and so is a tile's distance from the end of a window.
MAX_LENGTH = 1 << 28
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    from lockstep.kernels.triton.launch import prepare

    return prepare(problem, tensors)


def _prepare_backward(
    problem: AttentionProblem, tensors: BackwardTensors, needs: Needs
) -> PreparedBackward:
    from lockstep.kernels.triton.backward import prepare_backward

    return prepare_backward(problem, tensors, needs)


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    from lockstep.kernels.triton.split_kv import merge

    return merge(outs, lses)


def _carry() -> Carry:
    from lockstep.kernels.triton import carry, plan

    return Carry(
        span=plan.LEAST_SPAN,
        multiple=plan.LEAST_SPAN,
        by_token=True,
        forward=carry.CarriedForward,
        rows=carry.rows_of,
        queries=carry.CarriedQueries,
        keys=carry.CarriedKeys,
        sinks=carry.sums_of_sinks,
    )


def _supports_merge(part: Tensor) -> bool:
    return part.is_cuda and part.dtype in _DTYPES and installed()


@lru_cache(maxsize=1)
def installed() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    """Whether kernels run on the CPU, slowly. Asked without importing Triton."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def _shared_bytes(device: int) -> int:
    """The shared memory that a program can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def supports(problem: AttentionProblem) -> str | None:
    if not installed():
        return "needs the package triton, which is not installed"
    if problem.device_type != "cuda" and not (problem.device_type == "cpu" and _interpreted()):
        return f"runs on CUDA devices, got tensors on {problem.device_type}"
    if problem.dtype not in _DTYPES:
        return (
            f"takes float16, bfloat16 and float32, got {str(problem.dtype).removeprefix('torch.')}"
        )
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {max(problem.D, problem.Dv)}"
    if max(problem.Sq, problem.Skv) > MAX_LENGTH:
        return f"takes up to {MAX_LENGTH} tokens, got {max(problem.Sq, problem.Skv)}"
    if problem.secret_lengths and problem.has_kv_starts:
        return "takes no kv_starts with secret_lengths"
    return _device_supports(problem) if problem.device_type == "cuda" else None


def _device_supports(problem: AttentionProblem) -> str | None:
    device = torch.cuda.current_device()
    if _capability(device) < (8, 0):
        major, minor = _capability(device)
        return f"needs compute capability 8.0, this device has {major}.{minor}"
    head_dim = max(problem.D, problem.Dv)
    is_wide = problem.dtype == torch.float32 and head_dim > MAX_SINGLE_HEAD_DIM
    if is_wide and _shared_bytes(device) < WIDE_SINGLE_BYTES:
        return (
            f"takes float32 head dims up to {MAX_SINGLE_HEAD_DIM} on this device, which has "
            f"{_shared_bytes(device) >> 10} KB of shared memory, got {head_dim}"
        )
    return None


def supports_backward(problem: AttentionProblem) -> str | None:
    """Why gradients are refused of a problem that the forward takes."""
    if problem.secret_lengths:
        return "has no gradients with secret_lengths"
    return None


KERNEL = Kernel(
    name="triton",
    supports=supports,
    prepare=_prepare,
    prepare_backward=_prepare_backward,
    deterministic=True,
    batch_invariant=True,
    constant_time=True,
    query_invariant=True,
    supports_backward=supports_backward,
    merge=Merge(_supports_merge, _merge),
    carry=_carry,
)
