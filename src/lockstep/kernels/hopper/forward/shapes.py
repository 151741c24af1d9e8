"""Tensor maps of the forward's tensors, and how its scores become log2 units."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT, ragged
from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.common.ring import CHUNK
from lockstep.problem import AttentionProblem

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Shape(NamedTuple):
    """A tensor map without its tensor."""

    shape: list[int]
    strides: list[int]
    block: list[int]

    def describe(self, x: Tensor) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(self.block, GLUON_DTYPES[x.dtype])
        return TensorDescriptor(x, self.shape, self.strides, self.block, layout)


def layout_of(problem: AttentionProblem) -> str:
    if problem.layout == "varlen":
        return "varlen"
    # Pages have lengths, too.
    return "kv_lens" if problem.has_kv_lens else "dense"


def describe_pages(rows: int, padding: str, x: Tensor) -> TensorDescriptor:
    """A tensor map of pages x [n_pages, page, Hkv, D] in boxes of so many rows."""
    n_pages, page, H, D = x.shape
    # The stride of a dim of size 1 means nothing and may be anything.
    by_page, by_row, by_head = (
        stride if size > 1 else ALIGNMENT
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    block = [1, 1, 1, rows, CHUNK.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[x.dtype])
    shape, strides = [1, n_pages, H, page, D], [ALIGNMENT, by_page, by_head, by_row, 1]
    return TensorDescriptor(x, shape, strides, block, layout, padding)


def scales(problem: AttentionProblem) -> tuple[str, float, float]:
    """How scores become log2 units: see `Program.mask_scores`."""
    if problem.softcap is not None:
        # With spans, rows have the bits of decode. In constant time it has not been measured.
        is_plain = not (problem.query_invariant or problem.constant_time)
        scores = "reciprocals" if is_plain else "capped"
        return scores, problem.scale / problem.softcap, problem.softcap
    if problem.has_raw_scores:
        return "raw", problem.score_unit, 0.0
    return "scaled", problem.scale, 0.0


def by_head(x: Tensor, packed: bool) -> Tensor:
    """[B, H, S, D] as it is; [T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1)[None] if packed else x


def tiles_of(x: Tensor, rows: int, width: int, clipped: bool) -> Shape:
    """The tensor map of x [B, H, S, D] in tiles [rows, width], or clipped to a sequence's rows."""
    B, H, S, D = x.shape
    # The stride of a dim of size 1 means nothing and may be anything.
    sb, sh, ss = (
        stride if size > 1 else ALIGNMENT
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    if S == 1:
        ss = -(-D // ALIGNMENT) * ALIGNMENT
    block = [1, 1, 1, rows, width]
    if clipped:
        return Shape(*ragged(H, D, sh, ss), block)
    return Shape([1, B, H, S, D], [ALIGNMENT, sb, sh, ss, 1], block)
