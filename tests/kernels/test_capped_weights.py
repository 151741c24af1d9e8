"""Weights under a softcap without a GPU: their polynomials in float32."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.common.capped_weights import LARGEST, SMALLEST, TIERS

FLOAT32 = np.float32


def fma(a, b, c):
    return (a.astype(np.float64) * b + c).astype(FLOAT32)


@pytest.mark.parametrize(("coefficients", "end"), TIERS, ids=["first", "second"])
@pytest.mark.parametrize(("scale", "softcap"), [(128**-0.5, 50.0), (0.25, 30.0), (1.0, 0.5)])
def test_a_polynomial_is_off_by_a_rounding_of_the_cap(coefficients, end, scale, softcap):
    unit, height = FLOAT32(scale / softcap), FLOAT32(softcap)
    s = (np.linspace(-end, end, 200_001) / np.float64(unit)).astype(FLOAT32)
    powers = [height * unit]
    for _ in coefficients[1:]:
        powers.append(powers[-1] * (unit * unit))
    a = [FLOAT32(c) * power for c, power in zip(coefficients, powers, strict=True)]
    assert SMALLEST < abs(a[-1]) < LARGEST
    z = s * s
    w = fma(z, a[-1], a[-2])
    for x in a[-3::-1]:
        w = fma(w, z, x)
    exact = softcap * np.tanh(s.astype(np.float64) * np.float64(unit))
    assert np.abs(fma(s, w, 0.0) - exact).max() < 2**-22 * softcap
