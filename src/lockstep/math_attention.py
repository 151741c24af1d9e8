"""PyTorch's math attention, for every layout and option: the yardstick of the error rule.

`scaled_dot_product_attention` under `SDPBackend.MATH` writes attention out in PyTorch's operators:
16-bit inputs become float32, queries and keys are multiplied by the root of the scale, scores and
weights are materialised, and the result is rounded once. This is the same, operator by operator,
with the options that PyTorch's lacks. A test holds the two together, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep import reference
from lockstep.numerics import statistics_dtype
from lockstep.problem import AttentionProblem, Tensors


def evaluate(problem: AttentionProblem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """`out` in the dtype of q and `lse`, differentiable in every floating-point tensor."""
    dtype = statistics_dtype(problem.dtype)
    out, lse = reference.evaluate(problem, tensors, dtype=dtype, attend=_attend)
    return out.to(problem.dtype), lse


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
    group, Skv = problem.Hq // problem.Hkv, k.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    root = math.sqrt(abs(problem.scale))
    scores = (q * math.copysign(root, problem.scale)) @ (k * root).mT  # [B, Hq, Sq, Skv]
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if bias is not None:
        scores = scores + bias
    seen = reference.visible(problem, lens, q.shape[2], Skv, starts)  # [B, 1, Sq, Skv]
    logits = scores if bool(seen.all()) else scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks[:, None, None].expand(*q.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)  # [B, Hq, Sq, Skv + 1]
    # A row of nothing but -inf would have a softmax of NaN.
    empty = (logits == -math.inf).all(-1, keepdim=True)
    some_empty = bool(empty.any())
    if some_empty:
        logits = logits.masked_fill(empty, 0.0)
    p = torch.softmax(logits, -1)[..., :Skv]
    lse = torch.logsumexp(logits, -1)
    if some_empty:
        p = p.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
    return p @ v, lse
