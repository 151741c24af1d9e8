"""Turns at the tensor cores: while one consumer has them, another computes its exponentials."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE


@gluon.constexpr_function
def _turn_asm(verb, consumer):
    # Two warpgroups meet at each barrier: the one that waits and the one before it.
    return f"bar.{verb} {FIRST_FREE.value + consumer}, 256; mov.u32 $0, $1;"


@gluon.jit
def await_turn(c: gl.constexpr, token):
    """Wait until the consumer before `c` has passed the turn on; `token` is any int32."""
    gl.inline_asm_elementwise(
        _turn_asm("sync", c), "=r,r", [token], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(c: gl.constexpr, token):
    """Give consumer `c` its turn, without waiting."""
    gl.inline_asm_elementwise(
        _turn_asm("arrive", c), "=r,r", [token], gl.int32, is_pure=False, pack=1
    )
