"""Packed sequences, `[T, H, D]` with `cu_seqlens`, whose tokens are sharded across ranks.

`heads` trades tokens for heads and runs packed attention as one process does. `gather` gathers as
it does for dense tensors; the sequences of a shard, which may begin or end on other ranks, then run
one by one, each as a dense call with a batch of one. Packed or dense, a sequence has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.call import ShardedCall, share_of_heads, spread
from lockstep.distributed.collectives import PACKED, Box, from_boxes, gather_sequence, to_boxes
from lockstep.distributed.heads import divide
from lockstep.distributed.local import (
    RowGradients,
    Rows,
    attend,
    gradient_of_queries,
    gradients_of_keys,
)
from lockstep.kernels.kernel import Needs

TOKENS = PACKED.tokens


class Segment(NamedTuple):
    """The tokens of one sequence that a run of tokens has: in the run, and in the sequence."""

    run: slice
    sequence: slice  # of the packed tokens
    at: range  # positions in the sequence


def segments(cu_seqlens: list[int], tokens: range) -> Iterator[Segment]:
    """The sequences that a run of tokens has a part of, ascending."""
    for start, end in pairwise(cu_seqlens):
        first, last = max(start, tokens.start), min(end, tokens.stop)
        if first < last:
            run = slice(first - tokens.start, last - tokens.start)
            yield Segment(run, slice(start, end), range(first - start, last - start))


def as_dense(x: Tensor) -> Tensor:
    """[T, H, ...] as [1, H, T, ...]: a view."""
    return x.transpose(0, 1).unsqueeze(0)


def as_packed(x: Tensor) -> Tensor:
    """[1, H, T, ...] as [T, H, ...]: a view."""
    return x.squeeze(0).transpose(0, 1)


class PackedGather(torch.autograd.Function):
    """(out, lse) of local shards q, k, v."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ShardedCall,
        cu_seqlens: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        whole_k, whole_v = _gather(call, k), _gather(call, v)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        rows = Rows(q.new_empty(*q.shape[:2], v.shape[2]), lse, lse.new_empty(*lse.shape, 2))
        for piece, segment in _own_segments(call, cu_seqlens):
            some_q = as_dense(q[piece][segment.run])
            some_k, some_v = (as_dense(x[segment.sequence]) for x in (whole_k, whole_v))
            found = attend(some_q, some_k, some_v, sinks, segment.at, call.settings)
            for x, part in zip(rows, found, strict=True):
                x[piece][segment.run] = as_packed(part)
        ctx.call, ctx.cu_seqlens = call, cu_seqlens
        ctx.save_for_backward(q, k, v, sinks, *rows)
        return rows.out, rows.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        call: ShardedCall = ctx.call
        q, k, v, sinks, *saved = ctx.saved_tensors
        rows = (*saved, dout, *([dlse] if call.uses_lse else []))
        _, _, need_q, need_k, need_v, need_sinks = ctx.needs_input_grad
        keys = (_gather(call, k), _gather(call, v))
        dq = _own_queries(call, ctx.cu_seqlens, q, rows, keys, sinks) if need_q else None
        dk = dv = dsinks = None
        if need_k or need_v or need_sinks:
            all_q, all_rows = _gather(call, q), tuple(_gather(call, x) for x in rows)
        if need_k or need_v:
            dk, dv = _own_keys(call, ctx.cu_seqlens, all_q, all_rows, keys, sinks)
        if need_sinks:
            dsinks = _own_sinks(call, ctx.cu_seqlens, all_q, all_rows, sinks)
        return None, None, dq, dk if need_k else None, dv if need_v else None, dsinks


def _gather(call: ShardedCall, x: Tensor) -> Tensor:
    return gather_sequence(x, TOKENS, call.sharding, call.group)


def _own_segments(call: ShardedCall, cu_seqlens: Tensor) -> Iterator[tuple[slice, Segment]]:
    """The sequences of this rank, with the piece of its shard that each is in."""
    offsets = cu_seqlens.tolist()
    for piece in call.sharding.pieces(call.rank):
        for segment in segments(offsets, piece.tokens):
            yield piece.local, segment


def _dense_rows(rows: tuple[Tensor, ...]) -> tuple[RowGradients, Rows]:
    out, lse, statistics, dout, *dlse = map(as_dense, rows)
    return RowGradients(dout, dlse[0] if dlse else None), Rows(out, lse, statistics)


def _own_queries(
    call: ShardedCall,
    cu_seqlens: Tensor,
    q: Tensor,
    rows: tuple[Tensor, ...],
    keys: tuple[Tensor, Tensor],
    sinks: Tensor | None,
) -> Tensor:
    dq = torch.zeros_like(q)
    for piece, (run, sequence, at) in _own_segments(call, cu_seqlens):
        grads, some = _dense_rows(tuple(x[piece][run] for x in rows))
        k, v = (as_dense(x[sequence]) for x in keys)
        some_q = as_dense(q[piece][run])
        part = gradient_of_queries(grads, some, some_q, k, v, sinks, at, call.settings)
        dq[piece][run] = as_packed(part)
    return dq


def _own_keys(
    call: ShardedCall,
    cu_seqlens: Tensor,
    q: Tensor,
    rows: tuple[Tensor, ...],
    keys: tuple[Tensor, Tensor],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    pieces = call.sharding.pieces(call.rank)
    n = call.sharding.size(call.rank)
    dk, dv = (x.new_zeros(n, *x.shape[1:]) for x in keys)
    offsets = cu_seqlens.tolist()
    for piece in pieces:
        for run, sequence, at in segments(offsets, piece.tokens):
            grads, some = _dense_rows(tuple(x[sequence] for x in rows))
            k, v = (as_dense(x[sequence]) for x in keys)
            found = gradients_of_keys(
                grads, some, as_dense(q[sequence]), k, v, sinks, at, call.settings
            )
            dk[piece.local][run], dv[piece.local][run] = map(as_packed, found)
    return dk, dv


def _own_sinks(
    call: ShardedCall, cu_seqlens: Tensor, q: Tensor, rows: tuple[Tensor, ...], sinks: Tensor
) -> Tensor:
    """dsinks of the heads that are this rank's, summed over all sequences by a packed call without
    keys."""
    heads = share_of_heads(call, q.shape[1])
    if not heads:
        return torch.zeros_like(sinks)
    cut = slice(heads.start, heads.stop)
    out, _, statistics, dout, *dlse = (x[:, cut] for x in rows)
    needs = Needs(q=False, k=False, v=False, bias=False, sinks=True)
    none = (q[:0, :1], out[:0, :1])
    (values,) = torch.ops.lockstep.attention_varlen_backward(
        *(dout, dlse[0] if dlse else None, out, statistics),
        *(q[:, cut], *none, sinks[cut], cu_seqlens, torch.zeros_like(cu_seqlens), None),
        *(*call.settings, list(needs)),
    )
    return spread(values, heads, q.shape[1])


class PackedHeads(torch.autograd.Function):
    """(out, lse) of local shards q, k, v."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ShardedCall,
        cu_seqlens: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        work = _Exchange(call, q.shape[1], k.shape[1])
        boxes = (work.to(q, work.queries), work.to(k, work.keys), work.to(v, work.keys))
        some_sinks = None if sinks is None else sinks[work.heads]
        inputs = (*boxes, some_sinks, cu_seqlens, cu_seqlens, None)
        out, lse, statistics = torch.ops.lockstep.attention_varlen(*inputs, *call.settings)
        ctx.work = work
        ctx.save_for_backward(*inputs[:4], cu_seqlens, out, statistics)
        return work.back(out, work.queries, work.Hq), work.back(lse, work.queries, work.Hq)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        work: _Exchange = ctx.work
        *inputs, cu_seqlens, out, statistics = ctx.saved_tensors
        some_dout = work.to(dout, work.queries)
        some_dlse = work.to(dlse, work.queries) if work.call.uses_lse else None
        _, _, need_q, need_k, need_v, need_sinks = ctx.needs_input_grad
        needs = Needs(q=need_q, k=need_k, v=need_v, bias=False, sinks=need_sinks)
        found = iter(
            torch.ops.lockstep.attention_varlen_backward(
                *(some_dout, some_dlse, out, statistics, *inputs, cu_seqlens, cu_seqlens),
                *(None, *work.call.settings, list(needs)),
            )
        )
        dq = work.back(next(found), work.queries, work.Hq) if need_q else None
        dk = work.back(next(found), work.keys, work.Hkv) if need_k else None
        dv = work.back(next(found), work.keys, work.Hkv) if need_v else None
        heads = range(*work.heads.indices(work.Hq))
        dsinks = spread(next(found), heads, work.Hq) if need_sinks else None
        return None, None, dq, dk, dv, dsinks


class _Exchange:
    """Exchanges between shards of tokens, with all heads, and whole sequences of some heads."""

    def __init__(self, call: ShardedCall, Hq: int, Hkv: int) -> None:
        self.call, self.Hq, self.Hkv = call, Hq, Hkv
        whole = range(call.sharding.length)
        parts = divide(Hq, Hkv, call.ranks, len(whole))
        self.queries = [Box(part.q_heads, whole) for part in parts]
        self.keys = [Box(part.kv_heads, whole) for part in parts]
        mine = parts[call.rank].q_heads
        self.heads = slice(mine.start, mine.stop)

    def to(self, x: Tensor, boxes: list[Box]) -> Tensor:
        return to_boxes(x, PACKED, self.call.sharding, boxes, self.call.group)

    def back(self, x: Tensor, boxes: list[Box], heads: int) -> Tensor:
        return from_boxes(x, PACKED, self.call.sharding, boxes, heads, self.call.group)
