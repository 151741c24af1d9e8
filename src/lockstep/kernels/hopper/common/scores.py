"""Scores: their units, and the cap that both directions put on them."""

from __future__ import annotations

from lockstep import numerics
from lockstep.kernels.hopper.common.division import reciprocal
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

LOG2E, LN2 = gl.constexpr(numerics.LOG2E), gl.constexpr(numerics.LN2)


# tanh x = 1 - 2 / (1 + e^2x). exp2 may overflow to inf, which makes it 1.


@gluon.jit
def _exp_2x(s, scale_over_cap):
    """e^2x for x = s·scale / softcap."""
    return gl.exp2(s * (scale_over_cap * 2.0 * LOG2E))


@gluon.jit
def cap(s, scale_over_cap, softcap, D: gl.constexpr):
    """softcap · tanh(s·scale / softcap), of scores of head dim D."""
    divisor = 1.0 + _exp_2x(s, scale_over_cap)
    if D <= 64:
        # Measured: faster in the forward of such head dims.
        return softcap - 2.0 * softcap / divisor
    zero = gl.zeros_like(s)
    return gl.fma(reciprocal(divisor), zero - 2.0 * softcap, zero + softcap)


@gluon.jit
def cap_and_slope(s, scale_over_cap, softcap):
    """`cap`, and its derivative by s·scale, 1 - tanh²."""
    # Not by way of `cap`: its division takes registers that the backward does not have.
    tanh = 1.0 - 2.0 * (1.0 / (1.0 + _exp_2x(s, scale_over_cap)))
    return tanh * softcap, 1.0 - tanh * tanh
