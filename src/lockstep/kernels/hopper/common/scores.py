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
def exponents(s, scale_over_cap):
    """2x·log2(e) for x = s·scale / softcap."""
    return s * (scale_over_cap * 2.0 * LOG2E)


@gluon.jit
def reciprocals(t):
    """-1 / (1 + 2^t). A capped score is softcap plus twice the softcap times that: a softmax takes
    it as a score with another scale, and saves the multiplication."""
    return reciprocal(-1.0 - gl.exp2(t))


@gluon.constexpr_function
def _assembly_of_pairs():
    # Up to 2^62, the product of both is finite, and tanh is 1 from there on. A NaN stays one.
    return """{
        .reg .f32 a, b, product, inverse;
        min.NaN.f32 a, $2, 0f42780000;
        min.NaN.f32 b, $3, 0f42780000;
        ex2.approx.ftz.f32 a, a;
        ex2.approx.ftz.f32 b, b;
        sub.f32 a, 0fBF800000, a;
        sub.f32 b, 0fBF800000, b;
        mul.f32 product, a, b;
        rcp.approx.ftz.f32 inverse, product;
        mul.f32 $0, inverse, b;
        mul.f32 $1, inverse, a;
    }"""


@gluon.jit
def reciprocals_of_pairs(t):
    """`reciprocals`, one for two columns of a row: 1/a = b / (a·b). Where t is -inf, a is -1, and
    the other number of its pair does not notice."""
    assembly: gl.constexpr = _assembly_of_pairs()
    return gl.inline_asm_elementwise(assembly, "=&r,=&r,r,r", [t], gl.float32, is_pure=True, pack=2)


@gluon.jit
def cap_and_slope(s, scale_over_cap, softcap):
    """`cap`, and its derivative by s·scale, 1 - tanh²."""
    # Not by way of `cap`: its division takes registers that the backward does not have.
    tanh = 1.0 - 2.0 * (1.0 / (1.0 + _exp_2x(s, scale_over_cap)))
    return tanh * softcap, 1.0 - tanh * tanh
