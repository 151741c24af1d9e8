"""Divisions in few instructions: what one warp works out before the first load is under way takes
its time, however little it is."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon


@gluon.jit
def reciprocal(x):
    """1 / x to one unit in the last place, in one instruction; a division by x takes five."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b):
    """a // b of int32 with a >= 0 and b > 0, exact where the quotient is less than 2^22, else to
    some units in 2^22: a third of the instructions of an integer division."""
    # Conversions, reciprocal and product have relative errors of less than 2^-22 in all.
    quotient = (a.to(gl.float32) * reciprocal(b.to(gl.float32))).to(gl.int32)
    rest = a - quotient * b
    return quotient + gl.where(rest >= b, 1, 0) - gl.where(rest < 0, 1, 0)


@gluon.jit
def divide_up(a, b):
    """The same, rounded up."""
    return divide(a + b - 1, b)
