"""float32 tensors as sums of bf16 ones, made once for all tiles that will load them.

A row of D numbers becomes three rows of bf16, one after the other: the terms x₁, x₂ and x₃ of
`products.split`. Each has a multiple of 8 numbers, of which those from D on are 0, so that all of
them begin at multiples of 16 bytes. Terms lie [B, H, S, 3, width], and [1, H, T, 3, width] of a
packed batch, whatever the strides of the tensor, and take one and a half times its memory.

What is not finite in q and dO is 0 in their terms: the sums of keys that do not see such a row need
no care then, and those that do are NaN all the same, see `gradient_tiles.finite`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.launch import Buffer, Launch, taken_by, unspecialized
from lockstep.kernels.triton.gradient_tiles import finite
from lockstep.kernels.triton.products import split
from lockstep.problem import AttentionProblem

NAMES = {name: f"{name}_terms" for name in ("q", "k", "v", "dout")}
"""The tensors that have terms, and what those are called."""
UNIT = 8
"""Numbers of bf16 in 16 bytes."""
# Numbers that a program cuts.
_BLOCK = 4096


@triton.jit
def cut(
    x_ptr, terms_ptr, stride_b, stride_h, stride_s, B, H, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Stores the terms of the program's rows of a tensor, if it has any there. FINITE: 0 for what
    is not finite."""
    WIDTH: tl.constexpr = (D + 7) // 8 * 8
    tiles = tl.cdiv(S, BLOCK_ROWS)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_row = (row < S) & (head < B * H)
    at = x_ptr + b * stride_b + h * stride_h + row.to(tl.int64) * stride_s + d
    x = tl.load(at, mask=is_row & (d < D), other=0.0)
    if FINITE:
        x = finite(x, "ieee")
    to = terms_ptr + (head.to(tl.int64) * S + row) * (3 * WIDTH) + d
    terms = split(x)
    for i in tl.static_range(3):
        tl.store(to + i * WIDTH, terms[i], mask=is_row & (d < WIDTH))


@unspecialized(triton.jit)
def cut_factors(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_terms_ptr, k_terms_ptr, v_terms_ptr, dout_terms_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    n_sequences, Hq, Hkv, Sq, Skv, D: tl.constexpr, DV: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The second number of a program says which tensor is its own. Strides are those of the
    tensors, in units of ALIGN."""
    B, tensor = n_sequences, tl.program_id(1)
    if tensor == 0:
        cut(
            q_ptr, q_terms_ptr, stride_qb * ALIGN, stride_qh * ALIGN, stride_qs * ALIGN,
            B, Hq, Sq, D, BLOCK_D, BLOCK_ROWS, True,
        )  # fmt: skip
    elif tensor == 1:
        cut(
            k_ptr, k_terms_ptr, stride_kb * ALIGN, stride_kh * ALIGN, stride_ks * ALIGN,
            B, Hkv, Skv, D, BLOCK_D, BLOCK_ROWS, False,
        )  # fmt: skip
    elif tensor == 2:
        cut(
            v_ptr, v_terms_ptr, stride_vb * ALIGN, stride_vh * ALIGN, stride_vs * ALIGN,
            B, Hkv, Skv, DV, BLOCK_DV, BLOCK_ROWS, False,
        )  # fmt: skip
    else:
        cut(
            dout_ptr, dout_terms_ptr, stride_ob * ALIGN, stride_oh * ALIGN, stride_os * ALIGN,
            B, Hq, Sq, DV, BLOCK_DV, BLOCK_ROWS, True,
        )  # fmt: skip


def buffers_of(problem: AttentionProblem) -> dict[str, Buffer]:
    """The terms of all tensors, by name."""
    return {name: Buffer(shape, torch.bfloat16) for name, shape in _shapes(problem).items()}


def strides_of(problem: AttentionProblem) -> dict[str, tuple[int, int, int]]:
    """The strides of all terms by sequence, head and token, as kernels name the tensors; 0 by
    sequence if sequences are packed."""
    found = {}
    for name, (B, H, S, terms, width) in zip("qkvo", _shapes(problem).values(), strict=True):
        row = terms * width
        found[name] = H * S * row if B > 1 else 0, S * row, row
    return found


def launch_cut(problem: AttentionProblem, arguments: dict[str, Any]) -> Launch:
    """The launch that makes the terms of all tensors; `arguments` are those of
    `backward.arguments_of`."""
    shapes = _shapes(problem).values()
    rows = max(1, _BLOCK // max(arguments["BLOCK_D"], arguments["BLOCK_DV"]))
    tiles = max(B * H * triton.cdiv(S, rows) for B, H, S, _, _ in shapes)
    sizes = {"n_sequences": next(iter(shapes))[0], "Hkv": problem.Hkv, "BLOCK_ROWS": rows}
    return Launch(cut_factors, (tiles, len(NAMES)), taken_by(cut_factors, arguments | sizes))


def _shapes(problem: AttentionProblem) -> dict[str, tuple[int, int, int, int, int]]:
    B = 1 if problem.layout == "varlen" else problem.B
    queries, keys = (B, problem.Hq, problem.Sq), (B, problem.Hkv, problem.Skv)
    of_heads = (queries, problem.D), (keys, problem.D), (keys, problem.Dv), (queries, problem.Dv)
    return {
        name: (*rows, 3, -(-head_dim // UNIT) * UNIT)
        for name, (rows, head_dim) in zip(NAMES.values(), of_heads, strict=True)
    }
