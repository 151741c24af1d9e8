"""The tensors of a case, how much work it is, and the pieces of it that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import error_rule
from lockstep.bench import gpu_check
from lockstep.bench.gpu_cases import BACKWARD_FLOPS
from lockstep.bench.models.cases import Case
from lockstep.problem import Tensors, describe

# Query rows of a piece that is checked.
ROWS = 2048
# Pieces of a backward hold all rows: of many, one piece will do.
MANY_ROWS = 4096


@dataclass(frozen=True)
class Inputs:
    """One case on its tensors, bf16.

    tensors: As `lockstep.attention`, `attention_varlen` and `attention_paged` take them. Dense
        tensors lie in memory as [B, S, H, D], as a projection leaves them.
    dout: The gradient of the result.
    """

    case: Case
    tensors: Tensors
    dout: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients a backward computes."""
        t = self.tensors
        return [t.q, t.k, t.v, *([] if t.sinks is None else [t.sinks])]

    def with_leaves(self, leaves: Sequence[Tensor]) -> Inputs:
        """The same case on other tensors in place of `leaves`."""
        q, k, v, *sinks = leaves
        changed = {"sinks": sinks[0]} if sinks else {}
        return Inputs(self.case, self.tensors._replace(q=q, k=k, v=v, **changed), self.dout)


def make(case: Case, device: str = "cuda") -> Inputs:
    """Normally distributed tensors, the same for all contenders."""
    layer = case.shape
    D, Dv = layer.D, layer.value_dim
    sinks = _normal(layer.Hq, device=device) if layer.sinks else None
    if case.packed:
        offsets = torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32, device=device)
    if case.packed and case.page:
        q, dout = (_normal(sum(case.q_lens), layer.Hq, n, device=device) for n in (D, Dv))
        tensors = _with_cache(case, q, device)
        return Inputs(case, tensors._replace(sinks=sinks, cu_seqlens_q=offsets), dout)
    if case.packed:
        T = sum(case.kv_lens)
        q, k = (_normal(T, H, D, device=device) for H in (layer.Hq, layer.Hkv))
        v = _normal(T, layer.Hkv, Dv, device=device)
        tensors = Tensors(q, k, v, sinks=sinks, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        return Inputs(case, tensors, _normal(T, layer.Hq, Dv, device=device))
    q, dout = (_heads_of(case.B, case.Sq, layer.Hq, n, device) for n in (D, Dv))
    if not case.page:
        k, v = (_heads_of(case.B, case.keys, layer.Hkv, n, device) for n in (D, Dv))
        return Inputs(case, Tensors(q, k, v, sinks=sinks), dout)
    return Inputs(case, _with_cache(case, q, device)._replace(sinks=sinks), dout)


def _with_cache(case: Case, q: Tensor, device: str) -> Tensors:
    """Queries, and keys and values in pages."""
    layer = case.shape
    page_table, n_pages = _pages(case, device)
    sizes = (n_pages, case.page, layer.Hkv)
    k, v = (_normal(*sizes, n, device=device) for n in (layer.D, layer.value_dim))
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    return Tensors(q, k, v, kv_lens=kv_lens, page_table=page_table)


def _pages(case: Case, device: str) -> tuple[Tensor, int]:
    """A table with the pages of each sequence in random order, and how many there are."""
    counts = [-(-n // case.page) for n in case.kv_lens]
    order = torch.randperm(sum(counts)).int().split_with_sizes(counts)
    return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device), sum(counts)


def amount(case: Case) -> float:
    """GFLOP that what the mask shows takes, or MB of keys and values read: by a time in ms, it is
    the rate in TFLOP/s or GB/s."""
    layer = case.shape
    if case.kind == "decode":
        seen = sum(_keys_read(case, n) for n in case.kv_lens)
        return seen * layer.Hkv * (layer.D + layer.value_dim) * torch.bfloat16.itemsize / 1e6
    pairs = sum(_pairs(case, *lens) for lens in zip(case.q_lens, case.kv_lens, strict=True))
    gflop = 2 * pairs * layer.Hq * (layer.D + layer.value_dim) / 1e9
    return gflop * (BACKWARD_FLOPS if case.kind == "backward" else 1.0)


def _keys_read(case: Case, length: int) -> int:
    left = case.shape.options.window_left
    return length if left is None else min(length, left + case.Sq)


def _pairs(case: Case, Sq: int, Skv: int) -> int:
    """Pairs of a query and a key that it sees."""
    options = case.shape.options
    diagonal = torch.arange(Sq) + (Skv - Sq)
    right = 0 if options.causal else options.window_right
    last = torch.full((Sq,), Skv - 1) if right is None else (diagonal + right).clamp(max=Skv - 1)
    left = options.window_left
    first = torch.zeros(Sq, dtype=torch.long) if left is None else (diagonal - left).clamp(min=0)
    return int((last - first + 1).clamp(min=0).sum())


class Piece(NamedTuple):
    """Some rows of one head of one sequence; of a backward, all rows of a key head's group."""

    b: int
    heads: slice
    rows: slice
    tensors: Tensors
    dout: Tensor


def pieces(inputs: Inputs) -> list[Piece]:
    """A piece at the beginning of the batch, one in its middle, and one at its end."""
    case = inputs.case
    backward = case.kind == "backward"
    group = case.shape.Hq // case.shape.Hkv if backward else 1
    last = case.B * (case.shape.Hq // group) - 1
    chosen = sorted({0, last // 2, last})
    if backward and case.Sq * group > MANY_ROWS:
        chosen = chosen[-1:]
    places = [divmod(i, case.shape.Hq // group) for i in chosen]
    return [
        _piece(inputs, b, slice(h * group, (h + 1) * group), number, len(places))
        for number, (b, h) in enumerate(places)
    ]


def _piece(inputs: Inputs, b: int, heads: slice, number: int, of: int) -> Piece:
    case, t = inputs.case, inputs.tensors
    key_head = heads.start // (case.shape.Hq // case.shape.Hkv)
    q, dout = (sequence(case, x, b)[heads] for x in (t.q, inputs.dout))
    k, v = (_keys(inputs, x, b)[key_head][None] for x in (t.k, t.v))  # [1, Skv, D]
    rows = _rows(case, q.shape[1], number, of)
    if case.shape.causal:
        # The last row of the piece sees the last key of the piece.
        end = k.shape[1] - (q.shape[1] - rows.stop)
        k, v = k[:, :end], v[:, :end]
    sinks = None if t.sinks is None else t.sinks[heads]
    tensors = Tensors(q[None, :, rows], k[None], v[None], sinks=sinks)
    return Piece(b, heads, rows, tensors, dout[None, :, rows])


def _rows(case: Case, Sq: int, number: int, of: int) -> slice:
    """Rows of a piece: the first block of them, one in the middle, or the last."""
    whole = case.kind == "backward" or (case.shape.window is not None and not case.shape.causal)
    if whole or Sq <= ROWS:
        return slice(0, Sq)
    start = (Sq - ROWS) * number // max(1, of - 1)
    return slice(start, start + ROWS)


def sequence(case: Case, x: Tensor, b: int) -> Tensor:
    """Sequence `b` of queries, results or gradients, [H, S, D]."""
    if not case.packed:
        return x[b]
    start = sum(case.q_lens[:b])
    return x[start : start + case.q_lens[b]].transpose(0, 1)


def _keys(inputs: Inputs, x: Tensor, b: int) -> Tensor:
    table = inputs.tensors.page_table
    if table is None:
        return sequence(inputs.case, x, b)
    n = inputs.case.kv_lens[b]
    used = table[b, : -(-n // inputs.case.page)].long()
    return x[used].flatten(0, 1)[:n].transpose(0, 1)


Rules = list[dict[str, error_rule.Expected]]


def expect(inputs: Inputs, parts: Sequence[Piece]) -> Rules:
    """The bounds of the error rule for each piece: of out, or of the gradients of `leaves`."""
    found = []
    for piece in parts:
        problem = describe(piece.tensors, inputs.case.shape.options)
        backward = inputs.case.kind == "backward"
        rules = error_rule.expect(problem, piece.tensors, piece.dout if backward else None)
        names = ("dq", "dk", "dv", "dsinks") if backward else ("out",)
        # A piece has rows of one sequence, and dsinks is the sum over all sequences.
        missing = {"dsinks"} if inputs.case.B > 1 else set()
        found.append({name: rules[name] for name in names if name in rules.keys() - missing})
    return found


def largest_error(
    inputs: Inputs, parts: Sequence[Piece], rules: Rules, results: Sequence[Tensor]
) -> float:
    """The largest error of all pieces, as a share of what is allowed.

    Raises:
        WrongResult: It is above 1, or a result is NaN.
    """
    found = [
        [
            _pick(inputs.case, piece, what, result)
            for what, result in zip(rule, results[: len(rule)], strict=True)
        ]
        for piece, rule in zip(parts, rules, strict=True)
    ]
    return gpu_check.largest_error(found, rules)


def _pick(case: Case, piece: Piece, what: str, result: Tensor) -> Tensor:
    """The part of a result that a piece covers."""
    if what == "dsinks":
        return result[piece.heads]
    found = sequence(case, result, piece.b)
    if what in ("out", "dq"):
        return found[None, piece.heads, piece.rows]
    key_head = piece.heads.start // (case.shape.Hq // case.shape.Hkv)
    return found[None, key_head : key_head + 1]


def _heads_of(B: int, S: int, H: int, D: int, device: str) -> Tensor:
    return _normal(B, S, H, D, device=device).transpose(1, 2)  # [B, H, S, D]


def _normal(*sizes: int, device: str) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=device)
