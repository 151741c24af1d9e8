"""Results on a GPU are checked by the error rule before they are timed.

A result is checked in pieces, each one head of one sequence, all of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import error_rule, math_attention, reference, rounding
from lockstep.bench.timing import WrongResult
from lockstep.error_rule import Expected
from lockstep.problem import Options, Tensors, describe

# Query rows for which the oracle holds scores at once.
ROWS = 2048


class Piece(NamedTuple):
    """One head of one sequence. The last query is level with the last key."""

    q: Tensor  # [Sq, D]
    k: Tensor  # [Skv, D]
    v: Tensor  # [Skv, D]
    dout: Tensor  # [Sq, D]


def expect(pieces: Sequence[Piece], *, causal: bool, backward: bool) -> list[dict[str, Expected]]:
    """The bounds of the error rule for each piece: of out, or of dq, dk and dv if `backward`."""
    return [_expect(piece, causal, backward) for piece in pieces]


def largest_error(
    results: Sequence[Sequence[Tensor]], expected: list[dict[str, Expected]]
) -> float:
    """The largest error of all pieces, as a share of what is allowed.

    Raises:
        WrongResult: It is above 1, or a result is NaN.
    """
    worst = 0.0
    for piece, tensors in zip(expected, results, strict=True):
        for (what, rule), tensor in zip(piece.items(), tensors, strict=True):
            share = rule.share(tensor)
            if share > 1:
                raise WrongResult(
                    f"{what} is off by {error_rule.error(tensor, rule.exact):.2g}, rounding "
                    f"explains {rule.allowed:.2g}"
                )
            worst = max(worst, share)
    return worst


def _expect(piece: Piece, causal: bool, backward: bool) -> dict[str, Expected]:
    tensors = Tensors(*(_heads(x) for x in piece[:3]))
    problem = describe(tensors, Options(causal=causal))
    dout = _heads(piece.dout) if backward else None
    names = ("dq", "dk", "dv") if backward else ("out",)
    exact = dict(zip(names, _exact(piece, causal, backward), strict=True))
    theirs = error_rule.results(math_attention.evaluate, problem, tensors, dout)
    spread = rounding.spread(problem, tensors, dout)
    return {
        name: error_rule.judge(name, exact[name], theirs[name][0, 0], spread[name])
        for name in names
    }


def _exact(piece: Piece, causal: bool, backward: bool) -> tuple[Tensor, ...]:
    """The oracle's results, computed for a block of query rows at a time."""
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


def _heads(x: Tensor) -> Tensor:
    return x[None, None]  # [1, 1, S, D]
