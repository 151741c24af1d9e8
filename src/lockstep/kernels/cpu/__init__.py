"""The CPU path: numba kernels with explicit SIMD, compiled on first use and kept on disk.

Importing this package compiles nothing and does not import numba.

    forward.py   units.py cuts query rows and spans into work for threads; it runs that work, merges
    backward.py  gradients; items.py  cuts them into work; extras.py  smaller passes
    kernels.py   the constant-time kernels, for audits; roof.py  the speed of the cores
    carry.py     keys in blocks; carry_backward.py  their gradients
    arithmetic/  what one thread computes
        wide.py     many query rows, one per SIMD lane        prefill; block.py  what they work on
        narrow.py   a few query rows, keys across the lanes   decode; narrow_rows.py  its SIMD loops
        running.py  the softmax state of many rows            merge.py   the split-KV formula
        tiles.py    register tiles                            memory.py  rows in and out
        rescore.py  the weights of a tile again               gradients.py  what they add up to
        pairs.py    bfloat16 for matrix units; narrow_pairs.py  the same sums for a few rows
    call/        a call's tensors as a record of addresses, and the threads that run it
    compiler/    vector code from Python (simd.py, vectors.py, half.py), matrix units (matrix.py),
                 LLVM, machine code on disk

Two kernels come of it: `amx` multiplies bfloat16 with the matrix units of a processor that has them
and `cpu` takes all else.

A row's bits depend on its own sequence alone: every sum is a chain in ascending order inside
spans of 256 keys at fixed positions, and spans are folded in ascending order.
"""

from __future__ import annotations

import platform
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from lockstep.kernels.carry import Carry
from lockstep.kernels.kernel import (
    BackwardTensors,
    Gradients,
    Kernel,
    Merge,
    Needs,
    Prepared,
    PreparedBackward,
)
from lockstep.problem import AttentionProblem, Tensors

# Where subnormal numbers can be flushed: see compiler/entry.py.
FLUSHING = ("aarch64", "arm64", "x86_64")
# Positions are compared as int32 inside tiles.
MAX_LENGTH = 1 << 28


@cache
def _machine() -> str:
    name = platform.machine().lower()
    return "x86_64" if name == "amd64" else name


def _prepare(problem: AttentionProblem, tensors: Tensors, *, tiles: bool = False) -> Prepared:
    from lockstep.kernels.cpu.forward import prepare

    return prepare(problem, tensors, tiles=tiles)


def _prepare_backward(
    problem: AttentionProblem, tensors: BackwardTensors, needs: Needs
) -> PreparedBackward:
    from lockstep.kernels.cpu.backward import backward

    def run(tensors: BackwardTensors, addresses: list[int]) -> Gradients:
        return backward(problem, tensors, needs)

    return run


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    from lockstep.kernels.cpu.arithmetic.merge import merge

    return merge(outs, lses)


def _supports_merge(part: Tensor) -> bool:
    return part.device.type == "cpu" and part.dtype != torch.float64 and _has_numba()


def _carry(*, tiles: bool = False) -> Carry:
    from lockstep.kernels.cpu import carry, carry_backward
    from lockstep.kernels.cpu.arithmetic import block

    return Carry(
        span=block.SPAN,
        multiple=block.ROWS,
        by_token=False,
        forward=partial(carry.CarriedForward, tiles=tiles),
        rows=carry_backward.rows_of,
        queries=carry_backward.CarriedQueries,
        keys=carry_backward.CarriedKeys,
        sinks=carry_backward.sums_of_sinks,
    )


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def supports(problem: AttentionProblem) -> str | None:
    if problem.device_type != "cpu":
        return f"runs on the CPU, got tensors on {problem.device_type}"
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return (
            f"takes float32, float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
        )
    if not _has_numba():
        return "needs the package numba, which is not installed"
    if problem.secret_lengths and problem.has_kv_starts:
        return "takes no kv_starts with secret_lengths"
    if max(problem.Sq, problem.Skv) > MAX_LENGTH:
        return f"takes up to {MAX_LENGTH} tokens, got {max(problem.Sq, problem.Skv)}"
    if problem.constant_time and _machine() not in FLUSHING:
        return f"keeps constant_time on {' and '.join(FLUSHING)}, this is {_machine()}"
    if problem.secret_lengths and problem.n_pages == 0:
        return "takes at least one page with secret_lengths"
    return None


def _supports_with_tiles(problem: AttentionProblem) -> str | None:
    reason = supports(problem)
    if reason is not None:
        return reason
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
    from lockstep.kernels.cpu.compiler import matrix

    return matrix.refusal()


# Gradients are those of KERNEL, from statistics that mean the same.
AMX = Kernel(
    name="amx",
    supports=_supports_with_tiles,
    prepare=partial(_prepare, tiles=True),
    prepare_backward=_prepare_backward,
    deterministic=True,
    batch_invariant=True,
    constant_time=False,
    query_invariant=True,
    carry=partial(_carry, tiles=True),
)
KERNEL = Kernel(
    name="cpu",
    supports=supports,
    prepare=_prepare,
    prepare_backward=_prepare_backward,
    deterministic=True,
    batch_invariant=True,
    constant_time=True,
    query_invariant=True,
    merge=Merge(_supports_merge, _merge),
    carry=_carry,
)
