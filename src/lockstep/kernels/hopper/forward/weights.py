"""Weights of scores as `Program.mask_scores` returns them, and their maxima: scores may be capped
late, when both are computed (`capped_weights.py`)."""

from __future__ import annotations

from lockstep.kernels.hopper.common.capped_weights import (
    capped_maxima,
    capped_offset_weights,
    capped_weights,
)
from lockstep.kernels.hopper.common.exact_weights import offset_weights, offset_weights_in_halves
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.softmax import exp2_weights, thread_sums


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
def _hide_weights(program, rows, block, weights, sums):
    """Weights of a block, 0 where a row does not see the key, and their sums."""
    block = _unknown(block)
    if rows.is_edge(block):
        weights = rows.hide(program.schedule, weights, block, 0.0)
        sums = thread_sums(weights)
    return weights, sums


@gluon.jit
def find_weights(program, rows, s, block, m):
    """Weights [ROWS, BLOCK_KV] relative to m [ROWS], and their sums [ROWS, 4] (`thread_sums`)."""
    if program.build.CAPS_LATE:
        s = rows.hide(program.schedule, s, block, 0.0)
        weights, sums = capped_weights(s, m, program.scale, program.softcap)
        return _hide_weights(program, rows, block, weights, sums)
    else:  # noqa: RET505, Gluon would go on and return both
        weights = exp2_weights(s, m, program.score_scale())
        return weights, thread_sums(weights)


@gluon.jit
def find_offset_weights(program, rows, s, block, offset, MAY_HALVE: gl.constexpr = False):
    """The same with the offset [ROWS, 4] of `exact_weights.py`; of narrow heads under a causal mask
    in halves, if they may be."""
    NARROW: gl.constexpr = program.v.COLUMNS <= 64
    CAUSAL: gl.constexpr = program.schedule.HAS_RIGHT and not program.schedule.HAS_LEFT
    if program.build.CAPS_LATE:
        s = rows.hide(program.schedule, s, block, 0.0)
        weights, sums = capped_offset_weights(s, offset, program.scale, program.softcap)
        return _hide_weights(program, rows, block, weights, sums)
    elif MAY_HALVE and NARROW and CAUSAL:  # noqa: RET505, Gluon would go on and return all
        weights = offset_weights_in_halves(s, offset, program.score_scale())
        return weights, thread_sums(weights)
    else:
        weights = offset_weights(s, offset, program.score_scale())
        return weights, thread_sums(weights)
