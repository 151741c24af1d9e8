"""A kernel in plain torch, as small as one can be: its folder is all that it takes.

    out = softmax(scale · q kᵀ) v        lse = log Σ exp(scores)

It takes dense float32 on a CPU, and no option but a scale and a causal mask.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from lockstep.kernels.kernel import Kernel, Merge, Prepared, Result
from lockstep.numerics import merge
from lockstep.problem import AttentionProblem, Tensors

RAN: list[AttentionProblem] = []
"""The problems of all calls so far."""


def _run(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    RAN.append(problem)
    group = problem.Hq // problem.Hkv
    k, v = (x.repeat_interleave(group, 1) for x in (tensors.k, tensors.v))
    s = (tensors.q @ k.transpose(-1, -2)) * problem.scale  # [B, Hq, Sq, Skv]
    if problem.window[1] is not None:
        hidden = torch.ones(problem.Sq, problem.Skv, dtype=torch.bool).triu(
            1 + problem.Skv - problem.Sq
        )
        s = s.masked_fill(hidden, -math.inf)
    lse = s.logsumexp(-1)
    m = torch.where(lse == -math.inf, math.inf, lse)
    return (s - m[..., None]).exp() @ v, lse, torch.stack((m, torch.ones_like(m)), -1)


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`"""
    return partial(_run, problem)


def supports(problem: AttentionProblem) -> str | None:
    if problem.layout != "dense" or problem.has_kv_lens:
        return "takes sequences of one length"
    if problem.device_type != "cpu" or problem.dtype != torch.float32:
        return "takes float32 on a CPU"
    options = (problem.softcap, problem.bias_shape, problem.window[0])
    if options != (None, None, None) or problem.window[1] or problem.has_sinks:
        return "takes no option but a scale and a causal mask"
    return None


KERNEL = Kernel(
    name="toy",
    supports=supports,
    prepare=prepare,
    prepare_backward=None,
    deterministic=True,
    batch_invariant=False,
    constant_time=False,
    merge=Merge(supports=lambda part: part.dtype == torch.float32, run=merge),
)
