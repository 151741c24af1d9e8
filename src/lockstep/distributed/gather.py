"""Every rank gathers all keys and values, and computes the rows of its own queries.

    forward    k, v    all-gather    out, lse of own queries
    backward   k, v    all-gather    dq of own queries, while these are under way:
               q, dout, out, m, l    all-gather    dk, dv of own keys

Nothing is reduced across ranks: dk and dv of a key are summed by the rank that holds the key, over
all queries in the order of one process. Memory for keys and values, and in the backward for
queries, is that of the whole sequence; in between, only shards are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.call import ShardedCall, join, share_of_heads, spread
from lockstep.distributed.collectives import DENSE, gather_sequence
from lockstep.distributed.local import (
    RowGradients,
    Rows,
    attend,
    gradient_of_queries,
    gradient_of_sinks,
    gradients_of_keys,
)
from lockstep.distributed.streams import beside, fork_streams, join_streams

TOKENS = DENSE.tokens


class GatherAttention(torch.autograd.Function):
    """(out, lse) of local shards q, k, v."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        whole_k, whole_v = _gather(call, k), _gather(call, v)
        parts = [
            attend(q[:, :, piece.local], whole_k, whole_v, sinks, piece.tokens, call.settings)
            for piece in call.sharding.pieces(call.rank)
        ]
        rows = _join_rows(parts, q, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, *rows)
        return rows.out, rows.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        call: ShardedCall = ctx.call
        q, k, v, sinks, *saved = ctx.saved_tensors
        rows, grads = Rows(*saved), RowGradients(dout, dlse if call.uses_lse else None)
        _, need_q, need_k, need_v, need_sinks = ctx.needs_input_grad
        need_keys = need_k or need_v
        dq = dk = dv = dsinks = None
        if need_q or need_keys:
            whole_k, whole_v = _gather(call, k), _gather(call, v)
        if need_keys or need_sinks:
            # Under way while dq is computed.
            fork_streams(*(x for x in (q, *rows, *grads) if x is not None))
            with beside(q.device):
                all_q, all_rows, all_grads = _gather_rows(call, q, rows, grads)
        if need_q:
            dq = _own_queries(call, grads, rows, q, whole_k, whole_v, sinks)
        if need_keys or need_sinks:
            join_streams(*(x for x in (all_q, *all_rows, *all_grads) if x is not None))
        if need_keys:
            dk, dv = _own_keys(call, all_grads, all_rows, all_q, whole_k, whole_v, sinks)
        if need_sinks:
            dsinks = _own_sinks(call, all_grads, all_rows, all_q, sinks)
        return None, dq, dk if need_k else None, dv if need_v else None, dsinks


def _gather(call: ShardedCall, x: Tensor) -> Tensor:
    return gather_sequence(x, TOKENS, call.sharding, call.group)


def _gather_rows(
    call: ShardedCall, q: Tensor, rows: Rows, grads: RowGradients
) -> tuple[Tensor, Rows, RowGradients]:
    """Queries, and what a backward takes of their rows; the lse itself is not among it."""
    statistics = _gather(call, rows.statistics)
    whole = Rows(_gather(call, rows.out), statistics[..., 0], statistics)
    dlse = None if grads.dlse is None else _gather(call, grads.dlse)
    return _gather(call, q), whole, RowGradients(_gather(call, grads.dout), dlse)


def _join_rows(parts: list[Rows], q: Tensor, v: Tensor) -> Rows:
    if parts:
        return Rows(*(join(list(x), TOKENS, x[0]) for x in zip(*parts, strict=True)))
    # A rank without tokens has rows, too: none.
    shape = (*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return Rows(q.new_empty(shape), lse, lse.new_empty((*lse.shape, 2)))


def _own_queries(
    call: ShardedCall,
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    parts = []
    for tokens, start in call.sharding.pieces(call.rank):
        cut = slice(start, start + len(tokens))
        dlse = None if grads.dlse is None else grads.dlse[:, :, cut]
        piece_grads = RowGradients(grads.dout[:, :, cut], dlse)
        piece_rows = Rows(*(x[:, :, cut] for x in rows))
        parts.append(
            gradient_of_queries(
                piece_grads, piece_rows, q[:, :, cut], k, v, sinks, tokens, call.settings
            )
        )
    return join(parts, TOKENS, q)


def _own_keys(
    call: ShardedCall,
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    parts = [
        gradients_of_keys(grads, rows, q, k, v, sinks, piece.tokens, call.settings)
        for piece in call.sharding.pieces(call.rank)
    ]
    dks, dvs = [part.dk for part in parts], [part.dv for part in parts]
    return join(dks, TOKENS, k), join(dvs, TOKENS, v)


def _own_sinks(
    call: ShardedCall, grads: RowGradients, rows: Rows, q: Tensor, sinks: Tensor
) -> Tensor:
    """dsinks of the heads that are this rank's, summed over all queries."""
    heads = share_of_heads(call, q.shape[1])
    if not heads:
        return torch.zeros_like(sinks)
    cut = slice(heads.start, heads.stop)
    dlse = None if grads.dlse is None else grads.dlse[:, cut]
    some_grads = RowGradients(grads.dout[:, cut], dlse)
    some_rows = Rows(*(x[:, cut] for x in rows))
    values = gradient_of_sinks(some_grads, some_rows, q[:, cut], sinks[cut], call.settings)
    return spread(values, heads, q.shape[1])
