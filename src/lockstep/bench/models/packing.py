"""Dense and packed inputs as the packed ones that the functions of flash_attn take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.bench.models.inputs import Inputs


@dataclass(frozen=True)
class Packed:
    """q, k, v [T, H, D] with offsets, or k and v [n_pages, page, Hkv, D] with a page table.

    Fields are named as flash_attn names them. `cu_seqlens_k` is None for pages.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dense_batch: int | None

    def unpack(self, out: Tensor) -> Tensor:
        """[Tq, Hq, Dv] in the shape of a result of `lockstep.attention` on the same inputs."""
        if self.dense_batch is None:
            return out
        return out.view(self.dense_batch, -1, *out.shape[1:]).transpose(1, 2)


def pack(inputs: Inputs) -> Packed:
    """Views of the tensors, and offsets."""
    case, t = inputs.case, inputs.tensors
    longest = max(case.q_lens), max(case.kv_lens)
    if t.cu_seqlens_q is not None:
        offsets = t.cu_seqlens_q
        where = (t.cu_seqlens_k, t.kv_lens, t.page_table)
        return Packed(t.q, t.k, t.v, offsets, *where, *longest, None)
    tokens = t.q.transpose(1, 2).flatten(0, 1)  # [B * Sq, Hq, D]
    starts = _offsets(case.B, case.Sq, t.q.device)
    if t.page_table is not None:
        paged = (None, t.kv_lens, t.page_table)
        return Packed(tokens, t.k, t.v, starts, *paged, *longest, case.B)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (t.k, t.v))
    key_starts = _offsets(case.B, case.keys, t.q.device)
    return Packed(tokens, k, v, starts, key_starts, None, None, *longest, case.B)


def window_of(inputs: Inputs, everything: int | None) -> tuple[int | None, int | None]:
    """The window as flash_attn takes it; `everything` stands for no limit."""
    left, right = inputs.case.shape.window or (None, None)
    if inputs.case.shape.causal:
        right = 0
    return everything if left is None else left, everything if right is None else right


def _offsets(n: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (n + 1) * length, length, dtype=torch.int32, device=device)
