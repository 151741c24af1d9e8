"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from lockstep.kernels.triton.plan import Tiles, block_of
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

# No length comes near: a window of this reach is open.
FAR = 1 << 30


def strides_of(problem: AttentionProblem, tensors: Tensors) -> dict[str, int]:
    """Strides by sequence (or page), head and token, whatever the layout; 0 where there is none."""
    q, k, v, bias = tensors[:4]
    orders = {"dense": ((0, 1, 2),) * 2, "varlen": ((None, 1, 0),) * 2}
    of_q, of_kv = orders.get(problem.layout, ((0, 1, 2), (0, 2, 1)))
    strides = {}
    for name, tensor, order in (("q", q, of_q), ("k", k, of_kv), ("v", v, of_kv)):
        for letter, dim in zip("bhs", order, strict=True):
            strides[f"stride_{name}{letter}"] = 0 if dim is None else tensor.stride(dim)
    for letter, dim in zip("bhqk", range(4), strict=True):
        broadcast = bias is None or bias.shape[dim] == 1
        strides[f"stride_b{letter}"] = 0 if broadcast else bias.stride(dim)
    strides["stride_tb"] = 0 if tensors.page_table is None else tensors.page_table.stride(0)
    Hq, Sq = problem.Hq, problem.Sq
    rows = (0, 1, Hq) if problem.layout == "varlen" else (Hq * Sq, Sq, 1)
    strides["stride_rb"], strides["stride_rh"], strides["stride_rs"] = rows
    return strides


def alignment(strides: dict[str, int], tensors: Tensors) -> int:
    """The largest number of elements, 16 bytes at most, that every row of q, k and v starts at."""
    size = tensors.q.element_size()
    widest = 16 // size
    of_qkv = (stride for name, stride in strides.items() if name[7] in "qkv")
    pointers = (tensor.data_ptr() // size for tensor in tensors[:3])
    return math.gcd(widest, *of_qkv, *pointers)


def scales_of(problem: AttentionProblem) -> dict[str, Any]:
    """The numbers and flags that `tiles.scores` takes."""
    cap = problem.softcap
    late = problem.scale if cap is None else cap
    return {
        "cap_scale": 0.0 if cap is None else problem.scale / cap,
        "late_scale": late * LOG2E,
        "HAS_SOFTCAP": cap is not None,
        "SCALE_LATER": late > 0 and problem.bias_shape is None,
    }


def arguments(problem: AttentionProblem, tensors: Tensors, tiles: Tiles) -> dict[str, Any]:
    """All arguments of `forward.attend` but the pointers and what a run of spans is."""
    strides = strides_of(problem, tensors)
    align = alignment(strides, tensors)
    for name in strides:
        if name[7] in "qkv":
            strides[name] //= align
    left, right = problem.window
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    n_slots = triton.cdiv(rows, tiles.BLOCK_Q)
    if problem.layout == "varlen":
        n_slots = rows // tiles.BLOCK_Q + problem.B
    return {
        **strides,
        "B": problem.B,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        "n_slots": n_slots,
        "left": FAR if left is None else min(left, FAR),
        "right": FAR if right is None else min(right, FAR),
        **scales_of(problem),
        "D": problem.D,
        "DV": problem.Dv,
        "GROUP": problem.Hq // problem.Hkv,
        "PAGE_SIZE": problem.page_size or 0,
        "ALIGN": align,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "SPAN": tiles.SPAN,
        "BLOCK_Q": tiles.BLOCK_Q,
        "BLOCK_KV": tiles.BLOCK_KV,
        "BLOCK_D": block_of(problem.D),
        "BLOCK_DV": block_of(problem.Dv),
    }


def pointers(tensors: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bias, sinks, kv_lens, cu_q, cu_k, table = tensors
    return q, k, v, bias, sinks, kv_lens, cu_q, cu_k, table, out, lse
