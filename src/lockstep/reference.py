"""The float64 oracle: attention written down as its definition, for every layout.

It takes what the public calls take (without `kernel`) in any dtype, computes and returns float64,
and is differentiable by autograd. It materialises the scores, so it is for checking, not for use.

    scores = softcap(scale · q kᵀ) + bias        softcap(x) = cap · tanh(x / cap)
    out    = softmax(scores over the keys that a row sees, and its sink) v
    lse    = log Σ exp(scores)                   natural logarithm, the sink included
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.checks import check_types, check_values
from lockstep.forks import derive_fork_safe, fork_safe
from lockstep.problem import (
    AttentionProblem,
    Layout,
    Tensors,
    Window,
    describe,
    make_options,
    pad_bias,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lockstep.attention` in float64; same arguments, same errors."""
    tensors = Tensors(q, k, v, bias, sinks, kv_lens, kv_starts=kv_starts, alibi_slopes=alibi_slopes)
    return _run("dense", tensors, causal, window, scale, softcap, return_lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lockstep.attention_varlen` in float64; same arguments, same errors."""
    tensors = Tensors(
        *(q, k, v, None, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k, page_table),
        *(kv_starts, alibi_slopes),
    )
    layout: Layout = "varlen" if page_table is None else "varlen_paged"
    return _run(layout, tensors, causal, window, scale, softcap, return_lse, max_seqlen_q)


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lockstep.attention_paged` in float64; same arguments, same errors."""
    tensors = Tensors(
        *(q, k_pages, v_pages, bias, sinks, kv_lens, None, None, page_table),
        *(kv_starts, alibi_slopes),
    )
    return _run("paged", tensors, causal, window, scale, softcap, return_lse)


@fork_safe
def _run(
    layout: Layout,
    tensors: Tensors,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    max_seqlen_q: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    check_types(tensors, layout)
    tensors = tensors._replace(bias=pad_bias(tensors.bias))
    options = make_options(
        causal, window, scale, softcap, return_lse=return_lse, max_seqlen_q=max_seqlen_q
    )
    problem = describe(tensors, options)
    # A backward pass begins at the results, one through its gradients at those of the inputs.
    views = {
        name: derive_fork_safe(tensor.view_as(tensor))
        for name, tensor in tensors._asdict().items()
        if tensor is not None and tensor.requires_grad
    }
    results = evaluate(problem, tensors._replace(**views), max_seqlen_q=max_seqlen_q)
    out, lse = map(derive_fork_safe, results)
    return (out, lse) if return_lse else out


Attend = Callable[..., tuple[Tensor, Tensor]]


def evaluate(
    problem: AttentionProblem,
    tensors: Tensors,
    *,
    dtype: torch.dtype = torch.float64,
    attend: Attend | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` in `dtype`, differentiable in every floating-point tensor.

    `attend` takes what `_attend` takes, dense tensors of one sequence or several, and stands for
    it where the definition is to be evaluated in another way.

    Raises ValueError for lengths, offsets and page indices that are wrong, and for a sequence of
    more than `max_seqlen_q` queries, on any device.
    """
    check_values(problem, tensors, max_seqlen_q)
    cast = tensors._replace(
        **{
            name: tensor.to(dtype)
            for name, tensor in tensors._asdict().items()
            if tensor is not None and tensor.is_floating_point()
        }
    )
    if cast.sinks is not None:
        # A sink of -inf is none: its gradient is 0, whatever a row holds. 0 · NaN would be NaN.
        cast = cast._replace(sinks=torch.where(cast.sinks == -math.inf, -math.inf, cast.sinks))
    attend = attend or _attend
    if problem.layout == "dense":
        return _dense(problem, cast, attend)
    return _by_sequence(problem, cast, attend)


def _dense(problem: AttentionProblem, t: Tensors, attend: Attend) -> tuple[Tensor, Tensor]:
    lens = t.kv_lens
    if lens is None:
        lens = torch.full((problem.B,), problem.Skv, device=t.q.device)
    bias = t.bias
    if t.alibi_slopes is not None:
        bias = alibi(t.alibi_slopes, lens, problem.Sq, problem.Skv)
    return attend(problem, t.q, t.k, t.v, bias, t.sinks, lens, t.kv_starts)


def _by_sequence(problem: AttentionProblem, t: Tensors, attend: Attend) -> tuple[Tensor, Tensor]:
    outs = [t.q.new_zeros(0, *problem.out_shape[1:])]
    lses = [t.q.new_zeros(0, *problem.lse_shape[1:])]
    for b in range(problem.B):
        k, v = _keys_of(problem, t, b)
        q, bias = t.q[b : b + 1], t.bias
        if t.cu_seqlens_q is not None:
            q = _by_head(t.q, t.cu_seqlens_q, b)
        if bias is not None:
            bias = bias[b : b + 1] if bias.shape[0] != 1 else bias
            start = 0 if t.kv_starts is None else int(t.kv_starts[b])
            bias = bias[..., start : start + k.shape[2]] if bias.shape[3] != 1 else bias
        lens = torch.tensor([k.shape[2]], device=k.device)
        if t.alibi_slopes is not None:
            slopes = t.alibi_slopes
            own = slopes[b : b + 1] if slopes.dim() == 2 else slopes
            bias = alibi(own, lens, q.shape[2], k.shape[2])
        out, lse = attend(problem, q, k, v, bias, t.sinks, lens, None)
        if problem.is_packed:
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _keys_of(problem: AttentionProblem, t: Tensors, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence: [1, Hkv, n, D] and [1, Hkv, n, Dv]."""
    if t.cu_seqlens_k is not None:
        return _by_head(t.k, t.cu_seqlens_k, b), _by_head(t.v, t.cu_seqlens_k, b)
    assert t.page_table is not None
    assert t.kv_lens is not None
    assert problem.page_size is not None
    page, end = problem.page_size, int(t.kv_lens[b])
    start = 0 if t.kv_starts is None else int(t.kv_starts[b])
    pages = t.page_table[b, start // page : -(-end // page)].long()
    inside = slice(start % page, start % page + end - start)
    # [pages, page, Hkv, D] -> [1, Hkv, end - start, D]
    k, v = (x[pages].flatten(0, 1)[inside].transpose(0, 1).unsqueeze(0) for x in (t.k, t.v))
    return k, v


def _by_head(x: Tensor, offsets: Tensor, b: int) -> Tensor:
    """One sequence of packed tokens [T, H, D] as [1, H, n, D]."""
    start, end = offsets[b : b + 2].tolist()
    return x[start:end].transpose(0, 1).unsqueeze(0)


def _attend(
    problem: AttentionProblem,
    q: Tensor,  # [B, Hq, Sq, D]
    k: Tensor,  # [B, Hkv, Skv, D]
    v: Tensor,  # [B, Hkv, Skv, Dv]
    bias: Tensor | None,  # broadcastable to [B, Hq, Sq, Skv]
    sinks: Tensor | None,  # [Hq]
    lens: Tensor,  # [B]
    starts: Tensor | None,  # [B]
) -> tuple[Tensor, Tensor]:
    group = problem.Hq // problem.Hkv
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    seen = visible(problem, lens, q.shape[2], k.shape[2], starts)  # [B, 1, Sq, Skv]
    if bias is not None:
        seen = seen & (bias != -math.inf)
    all_seen = bool(seen.all())
    seen = seen.expand(*q.shape[:3], k.shape[2])  # [B, Hq, Sq, Skv]

    scores = _dot(q, k, seen, all_seen) * problem.scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if bias is not None:
        scores = scores + torch.where(seen, bias, 0.0)
    # A score of -inf hides its key as the mask does.
    shown = scores != -math.inf
    if not bool(shown.all()):
        seen, all_seen = seen & shown, False
    if not all_seen:
        scores = torch.where(seen, scores, -math.inf)

    logits = scores
    if sinks is not None:
        sink = sinks[:, None, None].expand(*q.shape[:3], 1)
        logits = torch.cat([scores, sink], dim=-1)  # [B, Hq, Sq, Skv + 1]
    m = _row_max(logits)  # [B, Hq, Sq, 1]
    p = torch.exp(scores - m)
    l = (p if sinks is None else torch.exp(logits - m)).sum(-1, keepdim=True)
    empty = l == 0
    l = torch.where(empty, 1.0, l)
    out = _times_values(p / l, v, seen, all_seen)
    lse = torch.where(empty, -math.inf, m + torch.log(l)).squeeze(-1)
    return out, lse


def alibi(slopes: Tensor, lens: Tensor, Sq: int, Skv: int) -> Tensor:
    """The term that slopes [Hq] or [B, Hq] add to scores: minus the slope times the distance of a
    key from the row's diagonal position. [B or 1, Hq, Sq, Skv]"""
    q_idx = torch.arange(Sq, device=lens.device)[:, None]
    diagonal = q_idx + lens.to(torch.int64)[:, None, None, None] - Sq  # [B, 1, Sq, 1]
    distance = (diagonal - torch.arange(Skv, device=lens.device)).abs()
    return -slopes[..., None, None] * distance


def visible(
    problem: AttentionProblem, lens: Tensor, Sq: int, Skv: int, starts: Tensor | None = None
) -> Tensor:
    """Which keys each row sees, bias aside: bool [B, 1, Sq, Skv]."""
    lens = lens.to(torch.int64)[:, None, None, None]
    q_idx = torch.arange(Sq, device=lens.device)[:, None]
    kv_idx = torch.arange(Skv, device=lens.device)
    diagonal = q_idx + lens - Sq  # [B, 1, Sq, 1]
    left, right = problem.window
    seen = (kv_idx < lens).expand(-1, -1, Sq, -1)
    if starts is not None:
        seen = seen & (kv_idx >= starts[:, None, None, None])
    if left is not None:
        seen = seen & (diagonal - kv_idx <= left)
    if right is not None:
        seen = seen & (kv_idx - diagonal <= right)
    return seen


def _row_max(logits: Tensor) -> Tensor:
    """The largest logit of each row, 0 where there is none. The results do not depend on it."""
    if logits.shape[-1] == 0:
        return logits.new_zeros(*logits.shape[:-1], 1)
    m = logits.detach().amax(-1, keepdim=True)
    return torch.where(m == -math.inf, 0.0, m)


# 0 · NaN is NaN, in a product and in its gradient. So whatever a row does not see must be replaced
# before it is multiplied. A row or key that takes part nowhere is set to 0 once and for all; if
# something that is seen by some rows and hidden from others is not finite, the sum is taken pair
# by pair.


def _dot(q: Tensor, k: Tensor, seen: Tensor, all_seen: bool) -> Tensor:
    """q kᵀ [B, Hq, Sq, Skv] over the pairs in `seen`, 0 elsewhere."""
    if not all_seen:
        q = torch.where(seen.any(-1)[..., None], q, 0.0)
        k = torch.where(seen.any(-2)[..., None], k, 0.0)
    if bool(q.isfinite().all() and k.isfinite().all()):
        return q @ k.mT if all_seen else torch.where(seen, q @ k.mT, 0.0)
    pair = seen[..., None]  # [B, Hq, Sq, Skv, 1]
    return (
        torch.where(pair, q[..., :, None, :], 0.0) * torch.where(pair, k[..., None, :, :], 0.0)
    ).sum(-1)


def _times_values(p: Tensor, v: Tensor, seen: Tensor, all_seen: bool) -> Tensor:
    """p v [B, Hq, Sq, Dv] over the pairs in `seen`."""
    if not all_seen:
        v = torch.where(seen.any(-2)[..., None], v, 0.0)
    # No weight is negative: a sum is finite where all of its weights are.
    if bool(p.detach().sum(-1).isfinite().all() and v.isfinite().all()):
        return p @ v
    pair = seen[..., None]  # [B, Hq, Sq, Skv, 1]
    return (torch.where(pair, p[..., None], 0.0) * torch.where(pair, v[..., None, :, :], 0.0)).sum(
        -2
    )
