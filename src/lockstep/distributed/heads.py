"""Ranks trade tokens for heads: each computes whole sequences of some heads (Ulysses).

    forward    q, k, v -> heads    out, lse -> tokens      all-to-all
    backward   dout    -> heads    dq, dk, dv -> tokens    all-to-all

Each head is computed as one process computes it, so its bits are the same for free. Key heads go to
ranks together with the query heads that read them. Where there are fewer key heads than ranks,
several ranks share one: each has some of its query heads in the forward and for dq. dk and dv of a
key are sums over all of these heads, so there each takes a range of keys instead, and all heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.call import ShardedCall, spread
from lockstep.distributed.collectives import DENSE, Box, from_boxes, to_boxes
from lockstep.distributed.layout import share
from lockstep.distributed.local import (
    RowGradients,
    Rows,
    attend,
    gradient_of_queries,
    gradient_of_sinks,
    gradients_of,
    gradients_of_keys,
)
from lockstep.kernels.kernel import Gradients, Needs


class Part(NamedTuple):
    """The part of one rank."""

    q_heads: range  # rows of these
    kv_heads: range  # what they read
    group: range  # all query heads that read these
    keys: range  # dk and dv of these keys


def refusal(Hq: int, Hkv: int, ranks: int) -> str | None:
    """Why the heads cannot be divided, or None."""
    if Hq < ranks:
        return f"has no head for some ranks: {Hq} query heads on {ranks} ranks"
    teams = _teams(Hkv, ranks)
    if Hkv < ranks and Hq // Hkv < max(map(len, teams)):
        return (
            f"has no head for some ranks: {max(map(len, teams))} ranks would share the "
            f"{Hq // Hkv} query heads of a key head"
        )
    return None


def divide(Hq: int, Hkv: int, ranks: int, length: int) -> list[Part]:
    """The part of each rank."""
    G, whole = Hq // Hkv, range(length)
    if Hkv >= ranks:
        shares = [share(Hkv, ranks, rank) for rank in range(ranks)]
        groups = [range(G * kv.start, G * kv.stop) for kv in shares]
        return [Part(heads, kv, heads, whole) for kv, heads in zip(shares, groups, strict=True)]
    parts = []
    for head, team in enumerate(_teams(Hkv, ranks)):
        group = range(G * head, G * (head + 1))
        for place in range(len(team)):
            mine, keys = share(G, len(team), place), share(length, len(team), place)
            q_heads = range(group.start + mine.start, group.start + mine.stop)
            parts.append(Part(q_heads, range(head, head + 1), group, keys))
    return parts


def _teams(Hkv: int, ranks: int) -> list[range]:
    """The ranks that share each key head, where there are fewer heads than ranks."""
    return [share(ranks, Hkv, head) for head in range(Hkv)]


class HeadsAttention(torch.autograd.Function):
    """(out, lse) of local shards q, k, v."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        work = Exchange(call, q.shape[1], k.shape[1])
        some_q, some_k, some_v = work.queries(q), work.keys(k), work.keys(v)
        some_sinks = None if sinks is None else _cut(sinks, work.mine.q_heads)
        whole = range(call.sharding.length)
        rows = attend(some_q, some_k, some_v, some_sinks, whole, call.settings)
        out = work.rows_back(rows.out)
        lse = work.rows_back(rows.lse) if call.uses_lse else q.new_empty(0)
        ctx.work, ctx.sinks = work, sinks
        if work.shares_keys:
            # The backward needs the rows of all heads of a group, from the ranks that hold them.
            statistics = work.rows_back(rows.statistics)
            ctx.save_for_backward(q, some_k, some_v, out, statistics)
        else:
            ctx.save_for_backward(some_q, some_k, some_v, rows.out, rows.statistics)
        if not call.uses_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        work: Exchange = ctx.work
        q, k, v, out, statistics = ctx.saved_tensors
        if work.shares_keys:
            q, out, statistics = work.group(q), work.group(out), work.group(statistics)
        grads = RowGradients(work.group(dout), work.group(dlse) if work.call.uses_lse else None)
        rows = Rows(out, statistics[..., 0], statistics)
        _, need_q, need_k, need_v, need_sinks = ctx.needs_input_grad
        needs = Needs(q=need_q, k=need_k, v=need_v, bias=False, sinks=need_sinks)
        derive_part = _gradients_of_shared if work.shares_keys else _gradients_of_whole
        dq, dk, dv, _, dsinks = derive_part(work, grads, rows, q, k, v, ctx.sinks, needs)
        return (
            None,
            None if dq is None else work.rows_back(dq),
            None if dk is None else work.keys_back(dk),
            None if dv is None else work.keys_back(dv),
            None if dsinks is None else spread(dsinks, work.mine.q_heads, work.Hq),
        )


class Exchange:
    """Exchanges between shards of tokens, with all heads, and the boxes of `divide`."""

    def __init__(self, call: ShardedCall, Hq: int, Hkv: int) -> None:
        self.call, self.Hq, self.Hkv = call, Hq, Hkv
        whole = range(call.sharding.length)
        parts = divide(Hq, Hkv, call.ranks, len(whole))
        self.mine = parts[call.rank]
        self.shares_keys = Hkv < call.ranks
        self._queries = [Box(part.q_heads, whole) for part in parts]
        self._keys = [Box(part.kv_heads, whole) for part in parts]
        self._groups = [Box(part.group, whole) for part in parts]
        self._key_shares = [Box(part.kv_heads, part.keys) for part in parts]

    def queries(self, x: Tensor) -> Tensor:
        return self._to(x, self._queries)

    def keys(self, x: Tensor) -> Tensor:
        return self._to(x, self._keys)

    def group(self, x: Tensor) -> Tensor:
        return self._to(x, self._groups)

    def rows_back(self, x: Tensor) -> Tensor:
        return self._from(x, self._queries, self.Hq)

    def keys_back(self, x: Tensor) -> Tensor:
        return self._from(x, self._key_shares, self.Hkv)

    def own(self, x: Tensor) -> Tensor:
        """The rows of this rank out of those of the group."""
        first = self.mine.group.start
        heads = self.mine.q_heads
        return x[:, heads.start - first : heads.stop - first]

    def _to(self, x: Tensor, boxes: list[Box]) -> Tensor:
        return to_boxes(x, DENSE, self.call.sharding, boxes, self.call.group)

    def _from(self, x: Tensor, boxes: list[Box], heads: int) -> Tensor:
        return from_boxes(x, DENSE, self.call.sharding, boxes, heads, self.call.group)


def _own(work: Exchange, grads: RowGradients, rows: Rows) -> tuple[RowGradients, Rows]:
    dlse = None if grads.dlse is None else work.own(grads.dlse)
    return RowGradients(work.own(grads.dout), dlse), Rows(*map(work.own, rows))


def _gradients_of_whole(
    work: Exchange,
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    needs: Needs,
) -> Gradients:
    """Heads that no other rank has a part in: as one process does it."""
    some_sinks = None if sinks is None else _cut(sinks, work.mine.q_heads)
    return gradients_of(grads, rows, q, k, v, some_sinks, work.call.settings, needs)


def _gradients_of_shared(
    work: Exchange,
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    needs: Needs,
) -> Gradients:
    """dq of own heads; dk and dv of own keys, from all heads of the group."""
    settings, whole = work.call.settings, range(work.call.sharding.length)
    group_sinks = None if sinks is None else _cut(sinks, work.mine.group)
    own_sinks = None if sinks is None else _cut(sinks, work.mine.q_heads)
    own_grads, own_rows = _own(work, grads, rows)
    own_q = work.own(q)
    dq = dk = dv = dsinks = None
    if needs.q:
        dq = gradient_of_queries(own_grads, own_rows, own_q, k, v, own_sinks, whole, settings)
    if needs.k or needs.v:
        dk, dv = gradients_of_keys(grads, rows, q, k, v, group_sinks, work.mine.keys, settings)
    if needs.sinks:
        assert own_sinks is not None
        dsinks = gradient_of_sinks(own_grads, own_rows, own_q, own_sinks, settings)
    return Gradients(dq, dk if needs.k else None, dv if needs.v else None, None, dsinks)


def _cut(sinks: Tensor, heads: range) -> Tensor:
    return sinks[heads.start : heads.stop]
