"""Arguments that every call of a layout takes, and the calls."""

from __future__ import annotations

import torch

import lockstep

B, HQ, HKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 8, 6
PAGE, N_PAGES, MAX_PAGES = 4, 9, 3


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def dense(**changes):
    return {
        "q": rand(B, HQ, SQ, D),
        "k": rand(B, HKV, SKV, D),
        "v": rand(B, HKV, SKV, DV),
    } | changes


def varlen(**changes):
    arguments = {
        "q": rand(5, HQ, D),
        "k": rand(7, HKV, D),
        "v": rand(7, HKV, DV),
        "cu_seqlens_q": torch.tensor([0, 2, 5]),
        "cu_seqlens_k": torch.tensor([0, 3, 7]),
    }
    return arguments | changes


def paged(**changes):
    arguments = {
        "q": rand(B, HQ, SQ, D),
        "k_pages": rand(N_PAGES, PAGE, HKV, D),
        "v_pages": rand(N_PAGES, PAGE, HKV, DV),
        "page_table": torch.tensor([[3, 1, 8], [0, 2, -1]]),
        "kv_lens": torch.tensor([9, 8]),
    }
    return arguments | changes


OFFSETS = torch.tensor([0, 2, 5])


def varlen_paged(**changes):
    arguments = {
        "q": rand(5, HQ, D),
        "k": rand(N_PAGES, PAGE, HKV, D),
        "v": rand(N_PAGES, PAGE, HKV, DV),
        "cu_seqlens_q": torch.tensor([0, 2, 5]),
        "page_table": torch.tensor([[3, 1, 8], [0, 2, -1]]),
        "kv_lens": torch.tensor([9, 8]),
    }
    return arguments | changes


CALLS = {
    dense: (lockstep.attention, lockstep.reference.attention),
    varlen: (lockstep.attention_varlen, lockstep.reference.attention_varlen),
    paged: (lockstep.attention_paged, lockstep.reference.attention_paged),
    varlen_paged: (lockstep.attention_varlen, lockstep.reference.attention_varlen),
}
