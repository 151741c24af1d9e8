"""Checks that need the tensors themselves: their kind, the values that a call is about to follow,
and whether parts that are to be merged fit together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lockstep.numerics import statistics_dtype
from lockstep.options import type_of
from lockstep.problem import (
    DTYPES,
    SHAPES,
    AttentionProblem,
    Layout,
    Tensors,
    any_of,
    short,
    shown,
)

REQUIRED: dict[Layout, tuple[str, ...]] = {
    "dense": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "paged": ("q", "k", "v", "page_table", "kv_lens"),
    "varlen_paged": ("q", "k", "v", "cu_seqlens_q", "page_table", "kv_lens"),
}


def check_types(tensors: Tensors, layout: Layout) -> None:
    """Raises TypeError for an argument that is not a tensor, or one without strides; ValueError
    for one out of place."""
    required, shapes = REQUIRED[layout], SHAPES[layout]
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is None:
            if name in required:
                raise TypeError(f"{shown(name, layout)} takes a torch.Tensor, got None")
        elif type(tensor) is not Tensor and not isinstance(tensor, Tensor):
            raise TypeError(f"{shown(name, layout)} takes a torch.Tensor, got {type_of(tensor)}")
        elif name not in shapes:
            raise ValueError(f"{name} is not an argument of {layout} attention")
        else:
            check_strided(shown(name, layout), tensor)


def check_strided(name: str, tensor: Tensor) -> None:
    """Raises TypeError for sparse, nested and other tensors whose elements have no strides."""
    if tensor.is_nested:
        raise TypeError(f"{name} takes a strided tensor, got a nested one")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} takes a strided tensor, got one of layout {short(tensor.layout)}")


def are_values_checked(problem: AttentionProblem) -> bool:
    """Whether `check_values` looks at the tensors of a problem before a kernel runs.

    On a GPU reading them back makes every call wait for the device. There the kernels check, and
    bad sequences come out as NaN, unless the environment has LOCKSTEP_CHECK=1.
    """
    return problem.device_type == "cpu" or os.environ.get("LOCKSTEP_CHECK", "0") not in ("", "0")


def check_values(
    problem: AttentionProblem, tensors: Tensors, max_seqlen_q: int | None = None
) -> None:
    """Checks lengths, offsets, the bound of queries and page indices before a kernel follows them.

    Raises ValueError that names the argument and the sequence. Waits for the device.
    """
    if tensors.kv_lens is not None and not (
        problem.secret_lengths and _are_in_range(tensors.kv_lens, problem.Skv)
    ):
        _check_lengths(tensors.kv_lens.tolist(), problem.Skv)
    if tensors.kv_starts is not None:
        _check_starts(problem, tensors.kv_starts.tolist(), tensors.kv_lens)
    if tensors.cu_seqlens_q is not None:
        offsets = tensors.cu_seqlens_q.tolist()
        _check_offset_values("cu_seqlens_q", offsets, "Tq", problem.Sq)
        if max_seqlen_q is not None:
            _check_longest(offsets, max_seqlen_q)
    if tensors.cu_seqlens_k is not None:
        _check_offset_values("cu_seqlens_k", tensors.cu_seqlens_k.tolist(), "Tk", problem.Skv)
    if tensors.page_table is not None:
        assert tensors.kv_lens is not None
        _check_page_values(problem, tensors.page_table, tensors.kv_lens, tensors.kv_starts)


def _check_starts(problem: AttentionProblem, starts: list[int], kv_lens: Tensor | None) -> None:
    name = "Skv" if kv_lens is None else "kv_lens"
    lens = [problem.Skv] * problem.B if kv_lens is None else kv_lens.tolist()
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        if not 0 <= start <= length:
            raise ValueError(
                f"kv_starts takes 0 to {name} = {length}, got {start} at index {b}, for sequence "
                f"{b}"
            )


def split_parts(parts: Any) -> tuple[list[Tensor], list[Tensor]]:
    """outs and lses of what `merge` was given. Raises TypeError unless it is pairs of tensors."""
    if isinstance(parts, Tensor) or not isinstance(parts, Iterable):
        raise TypeError(f"parts takes a sequence of (out, lse) pairs, got {type_of(parts)}")
    outs, lses = [], []
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)):
            raise TypeError(f"parts takes (out, lse) pairs, got {type_of(part)} at index {i}")
        if len(part) != 2:
            raise TypeError(f"parts takes (out, lse) pairs, got {len(part)} entries at index {i}")
        for name, x in zip(("out", "lse"), part, strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"parts takes tensors, got {type_of(x)} for {name} at index {i}")
        outs.append(part[0])
        lses.append(part[1])
    return outs, lses


def check_parts(outs: list[Tensor], lses: list[Tensor]) -> None:
    """Checks the partial results given to `merge`. Raises ValueError or TypeError."""
    if not outs:
        raise ValueError("parts takes at least one (out, lse) pair, got none")
    for i, pair in enumerate(zip(outs, lses, strict=True)):
        for name, x in zip(("out", "lse"), pair, strict=True):
            check_strided(f"{name} of parts[{i}]", x)
    first = outs[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"parts takes out of dtype {any_of(DTYPES)}, got {short(first.dtype)}")
    if first.dim() < 1:
        raise ValueError("parts takes out of shape [..., Dv], got a tensor without dims")
    lse_dtype = statistics_dtype(first.dtype)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ValueError(
                f"parts takes outs of one shape and dtype: the first is {list(first.shape)} "
                f"{short(first.dtype)}, got {list(out.shape)} {short(out.dtype)} at index {i}"
            )
        if lse.shape != first.shape[:-1] or lse.dtype != lse_dtype:
            raise ValueError(
                f"parts takes an lse of shape {list(first.shape[:-1])} and {short(lse_dtype)} for "
                f"its out, got {list(lse.shape)} {short(lse.dtype)} at index {i}"
            )
        if out.device != first.device or lse.device != first.device:
            raise ValueError(
                f"parts takes tensors on one device: the first is on {first.device}, got out on "
                f"{out.device} and lse on {lse.device} at index {i}"
            )


def _are_in_range(kv_lens: Tensor, Skv: int) -> bool:
    """Whether each length is, with the same steps for all that are: Python would make small numbers
    faster than large ones."""
    return not bool(((kv_lens < 0) | (kv_lens > Skv)).any())


def _check_lengths(lens: list[int], Skv: int) -> None:
    for b, length in enumerate(lens):
        if not 0 <= length <= Skv:
            raise ValueError(
                f"kv_lens takes 0 to Skv = {Skv}, got {length} at index {b}, for sequence {b}"
            )


def _check_offset_values(name: str, offsets: list[int], total_name: str, total: int) -> None:
    if not offsets or offsets[0] != 0:
        raise ValueError(
            f"{name} takes offsets that start at 0, got {offsets[:1]}, where sequence 0 begins"
        )
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"{name} takes offsets that never decrease, got {start} then {end} at index "
                f"{i + 1}, where sequence {i} ends"
            )
    if offsets[-1] != total:
        raise ValueError(
            f"{name} takes offsets that end at {total_name} = {total}, got {offsets[-1]} at index "
            f"{len(offsets) - 1}, where the last sequence ends"
        )


def _check_longest(offsets: list[int], max_seqlen_q: int) -> None:
    for b, (start, end) in enumerate(pairwise(offsets)):
        if end - start > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q takes the most queries of any sequence, or more, got "
                f"{max_seqlen_q} with {end - start} queries of sequence {b}"
            )


def _check_page_values(
    problem: AttentionProblem, page_table: Tensor, kv_lens: Tensor, kv_starts: Tensor | None
) -> None:
    """Raises ValueError if a page that holds a key of its sequence does not exist. Other entries
    may be anything."""
    assert problem.page_size is not None
    assert problem.n_pages is not None
    device = page_table.device
    first_key = torch.arange(0, problem.Skv, problem.page_size, device=device)  # [max_pages]
    in_use = first_key < kv_lens[:, None]  # [B, max_pages]
    if kv_starts is not None:
        in_use &= first_key + problem.page_size > kv_starts[:, None]
    wrong = in_use & ((page_table < 0) | (page_table >= problem.n_pages))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"page_table takes indices of the {problem.n_pages} pages, got {int(page_table[b, i])} "
            f"for page {i} of sequence {b}"
        )
