"""From scores to weights: the normaliser of a row, the exponentials, the masks of edge blocks.

Scores stay as the matrix units leave them, raw products `q·k`; `scale` takes them to log2 units
and rides for free in the FMA in front of the exponential: `p = exp2(s·scale - m·scale)`. So `m`
is held in raw units as well, and is a maximum only because `scale` is positive.

Softmax does not need the maximum. It needs any `m` near enough for `exp2` to neither overflow nor
vanish, and bf16 weights have the exponents of fp32. So a row with a *fixed maximum* keeps the
maximum of the first block in which it saw a key, or of the first two if it saw a part of the first,
and need not wait for those of later ones: a third of all the softmax takes. What rounding its
largest weight would cost, `exact_weights.py` avoids. Should a later key exceed that maximum by more
than about 2^64, its row's sum gives it away, and the row is computed again with a running maximum
(`second_pass.py`).
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.division import reciprocal
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import scale_all, scale_rows
from lockstep.kernels.hopper.common.scores import LN2, LOG2E

# A row with a fixed maximum whose sum reaches this is computed again: 2^64 leaves room for values
# up to 2^63.
OVERFLOW = gl.constexpr(18446744073709551616.0)
# So is one with a maximum of this size in log2 units: see `exp2_weights`.
LARGE_MAX = gl.constexpr(4194304.0)


@gluon.jit
def hide_from(s, end, hidden: gl.constexpr = -float("inf")):
    """Scores [BLOCK_Q, BLOCK_KV], -inf from column `end` [BLOCK_Q] of each row on, or `hidden`."""
    fixed, of_thread = _columns(s)
    return gl.where(fixed < gl.expand_dims(end, 1) - of_thread, s, hidden)


@gluon.jit
def hide_before(s, begin, hidden: gl.constexpr = -float("inf")):
    """Scores [BLOCK_Q, BLOCK_KV], -inf before column `begin` [BLOCK_Q] of each row, or `hidden`."""
    fixed, of_thread = _columns(s)
    return gl.where(fixed >= gl.expand_dims(begin, 1) - of_thread, s, hidden)


@gluon.jit
def _columns(s):
    """The columns of scores as two summands [1, BLOCK_KV]: the first is the same in all threads, so
    that a comparison has it as a constant, the second the same for all scores of a thread. In the
    layout of wgmma, thread t of four has the columns 8i + 2t and 8i + 2t + 1."""
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    column = gl.expand_dims(gl.arange(0, s.shape[1], columns), 0)
    return column & -7, column & 6


@gluon.jit
def raise_maximum(s, m, scale, rises, top=None):
    """A new `m` [BLOCK_Q], and the factor `alpha` for all that was summed under the old one.

    `m` rises to the maximum of `s` in the rows that `rises` names, True for all; if `top` is not
    None, to that."""
    if top is None:
        top = gl.max(s, 1)
    m_new = gl.maximum(m, top)
    if rises is not True:
        m_new = gl.where(rises, m_new, m)
    # exp2(-inf - -inf) would be NaN: a row that has seen no key has nothing to rescale.
    drop = gl.where(m_new == -float("inf"), 0.0, (m - m_new) * scale)
    return m_new, gl.exp2(drop)


@gluon.jit
def exp2_weights(s, m, scale):
    """p = exp2(s·scale - m·scale) [BLOCK_Q, BLOCK_KV] fp32.

    m·scale is rounded, which is the same factor for all weights of a row (`max_rounding_error`),
    and no more than that while m·scale is below LARGE_MAX."""
    # Rows that have seen no key measure from 0: exp2(-inf - 0) = 0.
    offset = gl.where(m == -float("inf"), 0.0, -m * scale)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    return gl.exp2(gl.fma(s, zero + scale, zero + gl.expand_dims(offset, 1)))


@gluon.jit
def exp2_weights_exact(s, m, scale):
    """p = exp2((s - m)·scale): scores of any size have the same weights as small ones that differ
    by as much."""
    origin = gl.where(m == -float("inf"), 0.0, m)
    return gl.exp2((s - gl.expand_dims(origin, 1)) * scale)


@gluon.jit
def max_rounding_error(m, scale):
    """The error that rounding m·scale adds to the exponents of `exp2_weights`."""
    return gl.where(gl.abs(m) < float("inf"), gl.fma(m, scale + gl.zeros_like(m), -m * scale), 0.0)


@gluon.jit
def _divide(x, y, BRIEF: gl.constexpr):
    """x / y, or if BRIEF, x times the reciprocal, in fewer instructions."""
    return x * reciprocal(y) if BRIEF else x / y


@gluon.jit
def _log2(x, BRIEF: gl.constexpr):
    """The logarithm of positive numbers; if BRIEF, of such as are not subnormal, to 2^-22, in a
    fifth of the instructions."""
    if BRIEF:
        bits = x.to(gl.int32, bitcast=True)
        # Exponents of which the rest is in [0.75, 1.5): near 1, so that the error is small.
        exponent = (bits - 0x3F400000) >> 23
        rest = (bits - (exponent << 23)).to(gl.float32, bitcast=True)
        y = gl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [rest], gl.float32, is_pure=True, pack=1
        )
        # Infinity and NaN remain what they are.
        return gl.where(x < float("inf"), y + exponent.to(gl.float32), x)
    else:  # noqa: RET505, Gluon would go on and return both
        return gl.log2(x)


@gluon.jit
def close_rows(acc, m, l, r, factor, scale, sink, nan_if_bad, BRIEF: gl.constexpr = False):
    """Pieces of out [ROWS, ·] fp32; lse, m and l [ROWS] of rows that have seen all their keys.

    l and r are the sums of their weights, of r the largest as acc was multiplied by them; both, and
    acc, are relative to exp2(m·scale) once they are multiplied by `factor`. `sink` is a key without
    a value, in natural units, or None. `nan_if_bad` is added to all results. BRIEF is for
    code that runs often, and has fewer instructions."""
    if sink is not None:
        l = l * factor
        r = r * factor
        sink = sink.to(gl.float32) * LOG2E
        # Finite even where the scale is next to nothing.
        top = gl.minimum(gl.maximum(m, sink / scale), 3.0e38)
        top = gl.where(top == -float("inf"), 0.0, top)
        keep = gl.exp2((m - top) * scale)
        weight = gl.exp2(gl.fma(-top, scale + gl.zeros_like(top), sink + gl.zeros_like(top)))
        l = l * keep + weight
        r = r * keep + weight
        inverse = _divide(factor * keep, gl.where(r == 0.0, 1.0, r), BRIEF)
        m = top
    else:
        inverse = _divide(1.0, gl.where(r == 0.0, 1.0, r), BRIEF)
        l = l * factor
    is_empty = l == 0.0
    log2_l = _log2(gl.where(is_empty, 1.0, l), BRIEF)
    lse = (m * scale + (max_rounding_error(m, scale) + log2_l)) * LN2
    lse = gl.where(is_empty, -float("inf"), lse) + nan_if_bad
    m = gl.where(is_empty, float("inf"), m)
    return scale_all(acc, inverse + nan_if_bad), lse, m, gl.where(is_empty, 1.0, l)


@gluon.jit
def thread_sums(p):
    """[BLOCK_Q, BLOCK_KV] -> [BLOCK_Q, 4]: what each of the four threads that share a row sums up
    by itself. In the layout of wgmma, thread t of them has the columns 8i + 2t and 8i + 2t + 1."""
    pairs = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def add_sums(l, alpha, weights):
    """l·alpha + the sums of `weights` [BLOCK_Q, 4], with one rounding in every build."""
    return rescale_and_add(l, alpha, thread_sums(weights))


@gluon.jit
def rescale_and_add(l, alpha, sums):
    """l·alpha + sums [BLOCK_Q, 4]."""
    ones = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
    return gl.fma(l, scale_rows(ones, alpha), sums)


@gluon.jit
def round_pairs(weights, dtype: gl.constexpr):
    """weights.to(dtype), two to a register at once.

    LLVM moves a plain conversion of the first weights of a tile down to the loop over blocks, and
    carries single weights around it then: two instructions for each pair in every step."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.bfloat16, is_pure=True, pack=2
        )
    else:  # noqa: RET505, Gluon would go on and return both
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def compute_here(x):
    """x, fp32, computed before anything that follows, whatever ptxas would rather do: it moves
    nothing down across a trap that may depend on it. No arithmetic makes a NaN of these bits."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.b32 p, $1, 0xffc0dead; @p trap; mov.b32 $0, $1; }",
        "=r,r",
        [x],
        gl.float32,
        is_pure=False,
        pack=1,
    )
