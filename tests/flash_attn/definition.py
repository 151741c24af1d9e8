"""Attention by the conventions of flash_attn, written down once more in float64."""

from __future__ import annotations

import math

import torch


def exact(
    q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, start=0, end=None
):
    """out [Sq, Hq, D] and lse [Hq, Sq] of one sequence, in float64."""
    q, k, v = (x.double() for x in (q, k[start:end], v[start:end]))
    (Sq, Hq, D), (Skv, Hkv) = q.shape, k.shape[:2]
    k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    here, there = torch.arange(Sq)[:, None] + Skv - Sq, torch.arange(Skv)
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * (here - there).abs()
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(Sq, Skv, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= there >= here - left
    if right is not None and right >= 0:
        seen &= there <= here + right
    s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def draw(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]
