"""Products of two tiles, in the precision that a call asks for.

PRECISION says what is done with float32 factors; others are multiplied as they are.

    "ieee"    as float32, by the ordinary units: chains of multiply-adds
    "tf32"    as tf32: tensor cores look at 10 bits behind the point, and not at the rest
    "tf32x3"  as float32, by tensor cores: a factor x is cut into x₁, its first bits, and the rest
              x₂; x y is x₁ y₁ + x₁ y₂ + x₂ y₁, each product as tf32. What is left out, x₂ y₂ and
              the last two bits of a rest, is less than the roundings of a sum in float32

Tensor cores cut off where others round. A sum over many keys is therefore carried in float32 by the
ordinary units, and a tile adds one number to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

TF32_BITS: tl.constexpr = tl.constexpr(0xFFFFE000)
HALF_A_STEP: tl.constexpr = tl.constexpr(0x1000)
NO_REST: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def split(x):
    """The first bits of x, a number of tf32, and the rest, which is rounded where a tensor core
    cuts it off.

    A rest takes four instructions, because each warp splits what it multiplies.
    """
    first = (x.to(tl.uint32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
    # Infinity has NaN for a rest, and the smaller of NaN and a number is the number: any that is
    # finite will do.
    rest = tl.minimum(x - first, NO_REST)
    return first, (rest.to(tl.uint32, bitcast=True) + HALF_A_STEP).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b of a [M, K] and b [K, N]: [M, N] fp32."""
    if a.dtype == tl.float32 and PRECISION == "tf32x3":
        a, a_rest = split(a)
        b, b_rest = split(b)
        s = tl.dot(a_rest, b, input_precision="tf32")
        s = tl.dot(a, b_rest, s, input_precision="tf32")
        return tl.dot(a, b, s, input_precision="tf32")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, CHAINS: tl.constexpr = 4):
    """a bᵀ of a [M, D] and b [N, D]: [M, N] fp32, and b aᵀ is its transpose to the bit.

    An "ieee" product is a chain of multiply-adds along D, each of which rounds. Up to four chains,
    each over every fourth element and of 32 at least, err less than one long one. Sums are spelled
    as `fma`: Triton takes a product that is added to something for a request to continue that
    chain.
    """
    HALF: tl.constexpr = a.shape[1] // 2
    if a.dtype == tl.float32 and PRECISION == "ieee" and CHAINS > 1 and HALF >= 32:
        a_even, a_odd = tl.split(tl.reshape(a, [a.shape[0], HALF, 2]))
        b_even, b_odd = tl.split(tl.reshape(b, [b.shape[0], HALF, 2]))
        odd = product(a_odd, b_odd, PRECISION, CHAINS // 2)
        s = tl.fma(odd, 1.0, product(a_even, b_even, PRECISION, CHAINS // 2))
    elif a.dtype == tl.float32 and PRECISION == "tf32x3":
        a, a_rest = split(a)
        b, b_rest = split(b)
        small = tl.dot(a_rest, tl.trans(b), input_precision="tf32")
        small = tl.fma(tl.dot(a, tl.trans(b_rest), input_precision="tf32"), 1.0, small)
        s = tl.fma(tl.dot(a, tl.trans(b), input_precision="tf32"), 1.0, small)
    else:
        s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return s


@triton.jit
def add_weighted(p, v, acc, PRECISION: tl.constexpr):
    """acc + p v. Hidden keys have p = 0; see `nonfinite` for what 0 · v may be."""
    if v.dtype == tl.float32 and PRECISION != "tf32":
        # The product of a tile is a chain of its own, see `product`.
        return tl.fma(dot(p, v, PRECISION), 1.0, acc)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
