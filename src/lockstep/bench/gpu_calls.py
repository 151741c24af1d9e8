"""The work behind each table of `lockstep bench gpu`: inputs, calls, and what to check of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep import dispatch
from lockstep.bench.contender import Contender
from lockstep.bench.gpu_cases import BACKWARD_FLOPS, Case
from lockstep.bench.gpu_check import Piece
from lockstep.bench.lengths import long_tailed_lengths
from lockstep.problem import Options, Tensors, describe

PAGE = 256


@dataclass(frozen=True)
class Work:
    """One case on its inputs.

    amount: GFLOP or MB, so that amount / ms is the rate in TFLOP/s or GB/s.
    chosen: The kernel that `lockstep.attention` runs for it, None if all kernels refuse it.
    pieces: What is checked; `pick` takes the same out of the result of a call.
    prepare: The call to time, or None if a contender does not take part.
    """

    amount: float
    chosen: str | None
    pieces: list[Piece]
    pick: Callable[[Any], list[tuple[Tensor, ...]]]
    prepare: Callable[[Contender], Callable[[], Any] | None]


def prefill(case: Case) -> Work:
    """The work of the tables forward, small, host, and backward, which times the backward alone."""
    backward = case.table == "backward"
    q = _normal(case.B, case.Hq, case.S, case.D)
    k, v = (_normal(case.B, case.Hkv, case.S, case.D) for _ in range(2))
    dout = _normal(case.B, case.Hq, case.S, case.D)
    checked = _spread(case.B, case.Hq)

    def prepare(contender: Contender) -> Callable[[], Any] | None:
        if contender.prefill is None or (backward and not contender.backward):
            return None
        tensors = [_tokens_first(x) if contender.tokens_first else x for x in (q, k, v, dout)]
        if backward:
            return _backward_call(contender, tensors, case.causal)
        return contender.prefill(tensors[0], tensors[1], tensors[2], case.causal)

    def pick(result: Any) -> list[tuple[Tensor, ...]]:
        tensors = result if backward else (result,)
        return [tuple(x[b, h] for x in tensors) for b, h in checked]

    pieces = [Piece(*(x[b, h] for x in (q, k, v, dout))) for b, h in checked]
    pairs = case.S * case.S / (2 if case.causal else 1)
    gflop = 4 * case.B * case.Hq * pairs * case.D / 1e9
    chosen = _chosen(Tensors(q, k, v), case.causal, backward)
    return Work(gflop * (BACKWARD_FLOPS if backward else 1), chosen, pieces, pick, prepare)


def decode(case: Case) -> Work:
    """The work of decode and host_decode: one query per sequence, a cache in shuffled pages."""
    per_sequence = case.S // PAGE
    n_pages = case.B * per_sequence
    q = _normal(case.B, case.Hq, 1, case.D)
    k_pages, v_pages = (_normal(n_pages, PAGE, case.Hkv, case.D) for _ in range(2))
    order = torch.randperm(n_pages, device=q.device).int()
    page_table = order.view(case.B, per_sequence)
    kv_lens = torch.full((case.B,), case.S, dtype=torch.int32, device=q.device)
    checked = _spread(case.B, case.Hq)

    def keys(pages: Tensor, b: int, h: int) -> Tensor:
        return pages[page_table[b].long(), :, h // (case.Hq // case.Hkv)].flatten(0, 1)  # [S, D]

    pieces = [Piece(q[b, h], keys(k_pages, b, h), keys(v_pages, b, h), q[b, h]) for b, h in checked]
    tensors = Tensors(q, k_pages, v_pages, kv_lens=kv_lens, page_table=page_table)
    return Work(
        (k_pages.nbytes + v_pages.nbytes) / 1e6,
        _chosen(tensors, causal=True),
        pieces,
        lambda out: [(out[b, h],) for b, h in checked],
        lambda contender: (
            contender.decode and contender.decode(q, k_pages, v_pages, page_table, kv_lens)
        ),
    )


def varlen(case: Case) -> Work:
    """The work of varlen: packed sequences of long-tailed lengths."""
    lens = long_tailed_lengths(case.B, case.S)
    q, k, v = (_normal(sum(lens), case.Hq, case.D) for _ in range(3))
    cu_seqlens = torch.tensor([0, *lens], device=q.device).cumsum(0).int()
    ends = cu_seqlens.tolist()
    longest = max(lens)
    some = sorted({0, lens.index(longest), case.B - 1})
    checked = [(slice(ends[b], ends[b + 1]), -1 - b % case.Hq) for b in some]
    return Work(
        sum(4 * case.Hq * n * n / 2 * case.D for n in lens) / 1e9,
        _chosen(Tensors(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens), causal=True),
        [Piece(*(x[of, h] for x in (q, k, v, q))) for of, h in checked],
        lambda out: [(out[of, h],) for of, h in checked],
        lambda contender: contender.varlen and contender.varlen(q, k, v, cu_seqlens, longest, True),
    )


TABLES: dict[str, Callable[[Case], Work]] = {
    "forward": prefill,
    "small": prefill,
    "backward": prefill,
    "decode": decode,
    "varlen": varlen,
    "host": prefill,
    "host_decode": decode,
}


def _backward_call(
    contender: Contender, tensors: list[Tensor], causal: bool
) -> Callable[[], tuple[Tensor, ...]]:
    assert contender.prefill is not None
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    with torch.enable_grad():
        out = contender.prefill(leaves[0], leaves[1], leaves[2], causal)()
    return lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)


def _chosen(tensors: Tensors, causal: bool, backward: bool = False) -> str | None:
    try:
        return dispatch.select(describe(tensors, Options(causal)), backward=backward).name
    except NotImplementedError:
        return None


def _spread(B: int, H: int) -> list[tuple[int, int]]:
    """A head of the first sequence, one of the middle and one of the last."""
    last = B * H - 1
    return [divmod(i, H) for i in sorted({0, last // 2, last})]


def _tokens_first(x: Tensor) -> Tensor:
    """The same [B, H, S, D] in memory that is [B, S, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")
