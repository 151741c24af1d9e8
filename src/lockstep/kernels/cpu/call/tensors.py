"""From torch tensors to a call record."""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.call.record import CALL
from lockstep.kernels.cpu.compiler.vectors import BF16, F16, F32
from lockstep.kernels.window import limit_of

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Tensors
    from lockstep.problem import AttentionProblem

NO_TENSOR = (0, 0, 0, 0)
LARGEST = torch.finfo(torch.float32).max
KINDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
# Where the batch (or page), head and row dims stand in each layout.
DENSE, PACKED, PAGED = (0, 1, 2), (None, 1, 0), (0, 2, 1)


def strided(tensor: Tensor, dims: tuple[int | None, int, int]) -> tuple[int, ...]:
    """Address and byte strides; a missing batch dim has stride 0."""
    size, strides = tensor.element_size(), tensor.stride()
    batch, head, row = dims
    first = 0 if batch is None else strides[batch] * size
    return tensor.data_ptr(), first, strides[head] * size, strides[row] * size


def address(array: np.ndarray | None) -> int:
    """Where an array lies; 0 for none. The array must be kept while the address is in use."""
    if array is None or array.size == 0:
        return 0
    # A tenth of the time that array.ctypes.data takes.
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def numbers(tensor: Tensor) -> np.ndarray:
    """An integer tensor as an int64 array."""
    return tensor.detach().to(torch.int64).contiguous().numpy()


def _lengths(problem: AttentionProblem, tensors: Tensors) -> tuple[list[int], ...]:
    """(q_first, q_len, kv_first, kv_len, kv_count), each [B]; no kv_count where it is secret."""
    B = problem.B
    q_first, q_len, kv_first, kv_len = [0] * B, [problem.Sq] * B, [0] * B, [problem.Skv] * B
    if tensors.cu_seqlens_q is not None:
        offsets = tensors.cu_seqlens_q.tolist()
        q_first, q_len = offsets[:-1], _steps(offsets)
    if tensors.cu_seqlens_k is not None:
        offsets = tensors.cu_seqlens_k.tolist()
        kv_first, kv_len = offsets[:-1], _steps(offsets)
    if problem.secret_lengths:
        return q_first, q_len, kv_first, kv_len
    if tensors.kv_lens is not None:
        kv_len = tensors.kv_lens.tolist()
    if tensors.kv_starts is not None:
        kv_first = tensors.kv_starts.tolist()
        kv_len = [end - start for start, end in zip(kv_first, kv_len, strict=True)]
    return q_first, q_len, kv_first, kv_len, kv_len


def _steps(offsets: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def query_dims(problem: AttentionProblem) -> tuple[int | None, int, int]:
    return PACKED if problem.is_packed else DENSE


def kv_dims(problem: AttentionProblem) -> tuple[int | None, int, int]:
    return PAGED if problem.is_paged else query_dims(problem)


class Described(NamedTuple):
    """A call record, and what it points to."""

    record: array[int]  # a CALL, then the tables of lengths, [B] each
    q_len: list[int]  # [B]
    kv_len: list[int]  # [B], keys that are loaded
    kept: tuple[np.ndarray | None, ...]

    @property
    def address(self) -> int:
        return self.record.buffer_info()[0]

    def again(self, *tensors: Tensor | None) -> Described:
        """The same call with others for q, k, v, out, lse and statistics, and no tensors more."""
        record = array("q", self.record)
        further = record.buffer_info()[0] - self.address
        for place, tensor in zip(TENSORS, tensors, strict=True):
            if tensor is not None:
                record[place] = tensor.data_ptr()
        for i in range(TABLES, TABLES + N_TABLES):
            record[i] += further
        return self._replace(record=record)


CALL_WORDS = CALL.itemsize // 8
TENSORS, (TABLES,) = (
    [CALL.fields[name][1] // 8 for name in names.split()]  # type: ignore[index]
    for names in ("q k v out lse statistics", "q_first")
)
# q_first, q_len, kv_first, kv_len and kv_count.
N_TABLES = 5


def describe(
    problem: AttentionProblem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor | None,
    statistics: Tensor | None,
) -> Described:
    """One call for the kernels; the last three are per query row, to write or to read."""
    q_dims, k_dims = query_dims(problem), kv_dims(problem)
    tables = _lengths(problem, tensors)
    bias, bias_kind, bias_col = NO_TENSOR, F32, 0
    if tensors.bias is not None:
        whole = tensors.bias.expand(problem.B, problem.Hq, problem.Sq, problem.Skv)
        bias, bias_kind = strided(whole, DENSE), KINDS[whole.dtype]
        bias_col = whole.stride(3) * whole.element_size()
    sinks = slopes = pages = counts = None
    if problem.secret_lengths:
        counts = numbers(tensors.kv_lens)
    if tensors.sinks is not None:
        sinks = tensors.sinks.detach().float().contiguous().numpy()
    if tensors.alibi_slopes is not None:
        whole = tensors.alibi_slopes.detach().float().expand(problem.B, problem.Hq)
        slopes = whole.contiguous().numpy()
    if tensors.page_table is not None:
        pages = numbers(tensors.page_table)
        if problem.secret_lengths:
            # All entries are followed, and keys beyond a length masked: any page will do.
            pages = np.where((pages < 0) | (pages >= problem.n_pages), 0, pages)
    words = (
        KINDS[problem.dtype],
        problem.B,
        problem.Hq // problem.Hkv,
        problem.Hkv,
        problem.D,
        problem.Dv,
        *strided(tensors.q, q_dims),
        *strided(tensors.k, k_dims),
        *strided(tensors.v, k_dims),
        *strided(out, q_dims),
        *(NO_TENSOR if lse is None else strided(lse, q_dims)),
        *(NO_TENSOR if statistics is None else strided(statistics, q_dims)),
        *bias,
        bias_col,
        bias_kind,
        address(sinks),
        address(slopes),
        *(0 for _ in range(4)),
        address(counts),
        problem.secret_lengths,
        problem.softcap is not None,
        address(pages),
        problem.page_size or 0,
        0 if pages is None else pages.shape[1],
        limit_of(problem.window_left),
        limit_of(0 if problem.causal else problem.window_right),
        *_factors(problem.scale, problem.softcap),
        0,
    )
    assert len(words) == CALL_WORDS
    record = array("q", words + tuple(chain(*tables)))
    start, _ = record.buffer_info()
    for i in range(len(tables)):
        record[TABLES + i] = start + 8 * (CALL_WORDS + i * problem.B)
    return Described(record, tables[1], tables[3], (sinks, slopes, pages, counts))


@lru_cache(maxsize=64)
def _factors(scale: float, softcap: float | None) -> tuple[int, ...]:
    """(scale, softcap, q_factor, score_factor), each within the range of fp32, as words.

    The power of two in a scale below 1 goes into the queries. It rounds nothing there, and products
    do not overflow where scores would not.
    """
    scale, cap = _within_range(scale), _within_range(softcap or 0.0)
    q_factor = 2.0 ** min(0, math.frexp(scale)[1] - 1)
    rest = scale / q_factor
    score_factor = _within_range(rest / cap) if cap else rest
    return struct.unpack("4q", struct.pack("4d", scale, cap, q_factor, score_factor))


def _within_range(x: float) -> float:
    return max(-LARGEST, min(x, LARGEST))
