"""One sequence of a call: the call without the others, its results, and keys it does not see."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep import reference
from lockstep.audit.cases import Case, Douts, Result

# Arguments with an entry for each sequence, and results with one for each query or key.
_BY_SEQUENCE = ("page_table", "kv_lens", "kv_starts")
_BY_QUERY, _BY_KEY = ("out", "lse", "dq"), ("dk", "dv")


def count(case: Case) -> int:
    """The number of sequences of a call."""
    if "cu_seqlens_q" in case.tensors:
        return len(case.tensors["cu_seqlens_q"]) - 1
    return len(case.tensors["q"])


def tokens(case: Case, b: int) -> tuple[slice, slice]:
    """The queries and the keys of sequence b in tensors that are packed, or have a batch dim; of
    pages, all."""
    queries = keys = slice(b, b + 1)
    if "cu_seqlens_q" in case.tensors:
        queries = slice(*case.tensors["cu_seqlens_q"][b : b + 2].tolist())
    if "cu_seqlens_k" in case.tensors:
        keys = slice(*case.tensors["cu_seqlens_k"][b : b + 2].tolist())
    elif "page_table" in case.tensors:
        keys = slice(None)
    return queries, keys


def first_page(case: Case, b: int) -> int:
    """Where the page table has the page of the first key of sequence b."""
    starts = case.tensors.get("kv_starts")
    return 0 if starts is None else int(starts[b]) // case.tensors["k"].shape[1]


def alone(case: Case, douts: Douts | None, b: int) -> tuple[Case, Douts | None]:
    """A call with sequence b and no other."""
    part, keys = tokens(case, b)
    changes: dict[str, Any] = {
        name: case.tensors[name][part if name == "q" else keys] for name in ("q", "k", "v")
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in case.tensors:
            offsets = case.tensors[name][b : b + 2]
            changes[name] = offsets - offsets[0]
    changes |= {
        name: case.tensors[name][b : b + 1] for name in _BY_SEQUENCE if name in case.tensors
    }
    slopes = case.tensors.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        changes["alibi_slopes"] = slopes[b : b + 1]
    bias = case.tensors.get("bias")
    if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
        changes["bias"] = bias[part]
    own = None if douts is None else (douts[0][part], douts[1][part])
    return case.replaced(**changes), own


def share(case: Case, result: Result, b: int) -> dict[str, Tensor]:
    """The results of sequence b; gradients that sequences share are left out."""
    queries, keys = tokens(case, b)
    return {
        name: x[queries if name in _BY_QUERY else keys]
        for name, x in result.items().items()
        if name in (*_BY_QUERY, *_BY_KEY)
    }


def seen(case: Case) -> Tensor:
    """The keys that each row of a dense call sees, bool [B, Hq, Sq, Skv]."""
    problem, tensors = case.pose()
    lens = tensors.kv_lens
    if lens is None:
        lens = torch.full((problem.B,), problem.Skv, device=tensors.q.device)
    found = reference.visible(problem, lens, problem.Sq, problem.Skv, tensors.kv_starts)
    if tensors.bias is not None:
        found = found & (tensors.bias != -math.inf)
    return found.expand(problem.B, problem.Hq, problem.Sq, problem.Skv)


def with_garbage(case: Case) -> Case | None:
    """The same call with NaN and infinities wherever no row reads; None for packed sequences, where
    every element is read."""
    if case.layout == "dense":
        return _dense_with_garbage(case)
    return _pages_with_garbage(case) if "page_table" in case.tensors else None


def _dense_with_garbage(case: Case) -> Case:
    visible = seen(case)  # [B, Hq, Sq, Skv]
    q, k, v = (case.tensors[name] for name in ("q", "k", "v"))
    used = visible.any(2).view(len(k), k.shape[1], -1, k.shape[2]).any(2)  # [B, Hkv, Skv]
    return case.replaced(
        q=_garbage_in(q, ~visible.any(-1)), k=_garbage_in(k, ~used), v=_garbage_in(v, ~used)
    )


def _pages_with_garbage(case: Case) -> Case:
    k, v, table = (case.tensors[name] for name in ("k", "v", "page_table"))
    n_pages, page = k.shape[:2]
    used = torch.zeros(n_pages, page, dtype=torch.bool, device=k.device)
    table = table.clone()
    ends = case.tensors["kv_lens"].tolist()
    starts = case.tensors["kv_starts"].tolist() if "kv_starts" in case.tensors else [0] * len(ends)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        positions = torch.arange(start, end, device=k.device)
        used[table[b, positions // page].long(), positions % page] = True
        # Entries outside a sequence may be anything.
        table[b, : start // page] = table[b, -(-end // page) :] = n_pages + 10**6
    hidden = (~used)[..., None].expand(k.shape[:-1])
    return case.replaced(k=_garbage_in(k, hidden), v=_garbage_in(v, hidden), page_table=table)


def _garbage_in(x: Tensor, rows: Tensor) -> Tensor:
    """x with NaN, inf and -inf in turns in the rows given, a bool for each row of x."""
    kinds = x.new_tensor([math.nan, math.inf, -math.inf])
    garbage = kinds[torch.arange(x.numel(), device=x.device) % 3].view(x.shape)
    return torch.where(rows[..., None], garbage, x)
