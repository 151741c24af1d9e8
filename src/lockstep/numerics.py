"""The softmax invariant, stated once.

Every kernel takes the keys of a row in pieces and keeps three numbers per row: the running
maximum `m` of the scores `s`, and, over the keys seen so far,

    l   = Σ exp(s - m)            one number
    acc = Σ exp(s - m) · v        [Dv]

Moving the maximum from `m` to `m'` multiplies both sums by `exp(m - m')`, so pieces can be seen
in any grouping, each with a maximum of its own, and combined at the end:

    out = acc / l,    lse = m + log(l)

`merge` is that combination for pieces that are already finished: a piece `(out, lse)` is the
state `m = lse, l = 1, acc = out`. A row that has seen no key is `out = 0, lse = -inf`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `m`, `l`, `acc` and `lse` for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combines partial results `outs` [..., Dv], `lses` [...] from left to right."""
    m = torch.full_like(lses[0], -math.inf)
    l = torch.zeros_like(lses[0])
    acc = torch.zeros_like(outs[0], dtype=lses[0].dtype)
    for out, lse in zip(outs, lses, strict=True):
        m_new = torch.maximum(m, lse)
        # exp(-inf - -inf) would be NaN: measured from 0, both weights of an empty row are 0.
        origin = m_new.masked_fill(m_new == -math.inf, 0.0)
        keep, add = torch.exp(m - origin), torch.exp(lse - origin)  # [...]
        # A piece that saw no key says nothing, whatever its out holds.
        out = out.to(acc.dtype).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
        acc = acc * keep.unsqueeze(-1) + out * add.unsqueeze(-1)  # [..., Dv]
        l = l * keep + add
        m = m_new
    empty = m == -math.inf
    out = acc / l.masked_fill(empty, 1.0).unsqueeze(-1)
    return out.to(outs[0].dtype), m + torch.log(l.masked_fill(empty, 1.0))


def merge_backward(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of `merge`: piece i has weight `w = exp(lse_i - lse)`, and `out = Σ w · out_i`."""
    dout = dout.to(lse.dtype)
    origin = lse.masked_fill(lse == -math.inf, 0.0)
    douts, dlses = [], []
    for out_i, lse_i in zip(outs, lses, strict=True):
        w = torch.exp(lse_i - origin)  # [...]
        # A piece of weight 0 gets no gradient, whatever its out holds.
        shift = (out_i.to(lse.dtype) - out.to(lse.dtype)).masked_fill((w == 0).unsqueeze(-1), 0.0)
        douts.append((w.unsqueeze(-1) * dout).to(out_i.dtype))
        dlses.append(w * (dlse + (dout * shift).sum(-1)))
    return douts, dlses
