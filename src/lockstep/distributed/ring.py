"""Ranks broadcast their keys in blocks, and each keeps its own rows: memory stays that of a shard.

    forward    k, v                    broadcast, block by block    out, lse of own queries
    backward   k, v                    broadcast, block by block    dq of own queries
               q, dout, m, l, delta    broadcast, block by block    dk, dv of own keys

Block t is of the t-th `1 / ranks` of the sequence, on whichever rank it is, and all ranks fold
block t before block t + 1: every sum goes on in the order of one process. (NCCL broadcasts along a
ring.) While a block is being computed, the next one is under way, on a GPU by a stream of its own.
What is carried from block to block is the state of the kernel: the first one runs that can be given
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import dispatch
from lockstep.distributed.call import ShardedCall, join, share_of_heads, spread
from lockstep.distributed.collectives import DENSE, Arriving, Box, start_broadcast, to_boxes
from lockstep.distributed.layout import share
from lockstep.distributed.streams import beside, fork_streams
from lockstep.kernels.carry import Carry
from lockstep.options import Options
from lockstep.problem import AttentionProblem, Tensors, describe

TOKENS = DENSE.tokens


class RingAttention(torch.autograd.Function):
    """(out, lse) of local shards q, k, v."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        ring = Ring(call, q, k, v, sinks)
        states = [
            ring.carry.forward(ring.problem, q[:, :, piece.local], sinks, piece.tokens.start)
            for piece in ring.pieces
        ]
        ring.fold_keys(states, k, v)
        out, lse, statistics = _join_rows([state.close() for state in states], ring.problem, q)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, statistics)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        call: ShardedCall = ctx.call
        q, k, v, sinks, out, statistics = ctx.saved_tensors
        dout = dout.contiguous()
        ring = Ring(call, q, k, v, sinks)
        of_lse = dlse.contiguous() if call.uses_lse else None
        sums = ring.carry.rows(ring.problem, q, out, statistics, dout, of_lse)
        rows = Rows(q, dout, sums)
        _, need_q, need_k, need_v, need_sinks = ctx.needs_input_grad
        dq = dk = dv = dsinks = None
        if need_q:
            dq = _own_queries(ring, rows, k, v)
        if need_k or need_v:
            dk, dv = _own_keys(ring, rows, k, v)
        if need_sinks:
            dsinks = _own_sinks(ring, rows, sinks)
        return None, dq, dk if need_k else None, dv if need_v else None, dsinks


class Rows(NamedTuple):
    """The tensors of a shard's queries that gradients take."""

    q: Tensor
    dout: Tensor
    sums: Tensor  # [B, Hq, S_rank, 3]: `Carry.rows`


class Ring:
    """One call, and the blocks it loops over."""

    def __init__(
        self, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> None:
        self.call, self.pieces = call, call.sharding.pieces(call.rank)
        *options, kernel = call.settings
        local = describe(Tensors(q, k, v, sinks=sinks), Options._make(options))
        length = call.sharding.length
        self.problem: AttentionProblem = replace(local, Sq=length, Skv=length)
        carrying = dispatch.select_carry(local, kernel)
        assert carrying is not None
        assert carrying.carry is not None
        self.carry: Carry = carrying.carry()

    def fold_keys(self, states: list[Any], k: Tensor, v: Tensor) -> None:
        """All keys and values, in ascending order, into each state."""
        D = k.shape[3]
        packed = torch.cat((k, v), dim=3).unsqueeze(2)  # [B, Hkv, 1, S_rank, D + Dv]
        for first, block in blocks(self.call, packed, self.carry.span):
            for state in states:
                state.fold(block[..., :D], block[..., D:], first)


def blocks(call: ShardedCall, x: Tensor, multiple: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of all ranks in ascending order: block by block, with the first row of each.

    x is [B, H, G, S_rank, C]. Row `g · S + i` is token i of head g of a group, S being the length
    of the whole sequence; blocks are [B, H, n, C], where n is about `G · S / ranks` and a multiple
    of `multiple`, but for the last.
    """
    fork_streams(x)
    n_rows = x.shape[2] * call.sharding.length
    step = -(-n_rows // (call.ranks * multiple)) * multiple
    coming = _start(call, x, range(min(step, n_rows))) if n_rows else None
    for first in range(0, n_rows, step):
        now = coming
        after = range(first + step, min(first + 2 * step, n_rows))
        coming = _start(call, x, after) if after else None
        assert now is not None
        yield first, now.wait()


def _start(call: ShardedCall, x: Tensor, rows: range) -> Arriving:
    """Begins to send the part of `rows` that this rank holds, and to receive the rest."""
    with beside(x.device):
        return _start_beside(call, x, rows)


def _start_beside(call: ShardedCall, x: Tensor, rows: range) -> Arriving:
    B, H, _, _, C = x.shape
    block = x.new_empty(B, H, len(rows), C)
    length, rank = call.sharding.length, call.rank
    parts = []
    for g in range(rows.start // length, (rows.stop - 1) // length + 1):
        first, last = max(rows.start, g * length), min(rows.stop, (g + 1) * length)
        tokens = range(first - g * length, last - g * length)
        for other in range(call.ranks):
            for start, at, n in call.sharding.overlaps(other, tokens):
                to = block.narrow(2, first - rows.start + at, n)
                held = x[:, :, g].narrow(2, start, n) if other == rank else None
                parts.append(start_broadcast(to, held, other, call.group))
    return Arriving(block, parts, call.group)


def _join_rows(
    parts: list[tuple[Tensor, ...]], problem: AttentionProblem, q: Tensor
) -> tuple[Tensor, ...]:
    if parts:
        return tuple(join(list(x), TOKENS, x[0]) for x in zip(*parts, strict=True))
    # A rank without tokens.
    none = replace(problem, Sq=0)
    return (
        q.new_empty(none.out_shape),
        q.new_empty(none.lse_shape, dtype=none.lse_dtype),
        q.new_empty(none.statistics_shape, dtype=none.lse_dtype),
    )


def _own_queries(ring: Ring, rows: Rows, k: Tensor, v: Tensor) -> Tensor:
    states = []
    for piece in ring.pieces:
        q, dout, sums = (x[:, :, piece.local] for x in rows)
        states.append(ring.carry.queries(ring.problem, q, sums, dout, piece.tokens.start))
    ring.fold_keys(states, k, v)
    return join([state.close() for state in states], TOKENS, rows.q)


def _own_keys(ring: Ring, rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    D, Hkv = k.shape[3], k.shape[1]
    states = [
        ring.carry.keys(
            ring.problem, k[:, :, piece.local], v[:, :, piece.local], piece.tokens.start
        )
        for piece in ring.pieces
    ]
    products = torch.cat((rows.q, rows.dout), dim=3)
    G = 1 if ring.carry.by_token else rows.q.shape[1] // Hkv
    # A rank may have no tokens, and then -1 would stand for any number.
    by_group = (
        x.contiguous().view(x.shape[0], x.shape[1] // G, G, *x.shape[2:])
        for x in (products, rows.sums)
    )
    streams = (blocks(ring.call, x, ring.carry.multiple) for x in by_group)
    for (first, qd), (_, sums) in zip(*streams, strict=True):
        for state in states:
            state.fold(qd[..., :D], qd[..., D:], sums, first)
    closed = [state.close() for state in states]
    return (
        join([dk for dk, _ in closed], TOKENS, k),
        join([dv for _, dv in closed], TOKENS, v),
    )


def _own_sinks(ring: Ring, rows: Rows, sinks: Tensor) -> Tensor:
    """dsinks of the heads that are this rank's, over all queries: ranks exchange tokens for
    heads."""
    call, Hq, whole = ring.call, rows.q.shape[1], range(ring.call.sharding.length)
    boxes = [Box(share(Hq, call.ranks, rank), whole) for rank in range(call.ranks)]
    some = to_boxes(rows.sums, DENSE, call.sharding, boxes, call.group)  # [B, heads, S, 3]
    heads = share_of_heads(call, Hq)
    if not heads:
        return torch.zeros_like(sinks)
    cut = sinks[heads.start : heads.stop]
    values = ring.carry.sinks(ring.problem, cut, some)
    return spread(values, heads, Hq)
