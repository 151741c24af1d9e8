"""Whether what was timed on a GPU is attention: the rule of `docs/numerics.md`, before timing.

A result is checked in pieces, each one head of one sequence, all of its rows: against the float64
oracle, with PyTorch's math attention in the precision of the inputs as the measure of what rounding
explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep import reference
from lockstep.bench.checks import FORWARD_LIMIT, GRADIENT_LIMIT
from lockstep.bench.timing import WrongResult

# Query rows for which the oracle holds scores at once.
ROWS = 2048


class Piece(NamedTuple):
    """One head of one sequence. The last query is level with the last key."""

    q: Tensor  # [Sq, D]
    k: Tensor  # [Skv, D]
    v: Tensor  # [Skv, D]
    dout: Tensor  # [Sq, D]


class Expected(NamedTuple):
    """What a tensor should be, and how far off it may be."""

    what: str
    exact: Tensor  # float64
    allowed: float


def expect(pieces: Sequence[Piece], *, causal: bool, backward: bool) -> list[list[Expected]]:
    """For each piece: out, or dq, dk and dv if `backward`."""
    return [_expect(piece, causal, backward) for piece in pieces]


def largest_error(results: Sequence[Sequence[Tensor]], expected: list[list[Expected]]) -> float:
    """The largest error of all pieces, as a share of what is allowed.

    Raises:
        WrongResult: It is above 1, or a result is NaN.
    """
    worst = 0.0
    for piece, tensors in zip(expected, results, strict=True):
        for (what, exact, allowed), tensor in zip(piece, tensors, strict=True):
            error = _error(tensor, exact)
            # `not <=` so that NaN is wrong as well.
            if not error <= allowed:
                raise WrongResult(f"{what} is off by {error:.2g}, rounding explains {allowed:.2g}")
            worst = max(worst, error / allowed)
    return worst


def _expect(piece: Piece, causal: bool, backward: bool) -> list[Expected]:
    names, limit = (("dq", "dk", "dv"), GRADIENT_LIMIT) if backward else (("out",), FORWARD_LIMIT)
    exact = _exact(piece, causal, backward)
    theirs = _math(piece, causal, backward)
    found = []
    for what, x, y in zip(names, exact, theirs, strict=True):
        # PyTorch may happen to be exact where one rounding is still to be forgiven.
        floor = torch.finfo(piece.q.dtype).eps * float(x.abs().max())
        found.append(Expected(what, x, limit * _error(y, x) + floor))
    return found


def _exact(piece: Piece, causal: bool, backward: bool) -> tuple[Tensor, ...]:
    """By the oracle, a block of query rows at a time."""
    Sq, Skv = len(piece.q), len(piece.k)
    outs, dqs = [], []
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (piece.k, piece.v))
    for start in range(0, Sq, ROWS):
        end = min(start + ROWS, Sq)
        seen = end + Skv - Sq if causal else Skv
        leaves = [_heads(x) for x in (piece.q[start:end], piece.k[:seen], piece.v[:seen])]
        with torch.set_grad_enabled(backward):
            leaves = [x.double().requires_grad_(backward) for x in leaves]
            out = reference.attention(leaves[0], leaves[1], leaves[2], causal=causal)
        assert not isinstance(out, tuple)
        outs.append(out.detach()[0, 0])
        if backward:
            dout = _heads(piece.dout[start:end]).double()
            grads = [x[0, 0] for x in torch.autograd.grad(out, leaves, dout)]
            dqs.append(grads[0])
            dk[:seen] += grads[1]
            dv[:seen] += grads[2]
    return (torch.cat(dqs), dk, dv) if backward else (torch.cat(outs),)


def _math(piece: Piece, causal: bool, backward: bool) -> tuple[Tensor, ...]:
    leaves = [_heads(x).detach().requires_grad_(backward) for x in piece[:3]]
    # PyTorch aligns a causal mask to the first key; a single query sees all keys.
    causal = causal and len(piece.q) > 1
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
    if not backward:
        return (out[0, 0],)
    return tuple(x[0, 0] for x in torch.autograd.grad(out, leaves, _heads(piece.dout)))


def _heads(x: Tensor) -> Tensor:
    return x[None, None]  # [1, 1, S, D]


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max())
