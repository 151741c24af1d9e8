"""Large weights of query-invariant builds are not rounded, either: `exact_weights.py` in spans.

Each span begins with the offset that belongs to its maximum, and when it ends, its sums and
products go back to that. So spans are added as they are, whichever program computed them.

The first block of a row is not known to all programs, but its FIRST keys are (`spans.py`). So the
row's *bar* is made of the sum of their weights, and does not rise: the sum of a block, in the
thread that has a large weight, is compared with the bar and with what the thread has summed of the
span so far.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.exact_weights import (
    ALPHA,
    LEAST_LARGE,
    MOST,
    OFFSET,
    RESIDUE,
    SHARE,
    SUM,
    float32s,
    largest_lines,
    row_lines,
    vote_lines,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import cut, cut_all, join_all
from lockstep.kernels.hopper.common.thread_numbers import (
    WARPGROUP,
    of_threads,
    per_thread,
    per_weight,
)


@gluon.constexpr_function
def _settle_in_span_assembly(n, votes, rows):
    """PTX of `settle_in_span` for a thread with `n` weights of one row or of two, as in
    `_settle_assembly`. Operands: n results, of which each row has one in every group of 2 · `rows`
    elements; weights; n each of sums of the block, sums before it, bars, offsets and residues, and
    what is 0 where the warp is known to have no sum above its bar, unless it `votes` here."""
    group = 2 * rows
    weights = n
    part, l, bar, offset, residue, known = (n * (i + 2) for i in range(6))
    new_offset, new_l, new_residue, alpha = (
        group * found.value for found in (OFFSET, SUM, RESIDUE, ALPHA)
    )
    lines = [".reg .pred upper, lower, any;", ".reg .b32 top0, top1, more0, more1;"]
    for r in range(0, group, 2):
        lines += [
            f"mov.b32 ${new_offset + r}, ${offset + r};",
            f"add.rn.f32 ${new_l + r}, ${l + r}, ${part + r};",
            f"mov.b32 ${new_residue + r}, ${residue + r};",
            f"mov.b32 ${alpha + r}, 0f3F800000;",
        ]
    last = group - 2
    vote = vote_lines((part, part + last), (bar, bar + last))
    lines += vote if votes else [f"setp.ne.s32 any, ${known}, 0;"]
    lines.append("@!any bra.uni DONE;")
    if not votes:
        lines += vote[:2]
    for r in range(rows):
        mine = [weights + i for i in range(n) if i // 2 % rows == r]
        lines += [f"max.s32 top{r}, ${mine[0]}, ${mine[1]};"]
        lines += [f"max.s32 more{r}, ${mine[2]}, ${mine[3]};"]
        for k, i in enumerate(mine[4:]):
            top = f"{('top', 'more')[k // 2 % 2]}{r}"
            lines.append(f"max.s32 {top}, {top}, ${i};")
        lines.append(f"max.s32 top{r}, top{r}, more{r};")
    for r in range(rows):
        lines += row_lines(
            r, part + 2 * r, new_l + 2 * r, None, new_offset + 2 * r, new_residue + 2 * r,
            alpha + 2 * r,
        )  # fmt: skip
    lines.append("DONE:")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _settle_in_span_constraints(n):
    return ",".join(["=&r"] * n + ["r"] * (7 * n))


@gluon.jit
def span_bar(first, keys, l):
    """The bar [BLOCK_Q, 4] of rows whose FIRST keys have weights of this sum [BLOCK_Q], the largest
    of which is 1, and so many keys [BLOCK_Q] in all. Each product is an `fma`, so that all kernels
    have the same bar."""
    zero = gl.zeros_like(first)
    large = gl.minimum(gl.fma(keys.to(gl.float32), zero + SHARE, zero + LEAST_LARGE), MOST)
    each = gl.fma(large, zero + 4.0, zero + 1.0)
    return of_threads(gl.fma(gl.maximum(first, 1.0) - 1.0, each, zero + 1.0), l)


@gluon.jit
def end_factors(offset, m, scale):
    """What [BLOCK_Q, 4] takes sums with this offset [BLOCK_Q, 4] back to `first_offset`: 1 where it
    has not changed."""
    # An `fma`, because a compiler may join a product with a later difference, or not.
    first = gl.fma(-m, scale + gl.zeros_like(m), gl.zeros_like(m))
    first = of_threads(gl.where(m == -float("inf"), 0.0, first), offset)
    return gl.exp2(first - offset)


@gluon.jit
def times_factors(x, factors):
    """x times factors of threads [BLOCK_Q, 4], with a rounding of its own in every build."""
    return gl.fma(x, factors, gl.zeros_like(x))


@gluon.jit
def settle_in_span(weights, part, l, bar, offset, residue, any_exceeds):
    """`settle` of one block in a span, whose rows are 64 or 32, without the products: l, offset and
    residue [BLOCK_Q, 4], and the factors [BLOCK_Q, 4] for products so far. Bars are what sums of
    the block are compared with."""
    N: gl.constexpr = weights.shape[0] * weights.shape[1] // WARPGROUP
    known = part
    if any_exceeds is not None:
        known = any_exceeds
    assembly: gl.constexpr = _settle_in_span_assembly(
        N, any_exceeds is None, weights.shape[0] // 32
    )
    constraints: gl.constexpr = _settle_in_span_constraints(N)
    operands = (
        weights,
        per_weight(part, weights),
        per_weight(l, weights),
        per_weight(bar, weights),
        per_weight(offset, weights),
        per_weight(residue, weights),
        per_weight(known, weights),
    )
    found = gl.inline_asm_elementwise(
        assembly, constraints, operands, gl.float32, is_pure=False, pack=N
    )
    layout: gl.constexpr = l.type.layout
    return (
        per_thread(found, SUM, layout),
        per_thread(found, OFFSET, layout),
        per_thread(found, RESIDUE, layout),
        per_thread(found, ALPHA, layout),
    )


@gluon.constexpr_function
def _settle_block_assembly(n, halves, products, votes):
    """PTX of `settle_block` for a thread with `halves` times `n` weights, and `products` times `n`
    products. Operands: results of products; n others, as in `_settle_assembly`; the weights of each
    half; products; n each of sums of the block, sums before it, bars, offsets, residues, of what is
    not 0 if a span begins, and of what is 0 where the warp is known to have no sum above its bar,
    unless it `votes` here."""
    found = n * products
    weights = found + n
    acc = weights + n * halves
    part, l, bar, offset, residue, begins, known = (acc + n * (products + i) for i in range(7))
    new_offset, new_l, new_residue, alpha = (
        found + 4 * group.value for group in (OFFSET, SUM, RESIDUE, ALPHA)
    )
    lines = [".reg .pred upper, lower, any, fresh;", ".reg .b32 top0, top1, more0, more1;"]
    for r in (0, 2):
        lines += [
            f"mov.b32 ${new_offset + r}, ${offset + r};",
            f"add.rn.f32 ${new_l + r}, ${l + r}, ${part + r};",
            f"mov.b32 ${new_residue + r}, ${residue + r};",
        ]
    vote = vote_lines((part, part + 2), (bar, bar + 2))
    lines += [f"mov.b32 ${i}, ${acc + i};" for i in range(n * products)]
    lines += vote if votes else [f"setp.ne.s32 any, ${known}, 0;"]
    lines.append("@!any bra.uni DONE;")
    if not votes:
        lines += vote[:2]
    lines += largest_lines(weights, n * halves)
    for r in range(2):
        lines += row_lines(
            r, part + 2 * r, new_l + 2 * r, None, new_offset + 2 * r, new_residue + 2 * r,
            alpha + 2 * r,
        )  # fmt: skip
    lines += [f"setp.ne.s32 fresh, ${begins}, 0;", "@fresh bra.uni DONE;"]
    lines += [f"mul.rn.f32 ${i}, ${i}, ${alpha + i // 2 % 2 * 2};" for i in range(n * products)]
    lines.append("DONE:")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _settle_block_constraints(n, halves, products):
    outputs, inputs = n * (products + 1), n * (halves + products + 7)
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def settle_block(weights, acc, part, l, bar, offset, residue, begins, any_exceeds):
    """`settle` of one block in a span, of 64 rows: products so far, l, offset and residue. Where a
    span `begins` with the block, products belong to the one before, and stay as they are."""
    known = part
    if any_exceeds is not None:
        known = any_exceeds
    WIDTH: gl.constexpr = 64
    parts = cut(weights, WIDTH)
    products = cut_all(acc, WIDTH)
    like = parts[0]
    N: gl.constexpr = like.shape[0] * WIDTH // WARPGROUP
    HALVES: gl.constexpr = len(parts)
    PRODUCTS: gl.constexpr = len(products)
    assembly: gl.constexpr = _settle_block_assembly(N, HALVES, PRODUCTS, any_exceeds is None)
    constraints: gl.constexpr = _settle_block_constraints(N, HALVES, PRODUCTS)
    begins = gl.full(like.shape, 0, gl.int32, like.type.layout) + begins.to(gl.int32)
    sums = (per_weight(part, like), per_weight(l, like), per_weight(bar, like))
    others = (per_weight(offset, like), per_weight(residue, like), begins, per_weight(known, like))
    types: gl.constexpr = float32s(PRODUCTS + 1)
    done = gl.inline_asm_elementwise(
        assembly, constraints, parts + products + sums + others, types, is_pure=False, pack=N
    )
    found = done[PRODUCTS]
    layout: gl.constexpr = l.type.layout
    return (
        join_all(done[:PRODUCTS], acc),
        per_thread(found, SUM, layout),
        per_thread(found, OFFSET, layout),
        per_thread(found, RESIDUE, layout),
    )
