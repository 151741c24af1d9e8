"""What the launches of the forward share: tensor maps, strides, pointers, and how scores become
log2 units."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT, ragged
from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.forward.plan import CHUNK
from lockstep.memory_order import strides_like
from lockstep.problem import AttentionProblem, Tensors

# Heads of a packed sequence are at work at the same time if their keys and values fit into this:
# what L2 holds twice, once in each of its halves.
NEAR_L2_BYTES = 25e6
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
    if problem.is_packed:
        return "varlen"
    # Pages have lengths, too.
    return "kv_lens" if problem.has_kv_lens else "dense"


def names_of(problem: AttentionProblem) -> dict[str, str]:
    """Which tensor a pointer has that is not of its name."""
    layout = layout_of(problem)
    # A pointer that is not used may be any.
    unused = {"sinks": not problem.has_sinks, "kv_lens": layout != "kv_lens"}
    unused |= dict.fromkeys(("cu_q", "cu_kv", "sequence_order"), layout != "varlen")
    unused["page_table"] = not problem.is_paged
    # Where keys are in pages, the sequence order has their lengths.
    keys = "cu_seqlens_q" if problem.is_paged else "cu_seqlens_k"
    names = {"o": "out", "cu_q": "cu_seqlens_q", "cu_kv": keys}
    return names | {name: "lse" for name, is_unused in unused.items() if is_unused}


def row_strides(problem: AttentionProblem, q: Tensor) -> dict[str, int]:
    """The strides of lse, which lies as q does."""
    strides = (0, 1, problem.Hq) if problem.is_packed else strides_like(q, problem.lse_shape)
    return dict(zip(("row_stride_b", "row_stride_h", "row_stride_s"), strides, strict=True))


def key_numbers(problem: AttentionProblem, fitted: Tensors, group: int = 1) -> dict[str, int]:
    """Where the keys of a sequence lie, and how many stay in L2, if so many heads share a tile."""
    k, table = fitted.k, fitted.page_table
    ragged = problem.B > 1 and layout_of(problem) == "kv_lens" and not problem.is_paged
    return {
        # From one batch to the next in a ragged map of k and v.
        "kv_batch_rows": k.stride(0) // k.stride(2) if ragged else 0,
        "l2_keys": keys_in_l2(problem) // group,
        "stride_tb": 0 if table is None else table.stride(0),
        "n_pages": problem.n_pages or 0,
    }


def keys_in_l2(problem: AttentionProblem) -> int:
    """How many keys of one head of queries, with their values, stay in the near half of L2."""
    return int(NEAR_L2_BYTES / ((problem.D + problem.Dv) * 2) * problem.Hq / problem.Hkv)


def describe_pages(rows: int, padding: str, x: Tensor, columns: int = CHUNK) -> TensorDescriptor:
    """A tensor map of pages x [n_pages, page, Hkv, D] in boxes of so many rows and columns."""
    n_pages, page, H, D = x.shape
    by_page, by_row, by_head = _strides(x)
    block = [1, 1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[x.dtype])
    shape, strides = [1, n_pages, H, page, D], [ALIGNMENT, by_page, by_head, by_row, 1]
    return TensorDescriptor(x, shape, strides, block, layout, padding)


def scales(problem: AttentionProblem) -> tuple[str, float, float]:
    """How scores become log2 units: see `Program.mask_scores`."""
    if problem.softcap is not None:
        # With spans, rows have the bits of decode. In constant time it has not been measured.
        # And the largest score is capped in place of all if larger ones are larger behind it.
        is_plain = not (problem.query_invariant or problem.constant_time) and problem.scale > 0
        scores = "capped late" if is_plain else "capped"
        return scores, problem.scale / problem.softcap, problem.softcap
    if problem.has_raw_scores:
        return "raw", problem.score_unit, 0.0
    return "scaled", problem.scale, 0.0


def by_head(x: Tensor, packed: bool) -> Tensor:
    """[B, H, S, D] as it is; [T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1)[None] if packed else x


def tiles_of(x: Tensor, rows: int, width: int, clipped: bool, heads: int = 1) -> Shape:
    """The tensor map of x [B, H, S, D] in tiles [rows, width] of one or several heads, which may be
    clipped to a sequence's rows."""
    B, H, S, D = x.shape
    sb, sh, ss = _strides(x)
    if S == 1:
        ss = -(-D // ALIGNMENT) * ALIGNMENT
    block = [1, 1, heads, rows, width]
    if clipped:
        return Shape(*ragged(H, D, sh, ss), block)
    return Shape([1, B, H, S, D], [ALIGNMENT, sb, sh, ss, 1], block)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of x [·, ·, ·, D] without the last; that of a dim of size 1 means nothing and may be
    anything."""
    strides = zip(x.shape[:3], x.stride(), strict=False)
    return tuple(stride if size > 1 else ALIGNMENT for size, stride in strides)
