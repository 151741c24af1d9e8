"""The CPU path: numba kernels with explicit SIMD, compiled on first use and kept on disk.

Importing this package compiles nothing and does not import numba.

    wide.py     many query rows, one per SIMD lane           prefill
    narrow.py   a few query rows, keys across the lanes      decode
    units.py    query rows and spans, cut into work for threads
    forward.py  runs that work and merges                    backward.py  gradients
    running.py  the softmax state of many rows
    merge.py    the split-KV formula for one row
    tiles.py    register tiles   memory.py  rows in and out  simd.py  vector code from Python

A row's bits depend on its own sequence alone: every sum is a chain in ascending order inside
spans of 256 keys at fixed positions, and spans are folded in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.cpu import processes as processes
from lockstep.kernels.kernel import Gradients, Kernel, Needs, Result
from lockstep.problem import AttentionProblem, Tensors

# Positions are compared as int32 inside tiles.
MAX_LENGTH = 1 << 28


def _forward(problem: AttentionProblem, tensors: Tensors) -> Result:
    from lockstep.kernels.cpu.forward import forward

    return forward(problem, tensors)


def _backward(
    problem: AttentionProblem,
    tensors: Tensors,
    out: Tensor,
    statistics: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
) -> Gradients:
    from lockstep.kernels.cpu.backward import backward

    return backward(problem, tensors, out, statistics, dout, dlse, needs)


def supports(problem: AttentionProblem) -> str | None:
    if problem.device_type != "cpu":
        return f"runs on the CPU, got tensors on {problem.device_type}"
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return (
            f"takes float32, float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
        )
    if max(problem.Sq, problem.Skv) > MAX_LENGTH:
        return f"takes up to {MAX_LENGTH} tokens, got {max(problem.Sq, problem.Skv)}"
    return None


KERNEL = Kernel(
    name="cpu",
    supports=supports,
    forward=_forward,
    backward=_backward,
    deterministic=True,
    batch_invariant=True,
    constant_time=False,
    query_invariant=True,
)
