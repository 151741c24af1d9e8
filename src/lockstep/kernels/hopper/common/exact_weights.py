"""Large weights are multiplied as they are, not rounded.

A product with V takes the weights rounded to bf16. The roundings of many weights cancel out; that
of a weight with a good part of its row's sum is an error of the whole row. A running maximum has
the weight 1, which is exact. With a fixed maximum the weight of a later, larger score is any
number. So where a block has such a weight, the row is multiplied by the weight as it is rounded
over the weight as it was: its sums and products so far, and all weights to come, whose exponents
have the row's *offset*. Then the large weight is what was multiplied. The factor is within 2^-8
of 1.

The other weights of that block are multiplied as they were, which is off by that factor. What was
multiplied less what is summed is kept beside the sum l, as the row's *residue*, and the output is
divided by l + residue. The rounding of the maximum itself is known (`normalize`).

A weight is large if it raises the sum of its block, in the thread that has it, above the row's
*bar*: at first a part of what the row's first block sums up to, then the largest such sum that was
above. Weights that are alike sum up to a quarter of the first block's sum in each of the four
threads that share a row, so that few blocks have any that are large. A warp votes on it once per
block, and looks for the largest weights only if any of its rows has one. What happens to a row does
not depend on the other rows that voted.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import cut, cut_all, halves, join_all
from lockstep.kernels.hopper.common.softmax import raise_maximum
from lockstep.kernels.hopper.common.thread_numbers import (
    WARPGROUP,
    of_threads,
    per_thread,
    per_weight,
)

# How large a weight is large, over the sum of the first 128 keys: LEAST_LARGE, and SHARE for each
# key that the row sees, but no more than MOST. Over that of 64 keys, NARROW times as much.
LEAST_LARGE, SHARE, MOST = gl.constexpr(0.35), gl.constexpr(1.0 / 10240), gl.constexpr(0.75)
NARROW = gl.constexpr(16.0 / 9.0)

# What `_settle_assembly` writes for a row, by the group of elements in which it does.
OFFSET, SUM, HEIGHT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
ALPHA, ANY, RESIDUE = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)


@gluon.constexpr_function
def float32s(n):
    """Types of `n` results. Triton 3.9 takes no tuple of them that was multiplied in a kernel."""
    return (gl.float32,) * n


@gluon.constexpr_function
def vote_lines(part, bar):
    """PTX that asks if a warp has sums above their bars, in the upper or the lower row of a
    thread."""
    return [
        f"setp.gt.f32 upper, ${part[0]}, ${bar[0]};",
        f"setp.gt.f32 lower, ${part[1]}, ${bar[1]};",
        "or.pred any, upper, lower;",
        "vote.sync.any.pred any, any, 0xffffffff;",
    ]


@gluon.constexpr_function
def _vote_assembly():
    """PTX for a thread with two rows. Operands: two results, sums and bars."""
    lines = [
        ".reg .pred upper, lower, any;",
        *vote_lines((2, 3), (4, 5)),
        "selp.b32 $0, 1, 0, any;",
        "mov.b32 $1, $0;",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def row_lines(r, part, l, bar, offset, residue, alpha):
    """PTX for one row of a thread, whose largest weight is in `top`: writes alpha, and what becomes
    of l, which has the block already, bar, unless it is None, offset and residue."""
    larger = ("upper", "lower")[r]
    lines = [
        f".reg .b32 q{r}, other{r}, both{r};",
        f".reg .pred good{r}, mine{r};",
        f".reg .f32 x{r}, y{r}, d{r}, e{r}, g{r}, old{r};",
        # The largest weight of the row in threads above the bar.
        f"selp.b32 q{r}, top{r}, 0, {larger};",
        f"shfl.sync.bfly.b32 other{r}, q{r}, 1, 0x1f, 0xffffffff;",
        f"max.s32 q{r}, q{r}, other{r};",
        f"shfl.sync.bfly.b32 other{r}, q{r}, 2, 0x1f, 0xffffffff;",
        f"max.s32 q{r}, q{r}, other{r};",
        f"setp.gt.s32 good{r}, q{r}, 0;",
        f"setp.lt.and.s32 good{r}, q{r}, {(127 + 64) << 23}, good{r};",
        # The logarithm of what rounding multiplies it by, and the factor as exponents have it.
        f"mov.b32 x{r}, q{r};",
        f"cvt.rn.bf16x2.f32 both{r}, x{r}, x{r};",
        f"and.b32 both{r}, both{r}, 0xffff0000;",
        f"mov.b32 y{r}, both{r};",
        f"sub.rn.f32 e{r}, y{r}, x{r};",
        f"rcp.approx.ftz.f32 g{r}, x{r};",
        f"mul.rn.f32 d{r}, e{r}, g{r};",
        f"selp.f32 d{r}, d{r}, 0f00000000, good{r};",
        f"mov.b32 old{r}, ${offset};",
        f"fma.rn.f32 ${offset}, d{r}, 0f3FB8AA3B, old{r};",
        f"sub.rn.f32 d{r}, ${offset}, old{r};",
        # exp2, to a third power that is below a rounding.
        f"mul.rn.f32 d{r}, d{r}, 0f3F317218;",
        f"fma.rn.f32 ${alpha}, d{r}, 0f3F000000, 0f3F800000;",
        f"fma.rn.f32 ${alpha}, d{r}, ${alpha}, 0f3F800000;",
        # What is multiplied, less what is summed.
        f"setp.eq.and.s32 mine{r}, q{r}, top{r}, good{r};",
        f"selp.f32 e{r}, e{r}, 0f00000000, mine{r};",
        f"sub.rn.f32 g{r}, 0f3F800000, ${alpha};",
        f"selp.f32 x{r}, ${part}, 0f00000000, good{r};",
        f"fma.rn.f32 e{r}, x{r}, g{r}, e{r};",
        f"fma.rn.f32 ${residue}, ${residue}, ${alpha}, e{r};",
        f"mul.rn.f32 ${l}, ${l}, ${alpha};",
    ]
    if bar is None:
        return lines
    # The bar rises to the largest sum of the row's four threads.
    return [
        *lines,
        f"mov.b32 other{r}, ${part};",
        f"shfl.sync.bfly.b32 both{r}, other{r}, 1, 0x1f, 0xffffffff;",
        f"max.s32 other{r}, other{r}, both{r};",
        f"shfl.sync.bfly.b32 both{r}, other{r}, 2, 0x1f, 0xffffffff;",
        f"max.s32 other{r}, other{r}, both{r};",
        f"@good{r} mov.b32 ${bar}, other{r};",
    ]


@gluon.constexpr_function
def largest_lines(weights, n):
    """PTX for the largest of a thread's n weights in each of its two rows, which `top0` and `top1`
    become; operands from `weights` on."""
    # Weights are not negative: their bits order as they do, and integers have an instruction for
    # the largest of three. Each row has two chains of them, which takes half as long.
    tops = ("top0", "top1", "more0", "more1")
    lines = []
    for i in range(weights, weights + 8, 2):
        lines.append(f"max.s32 {tops[i // 2 % 4]}, ${i}, ${i + 1};")
    for i in range(weights + 8, weights + n):
        lines.append(f"max.s32 {tops[i // 2 % 4]}, {tops[i // 2 % 4]}, ${i};")
    return lines + [f"max.s32 top{r}, top{r}, more{r};" for r in range(2)]


@gluon.constexpr_function
def _settle_assembly(n, halves, products, votes):
    """PTX for a thread with `halves` times `n` weights, and `products` times `n` products.
    Operands: results of products; n others, of which each row has one in every group of four
    elements; the weights of each half; products; n each of sums of the block, sums before it, bars,
    offsets and residues, and what is 0 where the warp is known to have no sum above its bar, unless
    it `votes` here. In the layout of wgmma, the first two of every four elements are in the upper
    row of a thread, the others in its lower row, eight below."""
    found = n * products
    weights = found + n
    acc = weights + n * halves
    part, l, bar, offset, residue, known = (acc + n * (products + i) for i in range(6))
    new_offset, new_l, new_bar, new_residue, alpha = (
        found + 4 * group.value for group in (OFFSET, SUM, HEIGHT, RESIDUE, ALPHA)
    )
    lines = [".reg .pred upper, lower, any;", ".reg .b32 top0, top1, more0, more1;"]
    # From here on, sums and what is beside them are those of the results: so they keep their
    # registers.
    for r in (0, 2):
        lines += [
            f"mov.b32 ${new_offset + r}, ${offset + r};",
            f"add.rn.f32 ${new_l + r}, ${l + r}, ${part + r};",
            f"mov.b32 ${new_bar + r}, ${bar + r};",
            f"mov.b32 ${new_residue + r}, ${residue + r};",
        ]
    vote = vote_lines((part, part + 2), (new_bar, new_bar + 2))
    lines += [f"mov.b32 ${i}, ${acc + i};" for i in range(n * products)]
    lines += vote if votes else [f"setp.ne.s32 any, ${known}, 0;"]
    lines += [f"selp.b32 ${found + 4 * ANY.value}, 1, 0, any;", "@!any bra.uni DONE;"]
    if not votes:
        lines += vote[:2]
    lines += largest_lines(weights, n * halves)
    for r in range(2):
        lines += row_lines(
            r, part + 2 * r, new_l + 2 * r, new_bar + 2 * r, new_offset + 2 * r,
            new_residue + 2 * r, alpha + 2 * r,
        )  # fmt: skip
    for i in range(n * products):
        lines.append(f"mul.rn.f32 ${i}, ${i}, ${alpha + i // 2 % 2 * 2};")
    lines.append("DONE:")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _settle_constraints(n, halves, products):
    outputs, inputs = n * (products + 1), n * (halves + products + 6)
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def first_bar(l, keys, BLOCK_KV: gl.constexpr):
    """The bar [BLOCK_Q, 4] of rows that see so many keys [BLOCK_Q] in all, by the sums l
    [BLOCK_Q, 4] of their first block."""
    rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    large = gl.minimum(keys.to(gl.float32) * SHARE + LEAST_LARGE, MOST)
    if BLOCK_KV < 128:
        large = large * NARROW
    total = gl.sum(l, 1)
    return of_threads(total * gl.convert_layout(0.25 + large, rows), l)


@gluon.jit
def first_offset(m, l, scale):
    """The offset [BLOCK_Q, 4] of rows whose weights are relative to exp2(m·scale)."""
    # Rows that have seen no key measure from 0: exp2(-inf + 0) = 0.
    return of_threads(gl.where(m == -float("inf"), 0.0, -m * scale), l)


@gluon.jit
def no_bar(bar, rows):
    """`bar` [BLOCK_Q, 4], but infinity for `rows`."""
    return gl.where(of_threads(gl.where(rows, 1.0, 0.0), bar) > 0.0, float("inf"), bar)


@gluon.jit
def bar_of_begun(bar, part, keys, BLOCK_KV: gl.constexpr):
    """The bar of rows that had none, behind a block that has these sums."""
    return gl.where(bar == float("inf"), first_bar(part, keys, BLOCK_KV), bar)


@gluon.jit
def rise(s, m, l, offset, scale, rises, is_exact=None, top=None):
    """m and offset of rows, of which those that `rises` names take the maximum of the scores s into
    theirs; and what [BLOCK_Q, 4] this multiplies their sums so far by. Rows that `is_exact` names
    have weights of `exp2_weights_exact`; None for no row. `top` is as in `raise_maximum`."""
    risen, alpha = raise_maximum(s, m, scale, rises, top)
    is_empty = of_threads(gl.where(m == -float("inf"), 1.0, 0.0), l) > 0.0
    stays = of_threads(gl.where(rises, 0.0, 1.0), l) > 0.0
    new = gl.where(stays, offset, first_offset(risen, l, scale))
    factors = gl.exp2(new - offset)
    if is_exact is not None:
        by_offset = of_threads(gl.where(is_exact, 0.0, 1.0), l) > 0.0
        factors = gl.where(by_offset, factors, of_threads(alpha, l))
    # Nothing was summed in rows that are empty.
    return risen, new, gl.where(is_empty, 1.0, factors)


@gluon.jit
def offset_weights(s, offset, scale):
    """p = exp2(s·scale + offset) [BLOCK_Q, BLOCK_KV] fp32, with the offset [BLOCK_Q, 4]."""
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    return gl.exp2(gl.fma(s, zero + scale, per_weight(offset, s)))


@gluon.jit
def offset_weights_in_halves(s, offset, scale):
    """`offset_weights` of 128 keys. ptxas would put all multiplications in front of the
    exponentials; here those of the right half wait for one of the left."""
    AWAITED: gl.constexpr = 7
    layout: gl.constexpr = offset.type.layout
    left, right = halves(s)
    left = offset_weights(left, offset, scale)
    # The offset as it was, but NaN if that weight is not finite: then so is the row's sum.
    offset = gl.fma(per_thread(left, AWAITED, layout), gl.zeros_like(offset), offset)
    right = offset_weights(right, offset, scale)
    both = gl.join(left, right).permute((0, 2, 1)).reshape(s.shape)
    return gl.convert_layout(both, s.type.layout, assert_trivial=True)


@gluon.jit
def offset_factors(offset, m, scale, is_exact):
    """What [BLOCK_Q, 4] makes sums with this offset [BLOCK_Q, 4] relative to exp2(m·scale). Rows
    that `is_exact` names are so already; None for no row."""
    m = of_threads(m, offset)
    error = gl.fma(m, gl.zeros_like(m) + scale, offset)
    error = gl.where(gl.abs(m) < float("inf"), error, 0.0)
    if is_exact is not None:
        error = gl.where(of_threads(gl.where(is_exact, 1.0, 0.0), offset) > 0.0, 0.0, error)
    return gl.exp2(-error)


@gluon.jit
def exceeds(part, bar):
    """1 for all threads of a warp that has sums above their bars, else 0."""
    return gl.inline_asm_elementwise(
        _vote_assembly(), "=r,=r,r,r,r,r", [part, bar], gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def _settle(weights, products, part, l, beside, known, VOTES: gl.constexpr):
    """`settle` of weights and products that are tuples of [BLOCK_Q, ·] with one width; also the
    factors [BLOCK_Q, 4] for products, and 0 where all of the warp's are 1."""
    like = weights[0]
    bar, offset, residue = beside
    N: gl.constexpr = like.shape[0] * like.shape[1] // WARPGROUP
    HALVES: gl.constexpr = len(weights)
    PRODUCTS: gl.constexpr = len(products)
    assembly: gl.constexpr = _settle_assembly(N, HALVES, PRODUCTS, VOTES)
    constraints: gl.constexpr = _settle_constraints(N, HALVES, PRODUCTS)
    sums = (per_weight(part, like), per_weight(l, like))
    kept = (per_weight(bar, like), per_weight(offset, like), per_weight(residue, like))
    operands = weights + products + sums + kept + (per_weight(known, like),)
    types: gl.constexpr = float32s(PRODUCTS + 1)
    done = gl.inline_asm_elementwise(assembly, constraints, operands, types, is_pure=False, pack=N)
    found = done[PRODUCTS]
    layout: gl.constexpr = l.type.layout
    beside = (
        per_thread(found, HEIGHT, layout),
        per_thread(found, OFFSET, layout),
        per_thread(found, RESIDUE, layout),
    )
    factors = (per_thread(found, ALPHA, layout), per_thread(found, ANY, layout))
    return done[:PRODUCTS], per_thread(found, SUM, layout), beside, factors


@gluon.jit
def settle(weights, acc, part, l, beside, any_exceeds, TOGETHER: gl.constexpr = True):
    """Products so far, l [BLOCK_Q, 4] and what is beside it, with a block that has these weights
    [BLOCK_Q, BLOCK_KV] and these sums. `any_exceeds` is what `exceeds` returned, or None.

    A warp jumps over all of it at once if TOGETHER. Else it jumps once more over the products,
    which takes fewer registers; so it does where they come in narrow pieces."""
    known = part
    if any_exceeds is not None:
        known = any_exceeds
    VOTES: gl.constexpr = any_exceeds is None
    # Operands of one instruction have the same width, and results fit into that of 64 columns.
    WIDTH: gl.constexpr = min(acc[len(acc) - 1].shape[1], weights.shape[1])
    if TOGETHER and WIDTH >= 64:
        done, l, beside, _factors = _settle(
            cut(weights, WIDTH), cut_all(acc, WIDTH), part, l, beside, known, VOTES
        )
        acc = join_all(done, acc)
    else:
        _none, l, beside, factors = _settle((weights,), (), part, l, beside, known, VOTES)
        acc = rescale(acc, factors)
    return acc, l, beside


@gluon.constexpr_function
def _rescale_assembly(n, pieces):
    """PTX for a thread with `pieces` times `n` products. Operands: results, products, n factors,
    and n of what is 0 where the warp has factors of 1 alone."""
    every = n * pieces
    factors, known = 2 * every, 2 * every + n
    lines = [
        ".reg .pred any;",
        f"setp.ne.s32 any, ${known}, 0;",
        *(f"mov.b32 ${i}, ${every + i};" for i in range(every)),
        "@!any bra.uni DONE;",
        *(f"mul.rn.f32 ${i}, ${i}, ${factors + i % n};" for i in range(every)),
        "DONE:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _rescale_constraints(n, pieces):
    return ",".join(["=&r"] * (n * pieces) + ["r"] * (n * pieces + 2 * n))


@gluon.jit
def rescale(acc, factors):
    """Products [BLOCK_Q, ·], a tuple, times factors as `_settle` returned them. A warp jumps over
    all of them at once."""
    WIDTH: gl.constexpr = acc[len(acc) - 1].shape[1]
    narrow = cut_all(acc, WIDTH)
    like = narrow[0]
    N: gl.constexpr = like.shape[0] * WIDTH // WARPGROUP
    PIECES: gl.constexpr = len(narrow)
    assembly: gl.constexpr = _rescale_assembly(N, PIECES)
    constraints: gl.constexpr = _rescale_constraints(N, PIECES)
    types: gl.constexpr = float32s(PIECES)
    operands = narrow + (per_weight(factors[0], like), per_weight(factors[1], like))  # noqa: RUF005
    done = gl.inline_asm_elementwise(assembly, constraints, operands, types, is_pure=False, pack=N)
    return join_all(done, acc)
