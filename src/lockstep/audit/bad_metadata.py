"""Calls whose lengths, offsets or pages point out of their tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lockstep.audit.cases import Case
from lockstep.audit.sequences import first_page

Corruption = tuple[str, Case, int]
"""The argument that is wrong, the call with it, and the sequence that it is wrong for."""


def corruptions(case: Case) -> Iterator[Corruption]:
    """Every way in which one entry of an argument of this call can be out of range."""
    if not len(case.tensors["q"]):
        return
    problem, tensors = case.pose()
    last = problem.B - 1
    if tensors.kv_lens is not None:
        for length in (-1, problem.Skv + 1, 2**31 - 1):
            yield "kv_lens", case.replaced(kv_lens=_set(tensors.kv_lens, last, length)), last
    if tensors.kv_starts is not None:
        end = problem.Skv if tensors.kv_lens is None else int(tensors.kv_lens[last])
        for start in (-1, end + 1, 2**31 - 1):
            yield "kv_starts", case.replaced(kv_starts=_set(tensors.kv_starts, last, start)), last
    if tensors.page_table is not None and tensors.kv_lens is not None:
        assert problem.n_pages is not None
        starts = [0] * problem.B if tensors.kv_starts is None else tensors.kv_starts.tolist()
        for b, length in enumerate(tensors.kv_lens.tolist()):
            if length > starts[b]:
                for page in (-1, problem.n_pages, 2**31 - 1):
                    table = _set(tensors.page_table, (b, first_page(case, b)), page)
                    yield "page_table", case.replaced(page_table=table), b
    if tensors.cu_seqlens_k is not None:
        total = problem.Skv
        yield _offsets(case, tensors.cu_seqlens_k, -1, total + 1, last)
        if problem.B > 1:
            yield _offsets(case, tensors.cu_seqlens_k, last, total + 1, last - 1)
            if int(tensors.cu_seqlens_k[last - 1]) > 0:
                yield _offsets(case, tensors.cu_seqlens_k, last, -1, last - 1)


def _offsets(case: Case, offsets: Tensor, at: int, value: int, b: int) -> Corruption:
    return "cu_seqlens_k", case.replaced(cu_seqlens_k=_set(offsets, at, value)), b


def _set(x: Tensor, at: int | tuple[int, int], value: int) -> Tensor:
    changed = x.clone()
    changed[at] = value
    return changed
