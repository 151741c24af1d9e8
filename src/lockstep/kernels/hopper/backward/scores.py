"""From raw products Q·Kᵀ to weights and to the gradients of scores.

Every function takes scores either way round: keys by queries, with statistics of rows as [1, ·], or
queries by keys, with statistics as [·, 1].
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward.rows import NONFINITE
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.scores import cap_and_slope


@aggregate
class Scores:
    """How raw products become scores. Weights are exp2(scores · unit - …)."""

    scale: gl.tensor
    unit: gl.tensor
    softcap: gl.tensor
    CAPPED: gl.constexpr
    # Where scores are raw products, masks are put on them. A cap or a scale that is not positive
    # would undo that: then masks are put on weights.
    HIDES_SCORES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, unit, softcap, CAPPED, HIDES_SCORES):
        self.scale = scale
        self.unit = unit
        self.softcap = softcap
        self.CAPPED = gl.constexpr(CAPPED)
        self.HIDES_SCORES = gl.constexpr(HIDES_SCORES)

    @gluon.jit
    def hide_products(self, s, loop, t, first_row: gl.constexpr, m=None):
        """Raw products, with -inf for pairs that the mask hides in the t-th tile of a loop, if it
        is put on scores; `first_row` is that of s in the program.

        With `m`, products of rows that are marked NONFINITE are 0: their values may or may not have
        been replaced before s was multiplied, and the result must be the same."""
        if loop.cuts(t):
            if m is not None:
                s = gl.where(m == NONFINITE, 0.0, s)
            if self.HIDES_SCORES:
                s = loop.hide(s, t, first_row, -float("inf"))
        return s

    @gluon.jit
    def finish(self, s):
        """Scores from raw products, and the derivative of the cap, if there is one."""
        slope = s
        if self.CAPPED:
            s, slope = cap_and_slope(s, self.scale / self.softcap, self.softcap)
        elif not self.HIDES_SCORES:
            s = s * self.scale
        return s, slope

    @gluon.jit
    def hide_weights(self, p, slope, loop, t, first_row: gl.constexpr, first_column: gl.constexpr):
        """Weights and slopes, 0 for hidden pairs, unless `hide_products` has seen to it."""
        if not self.HIDES_SCORES:  # noqa: SIM102, Gluon would evaluate both sides of an `and`
            if loop.cuts(t):
                p = loop.hide(p, t, first_row, 0.0, first_column)
                slope = loop.hide(slope, t, first_row, 0.0, first_column)
        return p, slope

    @gluon.jit
    def exact_weights(self, s, m, log2_l):
        """exp2((s - m)·unit - log2 l): exact for scores of any size, since the difference to m,
        where it is small, is exact."""
        return gl.exp2((s - m) * self.unit - log2_l)

    @gluon.jit
    def weights(
        self, s, m, log2_l, loop, t, first_row: gl.constexpr, MAY_BE_NONFINITE: gl.constexpr
    ):  # fmt: skip
        """Weights, 0 for hidden pairs, and slopes of raw products of a whole tile."""
        s = self.hide_products(s, loop, t, first_row, m if MAY_BE_NONFINITE else None)
        s, slope = self.finish(s)
        p = self.exact_weights(s, m, log2_l)
        return self.hide_weights(p, slope, loop, t, first_row, 0)

    @gluon.jit
    def gradient(self, p, dp, delta, slope):
        """dS = P∘(dP - delta), times the slope of the cap."""
        ds = p * (dp - delta)
        return ds * slope if self.CAPPED else ds
