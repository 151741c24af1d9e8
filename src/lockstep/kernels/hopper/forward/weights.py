"""Weights of scores as `Program.mask_scores` returns them, and their maxima: scores may be capped
late, when both are computed (`capped_weights.py`)."""

from __future__ import annotations

from lockstep.kernels.hopper.common.capped_weights import (
    capped_maxima,
    capped_offset_weights,
    capped_weights,
)
from lockstep.kernels.hopper.common.exact_weights import offset_weights
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.softmax import exp2_weights


@gluon.jit
def _unknown(x):
    """x, int32, of which no compiler knows that it is x: LLVM would have the code between two
    branches on one condition twice."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_tops(program, rows, s, block):
    """Scores, and the largest ones of rows [ROWS], capped if the others are late."""
    if program.build.CAPS_LATE:
        s = rows.hide(program.schedule, s, _unknown(block))
        return s, capped_maxima(gl.max(s, 1), program.scale, program.softcap)
    else:  # noqa: RET505, Gluon would go on and return both
        return s, gl.max(s, 1)


@gluon.jit
def find_weights(program, rows, s, block, m):
    """Weights [ROWS, BLOCK_KV] relative to m [ROWS]."""
    if program.build.CAPS_LATE:
        s = rows.hide(program.schedule, s, block, 0.0)
        weights = capped_weights(s, m, program.scale, program.softcap)
        return rows.hide(program.schedule, weights, _unknown(block), 0.0)
    else:  # noqa: RET505, Gluon would go on and return both
        return exp2_weights(s, m, program.score_scale())


@gluon.jit
def find_offset_weights(program, rows, s, block, offset):
    """The same with the offset [ROWS, 4] of `exact_weights.py`."""
    if program.build.CAPS_LATE:
        s = rows.hide(program.schedule, s, block, 0.0)
        weights = capped_offset_weights(s, offset, program.scale, program.softcap)
        return rows.hide(program.schedule, weights, _unknown(block), 0.0)
    else:  # noqa: RET505, Gluon would go on and return both
        return offset_weights(s, offset, program.score_scale())
