"""The calls behind each table of `lockstep bench gpu`: inputs, contenders, and rows to check.

For each case: how much work it is (in units that make work / ms the rate of its table), what the
checked rows should be, and by contender a function that prepares `(call, rows)`: the call to time
and what picks the checked rows out of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lockstep
from lockstep.bench.gpu import Case
from lockstep.bench.peers import Peer, Prefill
from lockstep.kernels.kernel import Kernel

# Rows that are checked: the last of the last head of the last sequence.
CHECKED = 16
PAGE = 256

Prepared = tuple[Callable[[], Any], Callable[[Any], Tensor]]
Contenders = dict[str, Callable[[], Prepared]]


class Work(NamedTuple):
    amount: float
    expected: Tensor
    contenders: Contenders


def prefill(case: Case, ours: list[Kernel], peers: list[Peer]) -> Work:
    """Forward, or forward once and then backward."""
    backward = case.table == "backward"
    q = _normal(case.B, case.Hq, case.S, case.D)
    k, v = (_normal(case.B, case.Hkv, case.S, case.D) for _ in range(2))
    dout = _normal(case.B, case.Hq, case.S, case.D)
    attentions: dict[str, Prefill] = {
        kernel.name: _ours(kernel) for kernel in ours if kernel.backward or not backward
    }
    for peer in peers:
        if peer.prefill is not None and (peer.backward or not backward):
            attentions[peer.name] = peer.prefill
    prepare = _prepare_backward if backward else _prepare_forward
    contenders: Contenders = {
        name: partial(prepare, case, attention, q, k, v, dout)
        for name, attention in attentions.items()
    }
    pairs = case.S * case.S / (2 if case.causal else 1)
    gflop = 4 * case.B * case.Hq * pairs * case.D / 1e9
    out, dq = _exact(*(x[-1, -1] for x in (q, k, v, dout)), causal=case.causal)
    return Work(2.5 * gflop, dq, contenders) if backward else Work(gflop, out, contenders)


def decode(case: Case, ours: list[Kernel], peers: list[Peer]) -> Work:
    """One query per sequence against a cache in shuffled pages."""
    per_sequence = case.S // PAGE
    n_pages = case.B * per_sequence
    q = _normal(case.B, case.Hq, 1, case.D)
    k_pages, v_pages = (_normal(n_pages, PAGE, case.Hkv, case.D) for _ in range(2))
    page_table = torch.randperm(n_pages, device="cuda").int().view(case.B, per_sequence)
    kv_lens = torch.full((case.B,), case.S, dtype=torch.int32, device="cuda")
    cache = q, k_pages, v_pages, page_table, kv_lens
    k, v = (x[page_table[-1].long(), :, -1].flatten(0, 1) for x in (k_pages, v_pages))
    expected, _ = _exact(q[-1, -1], k, v, q[-1, -1], causal=True)

    def rows(out: Tensor) -> Tensor:
        return out[-1, -1]

    def prepare_ours(name: str) -> Prepared:
        return lambda: lockstep.attention_paged(*cache, causal=True, kernel=name), rows

    def prepare_peer(peer: Peer) -> Prepared:
        assert peer.decode is not None
        return peer.decode(*cache), rows

    contenders: Contenders = {k.name: partial(prepare_ours, k.name) for k in ours}
    contenders |= {p.name: partial(prepare_peer, p) for p in peers if p.decode is not None}
    return Work((k_pages.nbytes + v_pages.nbytes) / 1e6, expected, contenders)


def varlen(case: Case, ours: list[Kernel], peers: list[Peer]) -> Work:
    """Packed sequences of long-tailed lengths, and one dense sequence with as many pairs.

    The latter is what packing could be at best: no padding, and no sequence too short to fill a
    tile.
    """
    lens = long_tailed_lengths(case.B, case.S)
    cu_seqlens = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    q, k, v = (_normal(sum(lens), case.Hq, case.D) for _ in range(3))
    q_last, k_last, v_last = (x[-lens[-1] :, -1] for x in (q, k, v))
    expected, _ = _exact(q_last, k_last, v_last, q_last, causal=True)

    def rows(out: Tensor) -> Tensor:
        return out[-CHECKED:, -1]

    def prepare_ours(name: str) -> Prepared:
        attend = partial(lockstep.attention_varlen, causal=True, kernel=name)
        return lambda: attend(q, k, v, cu_seqlens, cu_seqlens), rows

    def prepare_dense(name: str) -> Prepared:
        S = math.isqrt(sum(n * n for n in lens))
        dense = [_normal(1, case.Hq, S, case.D) for _ in range(3)]
        # Checked in its own table.
        attend = partial(lockstep.attention, causal=True, kernel=name)
        return lambda: attend(*dense), lambda _: expected

    def prepare_peer(peer: Peer) -> Prepared:
        assert peer.varlen is not None
        return partial(peer.varlen, q, k, v, cu_seqlens, lens[-1], True), rows

    contenders: Contenders = {}
    for kernel in ours:
        contenders[kernel.name] = partial(prepare_ours, kernel.name)
        contenders[f"{kernel.name}, one sequence"] = partial(prepare_dense, kernel.name)
    contenders |= {p.name: partial(prepare_peer, p) for p in peers if p.varlen is not None}
    gflop = sum(4 * case.Hq * n * n / 2 * case.D for n in lens) / 1e9
    return Work(gflop, expected, contenders)


def long_tailed_lengths(n: int, longest: int) -> list[int]:
    """Log-uniform lengths from 16 to `longest`, ascending: quantiles, so always the same."""
    steps = ((i + 0.5) / n for i in range(n))
    return [round(16 * (longest / 16) ** step) for step in steps]


TABLES: dict[str, Callable[[Case, list[Kernel], list[Peer]], Work]] = {
    "forward": prefill,
    "backward": prefill,
    "decode": decode,
    "varlen": varlen,
}


def _ours(kernel: Kernel) -> Prefill:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return lockstep.attention(q, k, v, causal=causal, kernel=kernel.name)

    return attention


def _prepare_forward(
    case: Case, attention: Prefill, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Prepared:
    def call() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, case.causal)

    return call, lambda out: out[-1, -1, -CHECKED:]


def _prepare_backward(
    case: Case, attention: Prefill, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Prepared:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], case.causal)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return call, lambda grads: grads[0][-1, -1, -CHECKED:]


def _normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """out and dq in float32 of the last rows of one head: q [S, D] against k and v [Skv, D]."""
    q, k, v, dout = q[-CHECKED:].float().requires_grad_(), k.float(), v.float(), dout[-CHECKED:]
    scores = q @ k.T * q.shape[-1] ** -0.5  # [CHECKED, Skv]
    if causal:
        # The last row is level with the last key.
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    (dq,) = torch.autograd.grad(out, q, dout.float())
    return out.detach(), dq
