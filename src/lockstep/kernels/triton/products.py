"""Products of two tiles, in the precision that a call asks for.

PRECISION says what is done with float32 factors; others are multiplied as they are.

    "ieee"    as float32, by the ordinary units: chains of multiply-adds
    "tf32"    as tf32: tensor cores look at 10 bits after the point, and not at the rest
    "bf16x6"  as float32, by tensor cores: a factor is the sum of three numbers of bf16, and x y is
              x₁ y₁ + x₁ y₂ + x₂ y₁ + x₂ y₂ + x₁ y₃ + x₃ y₁. What is left out is less than the
              roundings of a sum in float32
    "terms"   the same of factors that come as their three numbers: see `terms`

Tensor cores cut off where others round. A sum over many keys is therefore carried in float32 by the
ordinary units, and a tile adds one number to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST_BITS: tl.constexpr = tl.constexpr(0xFFFF0000)
NO_REST: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def first_bits(x):
    """The first 16 bits of x, as bf16 and as what is left of x without them."""
    bits = x.to(tl.uint32, bitcast=True)
    first = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return first, x - (bits & FIRST_BITS).to(tl.float32, bitcast=True)


@triton.jit
def split(x, IS_FACTOR: tl.constexpr = True):
    """Three numbers of bf16 whose sum is x, each with the next 8 of its bits. A sum of products is
    not a factor that was given: where it is not finite, it may become NaN."""
    first, rest = first_bits(x)
    if IS_FACTOR:
        # Infinity has NaN for a rest, and the smaller of NaN and a number is the number: any that
        # is finite will do.
        rest = tl.minimum(rest, NO_REST)
    second, rest = first_bits(rest)
    third, _ = first_bits(rest)
    return first, second, third


@triton.jit
def dot_split(a, b, SWAPPED: tl.constexpr = False):
    """a b of factors that are split, as one sum, smallest products first. If SWAPPED, bᵀ aᵀ without
    SWAPPED is its transpose to the bit."""
    a1, a2, a3 = a
    b1, b2, b3 = b
    if SWAPPED:
        s = tl.dot(a3, b1)
        s = tl.dot(a1, b3, s)
        s = tl.dot(a2, b2, s)
        s = tl.dot(a2, b1, s)
        s = tl.dot(a1, b2, s)
    else:
        s = tl.dot(a1, b3)
        s = tl.dot(a3, b1, s)
        s = tl.dot(a2, b2, s)
        s = tl.dot(a1, b2, s)
        s = tl.dot(a2, b1, s)
    return tl.dot(a1, b1, s)


@triton.jit
def product(
    a, b, PRECISION: tl.constexpr, SWAPPED: tl.constexpr = False, CHAINS: tl.constexpr = 4
):  # fmt: skip
    """a bᵀ of a [M, D] and b [N, D]: [M, N] fp32. If SWAPPED, b aᵀ without SWAPPED is its
    transpose to the bit.

    An "ieee" product is a chain of multiply-adds along D, each of which rounds. Up to four chains,
    each over every fourth element and of 32 at least, err less than one long one. Sums are spelled
    as `fma`: Triton takes a product that is added to something for a request to continue that
    chain.
    """
    if PRECISION == "terms":
        b1, b2, b3 = b
        s = dot_split(a, (tl.trans(b1), tl.trans(b2), tl.trans(b3)), SWAPPED)
    elif a.dtype == tl.float32 and PRECISION == "ieee" and CHAINS > 1 and a.shape[1] >= 64:
        HALF: tl.constexpr = a.shape[1] // 2
        a_even, a_odd = tl.split(tl.reshape(a, [a.shape[0], HALF, 2]))
        b_even, b_odd = tl.split(tl.reshape(b, [b.shape[0], HALF, 2]))
        odd = product(a_odd, b_odd, PRECISION, SWAPPED, CHAINS // 2)
        s = tl.fma(odd, 1.0, product(a_even, b_even, PRECISION, SWAPPED, CHAINS // 2))
    elif a.dtype == tl.float32 and PRECISION == "bf16x6":
        s = dot_split(split(a), split(tl.trans(b)), SWAPPED)
    else:
        s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return s


@triton.jit
def add_weighted(p, v, acc, PRECISION: tl.constexpr):
    """acc + p v. Hidden keys have p = 0; see `nonfinite` for what 0 · v may be."""
    # The product of a tile of float32 is a chain of its own, see `product`.
    if PRECISION == "terms":
        # p may be a product, and what is left of it without its first bits a sum: adding 0, which
        # rounds nothing, lets no compiler join the two.
        acc = tl.fma(dot_split(split(p + 0.0, False), v), 1.0, acc)
    elif v.dtype == tl.float32 and PRECISION == "bf16x6":
        acc = tl.fma(dot_split(split(p, False), split(v)), 1.0, acc)
    elif v.dtype == tl.float32 and PRECISION == "ieee":
        acc = tl.fma(tl.dot(p, v, input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc
