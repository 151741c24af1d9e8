"""From torch tensors to a call record."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.call import CALL, UNBOUNDED
from lockstep.kernels.cpu.simd import BF16, F16, F32

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Tensors
    from lockstep.problem import AttentionProblem

KINDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
# Where the batch (or page), head and row dims stand in each layout.
DENSE, PACKED, PAGED = (0, 1, 2), (None, 1, 0), (0, 2, 1)


def strided(tensor: Tensor, dims: tuple[int | None, int, int]) -> tuple[int, ...]:
    """Address and byte strides; a missing batch dim has stride 0."""
    size = tensor.element_size()
    steps = [0 if dim is None else tensor.stride(dim) * size for dim in dims]
    return (tensor.data_ptr(), *steps)


def numbers(tensor: Tensor) -> np.ndarray:
    """An integer tensor as an int64 array."""
    return tensor.detach().to(torch.int64).contiguous().numpy()


def _lengths(problem: AttentionProblem, tensors: Tensors) -> tuple[np.ndarray, ...]:
    """(q_first, q_len, kv_first, kv_len), each [B]."""
    B = problem.B
    if problem.layout == "varlen":
        cu_q, cu_k = numbers(tensors.cu_seqlens_q), numbers(tensors.cu_seqlens_k)
        return cu_q[:-1].copy(), np.diff(cu_q), cu_k[:-1].copy(), np.diff(cu_k)
    zeros = np.zeros(B, np.int64)
    kv_len = np.full(B, problem.Skv, np.int64)
    if tensors.kv_lens is not None:
        kv_len = numbers(tensors.kv_lens)
    return zeros, np.full(B, problem.Sq, np.int64), zeros, kv_len


def query_dims(problem: AttentionProblem) -> tuple[int | None, int, int]:
    return PACKED if problem.layout == "varlen" else DENSE


def kv_dims(problem: AttentionProblem) -> tuple[int | None, int, int]:
    return {"dense": DENSE, "varlen": PACKED, "paged": PAGED}[problem.layout]


class Described(NamedTuple):
    """A call record, and the arrays whose addresses it holds."""

    record: np.void
    q_len: np.ndarray  # [B] int64
    kept: tuple[np.ndarray, ...]


def describe(problem: AttentionProblem, tensors: Tensors, out: Tensor, lse: Tensor) -> Described:
    """One call for the kernels; ``out`` and ``lse`` are per query row, to write or to read."""
    call = np.zeros(1, CALL)[0]
    call["kind"] = KINDS[problem.dtype]
    call["B"], call["G"], call["Hkv"] = problem.B, problem.Hq // problem.Hkv, problem.Hkv
    call["D"], call["Dv"] = problem.D, problem.Dv
    for name, tensor in (("q", tensors.q), ("out", out), ("lse", lse)):
        call[name] = strided(tensor, query_dims(problem))
    for name, tensor in (("k", tensors.k), ("v", tensors.v)):
        call[name] = strided(tensor, kv_dims(problem))
    if tensors.bias is not None:
        whole = tensors.bias.expand(problem.B, problem.Hq, problem.Sq, problem.Skv)
        call["bias"], call["bias_kind"] = strided(whole, DENSE), KINDS[whole.dtype]
        call["bias_col"] = whole.stride(3) * whole.element_size()
    tables = dict(
        zip(("q_first", "q_len", "kv_first", "kv_len"), _lengths(problem, tensors), strict=True)
    )
    if tensors.sinks is not None:
        tables["sinks"] = tensors.sinks.detach().float().contiguous().numpy()
    if tensors.page_table is not None:
        tables["page_table"] = numbers(tensors.page_table)
        call["page_size"], call["pages"] = problem.page_size, tensors.page_table.shape[1]
    for name, table in tables.items():
        call[name] = table.ctypes.data
    right = 0 if problem.causal else problem.window_right
    for name, side in (("left", problem.window_left), ("right", right)):
        call[name] = UNBOUNDED if side is None else min(side, UNBOUNDED)
    call["scale"], call["softcap"] = problem.scale, problem.softcap or 0.0
    return Described(call, tables["q_len"], tuple(tables.values()))
