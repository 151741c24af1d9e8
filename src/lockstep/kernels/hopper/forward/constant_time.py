"""The softmax of constant-time builds: one pass, with a maximum that runs in every row, and weights
that are exact for scores of any size.

The reference of a row is m·unit, rounded, and weights are exp2(s·unit - m·unit): an FMA and an
exponential, as in other builds. What the rounding adds to all exponents of a row depends on m, so
it is part of the factor by which a row is rescaled.

`unit` is the scale, unless the exponents of m and of the scale add up to LARGEST or more. Then
distinct scores in fp32 are so far apart, next to the maximum, that all weights but that of the
maximum vanish, as they do in a smaller unit: `unit` is the scale over the power of two that takes
the sum below LARGEST. So rounding adds no more than 2^(LARGEST - 24) to an exponent, and no weight
overflows. Rows begin with a maximum below all scores, NO_MAX, which is finite: nothing has to be
selected for those that have seen no key.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import halves
from lockstep.kernels.hopper.common.softmax import max_rounding_error, thread_sums

# By the dtype of weights, which fp16 has up to 2^15.
LARGEST = {"bf16": 29, "fp16": 27}
_EXPONENT = gl.constexpr(0x7F800000)  # of an fp32 number
_ONE = gl.constexpr(0x3F800000)
_TINY = gl.constexpr(0x0E000000)  # 2^-99
NO_MAX = gl.constexpr(-3.4028234663852886e38)


@gluon.constexpr_function
def _largest(dtype):
    """The largest sum of exponents as bits of an fp32 number: one less than LARGEST."""
    return (126 + LARGEST[dtype.name]) << 23


@gluon.jit
def unit_of(m, scale, dtype: gl.constexpr):
    """The factor that takes scores of rows with the maximum m [BLOCK_Q] to log2 units: `scale`, or
    less."""
    LIMIT: gl.constexpr = _largest(dtype)
    bits = (scale + gl.zeros_like(m)).to(gl.int32, bitcast=True)
    # A product has the sum of both exponents, or one more.
    largest = LIMIT - (gl.maximum(bits & _EXPONENT, _TINY) - _ONE)
    exponent = m.to(gl.int32, bitcast=True) & _EXPONENT
    return (bits - gl.maximum(exponent - largest, 0)).to(gl.float32, bitcast=True)


@gluon.jit
def rounding_of(m, scale, dtype: gl.constexpr):
    """The error that rounding m·unit adds to the exponents of rows."""
    return max_rounding_error(m, unit_of(m, scale, dtype))


@gluon.jit
def row_maximum(s):
    """The maximum of each row of s [BLOCK_Q, BLOCK_KV].

    Triton takes the maximum of a thread's numbers one by one, and each has to wait for the one
    before. Here they make groups, which do not wait for each other."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    groups = s.reshape([s.shape[0], 4, s.shape[1] // 32, 8])
    return gl.convert_layout(gl.max(gl.max(gl.max(groups, 1), 1), 1), rows)


@gluon.jit
def _offset_of(m, unit):
    """-m·unit. LLVM would take a negation for a subtraction, and ptxas not for part of a
    product."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 x; neg.f32 x, $1; mul.rn.f32 $0, x, $2; }", "=r,r,r", [m, unit],
        gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def raise_maximum(s, m, rounding, scale, dtype: gl.constexpr):
    """m [BLOCK_Q] raised to the maximum of s [BLOCK_Q, BLOCK_KV], its `rounding_of`, its unit, its
    offset -m·unit; and the factor for all that was summed under the old m, whose `rounding` is
    given."""
    m_new = gl.maximum(m, row_maximum(s))
    unit = unit_of(m_new, scale, dtype)
    offset = _offset_of(m_new, unit)
    alpha = gl.exp2(gl.fma(m, unit, offset) - rounding)
    rounding = gl.fma(m_new, unit, offset)
    return m_new, rounding, unit, offset, alpha


@gluon.jit
def weights_of(s, unit, offset):
    """exp2(s·unit + offset) [BLOCK_Q, ·] fp32, of some columns."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    unit = gl.convert_layout(unit, rows, assert_trivial=True)
    offset = gl.convert_layout(offset, rows, assert_trivial=True)
    return gl.exp2(gl.fma(s, gl.expand_dims(unit, 1), gl.expand_dims(offset, 1)))


@gluon.jit
def whole(left, right, like):
    """The tensor `like` this of which `halves` made left and right."""
    layout: gl.constexpr = like.type.layout
    x = gl.join(left, right).permute((0, 2, 1)).reshape(like.shape)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def sums_in_halves(weights):
    """`thread_sums` of both halves of the columns, added: in the order of other blocks."""
    left, right = halves(weights)
    l = thread_sums(left)
    return l + sums_like(l, right)


@gluon.jit
def sums_like(l, weights):
    """`thread_sums` of some columns, for the threads that have those of l."""
    return gl.convert_layout(thread_sums(weights), l.type.layout, assert_trivial=True)
