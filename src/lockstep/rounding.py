"""The cost of rounding: the root mean square error of attention that rounds everything once.

A kernel holds scores, statistics and sums in float32 (float64 for float64), and what it multiplies
and returns in the dtype of its tensors; u and w are the errors of the two (`Units`). If each
number is rounded once, in independent errors, and sums of n terms are trees, which round a term
1 + log₂ n times, then variances add up along the definition. q·k is added up term by term. Where
its terms have random signs, its partial sums grow to D/4 times their variance; where they have one
sign, partial sums grow evenly to q·k, and D roundings of u²/6 each come to D/16 times its square.
For one row with weights p, n keys, and the derivatives of `docs/gradients.md`:

    s    = scale · q·k        var s  = u² ((1 + D/4) scale² Σ q² k² + (1 + D/16) s²), at most 1
    out  = Σ p v              var out = Σ p² ((w² + L u²) v² + var s (v - out)²) + (w² + c) out²
    lse  = m + log l          var lse = Σ p² var s + c + u² (lse² + m²)     (softcap: see `_cap`;
                                                                  tensor cores: see `_cut_off`)
    dp   = dout·v             var dp = u² (L(Dv) Σ dout² v² + dp²)
    δ    = dout·out - dlse    var δ  = Σ p² var s (dp - dout·out)² + c (dout·out)² + u² δ²
                                       + Σ dout² (Σ p² (w² + L u²) v² + (w² + L(Dv) u²) out²)
    ds   = p (dp - δ)         var ds = p² (var dp + (dp - δ)² (w² + var s))       own of each key,
                                       and a step of the dtype where it is multiplied by scale · k
    dq   = scale · Σ ds k     var dq = Σ (scale² var ds + L u² ds²) k² + scale² var δ (Σ p k)²
                                       + (Σ p² var s + c + w²) dq²                dk alike
    dv   = Σ p dout           var dv = Σ p² (w² + (1 - 2 p) var s + Σ p² var s + c + L u²) dout²
                                       + w² dv²

with L(n) = 1 + log₂ n, L = L(n) for the sums over keys, and c = u² (L Σ p² + 2), the relative
variance of l. The errors of l and δ are those of a row, the same for all of its keys, and those of
a weight are the same in all columns of out, which δ adds up. `dp - δ` cancels in a row that one key
dominates: there a gradient may be off by far more than a rounding of itself. Where all but that key
are less than a rounding, out is rounded to its v, and δ to its dp (`_lost_by_out`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import reference
from lockstep.numerics import statistics_dtype
from lockstep.problem import AttentionProblem, Tensors

# Query rows for which scores are held at once.
ROWS = 2048
# Kernels add up a tile of keys, 64 of them or more, one after the other. While a sum of equal terms
# stays between two powers of 2, each addition is off by the same: over 64 terms by 13 u of the sum,
# root mean square over what the term is.
TILE, CHAIN = 64, 13.0
# What an H200 cuts off of a sum of products with one sign comes to, for each product, in u of the
# sum: at most three times these. A product of fp16 has 22 bits, one of bf16 has 16, and the rest of
# either that lies two bits or more below the last of the sum is lost.
CUT = {torch.float16: 0.045, torch.bfloat16: 0.017}
# By the name of the result: out, lse; dq, dk, dv, dbias, dsinks.
Variances = dict[str, Tensor]


@dataclass(frozen=True)
class Units:
    """The errors of numbers in statistics (u) and in tensors (w), relative to them.

    u is half an eps of float32: on its way to a weight a score is scaled, rounded and taken
    through exp2. w is one rounding, evenly distributed within half an eps of the dtype. `least` is
    the least step of the dtype; a weight below `least_weight` may be 0, where exp2 ends.

    Tensor cores of a GPU multiply float32 as a sum of bfloat16 terms, whose least step is larger.
    They do not round sums of 16-bit products, but cut them off: `cut` of a product, relative to the
    sum.
    """

    u: float
    w: float
    least: float
    least_weight: float
    cut: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, device: str = "cpu") -> Units:
        own, statistics = torch.finfo(dtype), torch.finfo(statistics_dtype(dtype))
        in_terms = dtype == torch.float32 and device != "cpu"
        steps = torch.finfo(torch.bfloat16) if in_terms else own
        least = steps.smallest_normal * steps.eps
        return cls(
            statistics.eps / 2,
            own.eps / math.sqrt(12),
            least,
            max(least, statistics.smallest_normal),
            CUT.get(dtype, 0.0) * statistics.eps / 2 if device != "cpu" else 0.0,
        )


class Row(NamedTuple):
    """A block of query rows of some sequences, keys and values repeated for their group."""

    q: Tensor  # [B, Hq, rows, D]
    k: Tensor  # [B, Hq, Skv, D]
    v: Tensor  # [B, Hq, Skv, Dv]
    bias: Tensor | None  # [B, Hq, rows, Skv], expanded
    sinks: Tensor | None  # [Hq]
    bias_per_row: bool  # one number for all keys
    seen: Tensor  # [B, Hq, rows, Skv] bool
    dout: Tensor | None  # [B, Hq, rows, Dv]
    dlse: Tensor | None  # [B, Hq, rows, 1]


def spread(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> dict[str, float]:
    """The largest root mean square error of each result, by name: out, lse; with dout also dq, ….

    `dout` and `dlse` have the shapes of out and lse. What is not finite counts as 0.
    """
    largest: dict[str, float] = {}
    sinks: list[Tensor] = []

    def attend(_: AttentionProblem, q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        q, dout_, dlse_ = _unjoin(problem, q)
        gradients = (dout_, dlse_) if dout is not None else (None, None)
        found = _variances(problem, q, *rest, *gradients)
        if "dsinks" in found:
            sinks.append(found["dsinks"])
        for name, variance in found.items():
            if variance.numel():
                root = math.sqrt(float(variance.nan_to_num().max()))
                largest[name] = max(largest.get(name, 0.0), root)
        return q.new_zeros(*q.shape[:3], problem.Dv), q.new_zeros(q.shape[:3])

    joined = tensors._replace(q=_join(tensors.q, dout, dlse, problem.Dv))
    with torch.no_grad():
        reference.evaluate(problem, joined, attend=attend)
    if sinks:
        # Every sequence adds to them.
        largest["dsinks"] = math.sqrt(float(torch.stack(sinks).sum(0).max()))
    return largest


# Sequences come out of packed and paged tensors one by one; what belongs to a query goes with it.


def _join(q: Tensor, dout: Tensor | None, dlse: Tensor | None, Dv: int) -> Tensor:
    dout = q.new_zeros(*q.shape[:-1], Dv) if dout is None else dout
    dlse = q.new_zeros(q.shape[:-1]) if dlse is None else dlse
    return torch.cat([q.double(), dout.double(), dlse.double()[..., None]], dim=-1)


def _unjoin(problem: AttentionProblem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[..., : problem.D], q[..., problem.D : -1], q[..., -1:]


def _variances(
    problem: AttentionProblem,
    q: Tensor,  # [B, Hq, Sq, D]
    k: Tensor,  # [B, Hkv, Skv, D]
    v: Tensor,  # [B, Hkv, Skv, Dv]
    bias: Tensor | None,
    sinks: Tensor | None,
    lens: Tensor,
    starts: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Variances:
    """The variances of a dense call; those of dk, dv, dbias and dsinks are summed over what adds to
    them."""
    units, group = Units.of(problem.dtype, problem.device_type), problem.Hq // problem.Hkv
    total: Variances = {}
    for rows in _rows(problem, q, k, v, bias, sinks, lens, starts, dout, dlse):
        for name, variance in _of_rows(problem, units, rows).items():
            if name in ("dk", "dv", "dsinks"):
                total[name] = total[name] + variance if name in total else variance
            else:
                total[name] = torch.cat([total[name], variance], 2) if name in total else variance
    for name in ("dk", "dv"):
        if name in total:  # [B, Hq, Skv, D] -> [B, Hkv, Skv, D]
            B, _, Skv, D = total[name].shape
            total[name] = total[name].view(B, problem.Hkv, group, Skv, D).sum(2)
    if bias is not None and "dbias" in total:
        dbias = total.pop("ds").sum_to_size(bias.shape)
        total["dbias"] = total["dbias"].sum_to_size(bias.shape) + units.w**2 * dbias**2
    return total


def _rows(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    lens: Tensor,
    starts: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Iterator[Row]:
    group = problem.Hq // problem.Hkv
    q, k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    shape = (*q.shape[:3], k.shape[2])
    seen = reference.visible(problem, lens, shape[2], shape[3], starts)
    per_row = bias is not None and bias.shape[3] == 1
    if bias is not None:
        seen = seen & (bias != -math.inf)
        bias = bias.nan_to_num(0.0, 0.0, 0.0).expand(shape)
    seen = seen.expand(shape)
    for start in range(0, shape[2], ROWS):
        part = slice(start, start + ROWS)
        yield Row(
            q[:, :, part],
            k,
            v,
            None if bias is None else bias[:, :, part],
            sinks,
            per_row,
            seen[:, :, part],
            None if dout is None else dout[:, :, part],
            None if dlse is None else dlse[:, :, part],
        )


def _of_rows(problem: AttentionProblem, units: Units, t: Row) -> Variances:
    u2, w2, least2, none2 = (x**2 for x in (units.u, units.w, units.least, units.least_weight))
    s, var_s, slope = _scores(problem, units, t)
    logits = s.masked_fill(~t.seen, -math.inf)
    if t.sinks is not None:
        sink = t.sinks[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    if not logits.shape[-1]:
        return {}
    m = logits.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    weights = (logits - m).exp()
    l = weights.sum(-1, keepdim=True)
    weights = weights / l.masked_fill(l == 0, 1.0)
    lse = (m + l.log()).masked_fill(l == 0, 0.0)  # [B, Hq, rows, 1]
    p = weights[..., : t.k.shape[2]]
    p2, moved = p**2, p**2 * var_s
    keys = u2 * _levels(p.shape[-1])  # of a sum over keys, for each of its terms
    rounded = ((w2 + keys) * p2).clamp(min=none2) * t.seen
    # Relative to l. Its terms are positive: the partial sums of each level add up to l again.
    var_l = keys * p2.sum(-1, keepdim=True) + 2 * u2
    shift = moved.sum(-1, keepdim=True) + var_l
    out = p @ t.v
    away = moved @ t.v**2 - 2 * out * (moved @ t.v) + out**2 * moved.sum(-1, keepdim=True)
    # Of each column by itself; the errors of weights and of l are those of all columns.
    of_column = rounded @ t.v**2 + w2 * out**2 + least2
    of_column = of_column + (_equal_terms(p, t) * CHAIN * units.u * out) ** 2
    var_out = of_column + away.clamp(min=0.0) + var_l * out**2
    var_lse = shift + u2 * (lse**2 + m**2 + _cap(problem, units) ** 2)
    var_lse = var_lse + _cut_off(problem, units, t, p * slope) ** 2
    found = {"out": var_out, "lse": var_lse.squeeze(-1)}
    if t.dout is None or t.dlse is None:
        return found

    dout2, v2 = t.dout**2, t.v**2
    columns = u2 * _levels(problem.Dv)
    dp = t.dout @ t.v.mT
    var_dp = columns * (dout2 @ v2.mT) + u2 * dp**2
    dot = (t.dout * out).sum(-1, keepdim=True)
    delta = dot - t.dlse
    var_delta = (dout2 * (of_column + columns * out**2)).sum(-1, keepdim=True) + u2 * delta**2
    var_delta = var_delta + (moved * (dp - dot) ** 2).sum(-1, keepdim=True) + var_l * dot**2
    lost = _lost_by_out(units, p, dp, dot)  # [B, Hq, rows, 1]
    ds = p * (dp - delta)
    seen = t.seen.double()  # a number times bool would be float32, where squares of steps are 0
    own = p2 * (var_dp + (dp - delta) ** 2 * (w2 + var_s))
    # ds is multiplied behind the derivative of the cap, and before the scale.
    own_x = slope**2 * own + problem.scale**2 * least2 * seen
    if problem.softcap is not None:
        # 1 - tanh² cancels where the cap bites.
        own_x = own_x + 4 * u2 * problem.scale**2 * ds**2
    dx, px = slope * ds, slope * p
    queries = u2 * _levels(t.q.shape[2] * problem.Hq // problem.Hkv)
    dq, dk, dv = dx @ t.k, dx.mT @ t.q, p.mT @ t.dout
    of_row = var_delta * (px @ t.k) ** 2 + (shift + w2) * dq**2
    of_row = of_row + (lost * (px @ t.k)) ** 2
    found["dq"] = (own_x + keys * dx**2) @ t.k**2 + of_row + least2
    all_x = own_x + px**2 * var_delta + dx**2 * (shift + queries)
    found["dk"] = all_x.mT @ t.q**2 + ((px * lost).mT @ t.q) ** 2 + w2 * dk**2 + least2
    # A score that moves a weight moves the sum by p of it: nothing is left where p is 1.
    all_p = p2 * (w2 + (1 - 2 * p) * var_s + shift + queries) + none2 * seen
    found["dv"] = all_p.mT @ dout2 + w2 * dv**2 + least2
    if t.bias is not None:
        found["ds"] = ds
        own = own + least2 * seen
        found["dbias"] = own + p2 * (var_delta + lost**2) + ds**2 * (shift + queries) + least2
        if t.bias_per_row:
            found["ds"] = ds.sum(-1, keepdim=True)
            of_row = (var_delta + lost**2) * p.sum(-1, keepdim=True) ** 2
            of_row = of_row + shift * found["ds"] ** 2
            own = (own + ds**2 * (queries + keys)).sum(-1, keepdim=True)
            found["dbias"] = own + of_row + least2
    if t.sinks is not None:
        p_sink = weights[..., -1:]
        relative = var_delta + delta**2 * (w2 + u2 + queries + shift)
        var = (p_sink**2 * relative + none2 * delta**2).sum((0, 2, 3))
        var = var + (p_sink * lost).sum((0, 2, 3)) ** 2
        found["dsinks"] = var + w2 * (p_sink * delta).sum((0, 2, 3)) ** 2 + least2
    return found


def _lost_by_out(units: Units, p: Tensor, dp: Tensor, dot: Tensor) -> Tensor:
    """What δ is off by where out, as it is returned, is the v of one key, [B, Hq, rows, 1].

    If the other keys, and a sink, have less weight than a rounding, all columns of out are rounded
    to that v. Their errors have one cause, and those of rows add up, too."""
    if not p.shape[-1]:
        return torch.zeros_like(dot)
    most, key = p.max(-1, keepdim=True)
    half_eps = units.w * math.sqrt(3.0)
    return (dp.gather(-1, key) - dot) * (1 - most <= half_eps)


def _equal_terms(p: Tensor, t: Row) -> Tensor:
    """How much of a tile is there of terms p·v that are one number, [B, Hq, rows, Dv]: 0 for one
    key, and if terms differ, up to 1. Errors of such a sum do not cancel out: see CHAIN."""
    if not p.shape[-1]:
        return p.new_zeros(())
    least = p.masked_fill(~t.seen, math.inf).amin(-1, keepdim=True)
    same_p = p.amax(-1, keepdim=True) == least  # [B, Hq, rows, 1]
    same_v = t.v.amax(-2, keepdim=True) == t.v.amin(-2, keepdim=True)  # [B, Hq, 1, Dv]
    n = t.seen.sum(-1, keepdim=True).clamp(1, TILE)
    return (same_p & same_v) * ((n - 1) / (TILE - 1))


def _scores(problem: AttentionProblem, units: Units, t: Row) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, their variance, and their derivative by q·k, each [B, Hq, rows, Skv]."""
    s = problem.scale * (t.q @ t.k.mT)
    # Every kernel adds up the columns of a score one after the other.
    var = (1 + problem.D / 4) * problem.scale**2 * (t.q**2 @ t.k.mT**2)
    var = var + (1 + problem.D / 16) * s**2
    slope = torch.full_like(s, problem.scale)
    if problem.softcap is not None:
        bent = torch.tanh(s / problem.softcap)
        slope = slope * (1 - bent**2)
        s, var = problem.softcap * bent, (1 - bent**2) ** 2 * var
        var = var + s**2 + _cap(problem, units) ** 2
    if t.bias is not None:
        s = s + t.bias
        var = var + s**2
    # A weight is not off by more than itself, however large the scores are.
    return s, (units.u**2 * var).clamp(max=1.0), slope


def _cap(problem: AttentionProblem, units: Units) -> float:
    """The size that the error of a capped score is relative to, beside the score itself.

    For 16-bit tensors, tanh x may be computed as 1 - 2 / (1 + e^2x), which is exact to u, not to u
    times itself. Equal scores of a row have equal errors of this kind, and lse has them, too.
    """
    return problem.softcap if problem.softcap is not None and units.w > units.u else 0.0


def _cut_off(problem: AttentionProblem, units: Units, t: Row, by_product: Tensor) -> Tensor:
    """What lse loses because tensor cores cut sums off, [B, Hq, rows, 1]: all q·k with one sign are
    too small, so that their errors add up. `by_product` has the derivatives of lse by q·k."""
    return units.cut * problem.D * (by_product * (t.q @ t.k.mT)).sum(-1, keepdim=True)


def _levels(n: int) -> float:
    """How often a term of a sum is rounded: as a product, and at each level of a tree of sums."""
    return 1 + math.log2(max(n, 1))
