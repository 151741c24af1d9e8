"""Parts of a softmax, folded one after another, as all GPU kernels do.

A part (m, l, acc) is the softmax of some of the keys of a row: the maximum of their scores, the sum
of their weights relative to it, and their values times these weights. A product that is later added
to something is written as an `fma`: left to itself, a compiler joins product and sum where it sees
both, and cannot where one was stored in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep import numerics

LN2: tl.constexpr = tl.constexpr(numerics.LN2)


@triton.jit
def fold_weights(m, part_m, unit):
    """The new maximum, and the factors, relative to it, of the parts so far and of one with
    `part_m`."""
    m_new = tl.maximum(m, part_m)
    origin = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, tl.exp2((m - origin) * unit), tl.exp2((part_m - origin) * unit)


@triton.jit
def add_part(l, acc, part_l, part_acc, keep, add):
    """The sums (l, acc) of the parts so far with those of one more part, by these factors."""
    acc = tl.fma(acc, tl.expand_dims(keep, -1), part_acc * tl.expand_dims(add, -1))
    return tl.fma(l, keep, part_l * add), acc


@triton.jit
def fold(m, l, acc, part_m, part_l, part_acc, unit):
    """The state (m, l, acc) of the parts so far with one more part."""
    m, keep, add = fold_weights(m, part_m, unit)
    l, acc = add_part(l, acc, part_l, part_acc, keep, add)
    return m, l, acc


@triton.jit
def score_of_sink(sink, natural):
    """A sink as a score; finite even where the scale is next to nothing."""
    return tl.minimum(tl.maximum(sink / natural, -3.0e38), 3.0e38)


@triton.jit
def fold_sink(m, l, acc, sink, natural, unit):
    """A sink is a part without a value; -inf is none."""
    score = tl.where(sink == float("-inf"), sink, score_of_sink(sink, natural))
    m, keep, add = fold_weights(m, score, unit)
    return m, tl.fma(l, keep, add), acc * tl.expand_dims(keep, -1)


@triton.jit
def close(m, l, acc, natural):
    """The result (out, lse) of all parts; `natural` turns scores into natural units."""
    total = tl.where(l == 0.0, 1.0, l)
    # Adding 0 makes one zero of the two.
    out = tl.fma(acc, tl.expand_dims(1.0 / total, -1), 0.0)
    return out, tl.fma(tl.log2(total), LN2, m * natural)


@triton.jit
def store_statistics(statistics_ptr, row, m, l, mask):
    """(m, l) as `Kernel` defines them, of rows numbered `row`."""
    is_empty = l == 0.0
    at = statistics_ptr + tl.cast(row, tl.int64) * 2
    tl.store(at, tl.where(is_empty, float("inf"), m), mask=mask)
    tl.store(at + 1, tl.where(is_empty, 1.0, l), mask=mask)
