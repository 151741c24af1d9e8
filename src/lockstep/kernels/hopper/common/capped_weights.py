"""Weights of scores under a softcap: p = exp2(softcap·log2(e)·tanh(x) + offset), where x is
s·scale / softcap.

Most scores are well below the cap. There tanh is an odd polynomial, and a weight takes one
instruction of the unit for exponentials, as it does without a cap. A row goes by the largest score
that it has in a block: up to TIERS[0] a short polynomial, up to TIERS[1] a longer one, and beyond
1 - 2 / (1 + e^2x), of which two scores share a reciprocal, 1/a = b / (a·b). So its bits depend on
its own scores alone. Each warp votes whether all of its rows are in the first tier, and what it
needs besides if they are not. All ways are off by 2^-22 of the cap at most.

Sums of weights come with them, as `thread_sums` has them: where they are added, ptxas puts other
instructions between exponentials.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.division import reciprocal
from lockstep.kernels.hopper.common.exact_weights import float32s
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.scores import LOG2E
from lockstep.kernels.hopper.common.softmax import thread_sums
from lockstep.kernels.hopper.common.thread_numbers import WARPGROUP, per_thread, per_weight

# tanh x / x = sum of coefficients[k] · x^2k up to an end of x.
TIERS = (
    ((0.999999046, -0.333182782, 0.127940521), 0.25),
    ((0.999999583, -0.333310694, 0.133046225, -0.0524672195, 0.0180136412, -0.00371357449), 0.875),
)
# The last coefficient times powers of scale / softcap is a normal number of float32 with room to
# spare, or the polynomial is not for this cap.
SMALLEST, LARGEST = 1e-36, 1e30
# So many scores at a time are on their way to weights, and their exponents wait for the weights
# before those of this many times as many: ptxas would put most exponentials behind everything else.
GROUP, AHEAD = 8, 2


@gluon.constexpr_function
def _hex(x):
    # Triton takes no function of a module that is imported outside.
    import struct

    return "0f" + struct.pack(">f", x).hex().upper()


@gluon.constexpr_function
def _coefficient_lines(tier, coefficients):
    """PTX: a0, a1 ... of a tier are the coefficients of a polynomial of s², which times s is the
    exponent without its offset; from `unit`, scale / softcap, and `height`, softcap·log2(e).
    `unfit` of the tier says that they are none that float32 has room for."""
    n = len(coefficients)
    names = [f"a{tier}_{k}" for k in range(n)]
    lines = [
        f".reg .f32 square{tier}, power{tier}, {', '.join(names)};",
        f".reg .pred unfit{tier};",
        f"mul.f32 square{tier}, unit, unit;",
        f"mul.f32 power{tier}, unit, height;",
        f"mul.f32 {names[0]}, power{tier}, {_hex(coefficients[0])};",
    ]
    for k in range(1, n):
        lines += [
            f"mul.f32 power{tier}, power{tier}, square{tier};",
            f"mul.f32 {names[k]}, power{tier}, {_hex(coefficients[k])};",
        ]
    return [
        *lines,
        f"abs.f32 power{tier}, {names[-1]};",
        f"setp.lt.f32 unfit{tier}, power{tier}, {_hex(SMALLEST)};",
        f"setp.gt.or.f32 unfit{tier}, power{tier}, {_hex(LARGEST)}, unfit{tier};",
    ]


@gluon.constexpr_function
def _polynomial_lines(coefficients, s, offset, exponent, if_row=""):
    """PTX for the exponent of a weight by coefficients of these names; it stays as it is where the
    guard `if_row` does not hold."""
    return [
        "{ .reg .f32 z, w;",
        f"mul.f32 z, {s}, {s};",
        f"fma.rn.f32 w, {coefficients[-1]}, z, {coefficients[-2]};",
        *(f"fma.rn.f32 w, w, z, {c};" for c in coefficients[-3::-1]),
        f"{if_row} fma.rn.f32 {exponent}, {s}, w, {offset};",
        "}",
    ]


@gluon.constexpr_function
def _reciprocal_lines(x, y, offset, if_row):
    """PTX for the exponents of two weights of a row, which x and y become, of any scores."""
    lines = ["{ .reg .f32 a, b, inverse;"]
    for s, e in ((x, "a"), (y, "b")):
        lines += [
            f"mul.f32 {e}, {s}, doubled;",
            # Up to 2^62, the product of both is finite, and tanh is 1 from there on. A NaN stays
            # one.
            f"min.NaN.f32 {e}, {e}, {_hex(62.0)};",
            f"ex2.approx.ftz.f32 {e}, {e};",
            f"sub.f32 {e}, {_hex(-1.0)}, {e};",
        ]
    lines += ["mul.f32 inverse, a, b;", "rcp.approx.ftz.f32 inverse, inverse;"]
    for s, other in ((x, "b"), (y, "a")):
        lines += [
            f"mul.f32 {other}, inverse, {other};",
            f"fma.rn.f32 {other}, {other}, fall, height;",
            f"{if_row} add.f32 {s}, {other}, {offset};",
        ]
    return [*lines, "}"]


@gluon.constexpr_function
def _maxima_lines(n, s):
    """PTX for the largest scores of a thread in its two rows, `top0` and `top1`, in units of the
    cap. NaN is none."""
    # Each row has two chains, which takes half as long.
    tops = ("top0", "top1", "more0", "more1")
    lines = [f".reg .f32 {', '.join(tops)}, {', '.join(f'size{i}' for i in range(n))};"]
    lines += [f"abs.f32 size{i}, ${s + i};" for i in range(n)]
    for i in range(0, 8, 2):
        lines.append(f"max.f32 {tops[i // 2]}, size{i}, size{i + 1};")
    for i in range(8, n):
        lines.append(f"max.f32 {tops[i // 2 % 4]}, {tops[i // 2 % 4]}, size{i};")
    for r in range(2):
        lines += [f"max.f32 top{r}, top{r}, more{r};", f"mul.f32 top{r}, top{r}, unit;"]
    return lines


@gluon.constexpr_function
def _sum_lines(first, end):
    """PTX: `sum0` and `sum1`, those of a thread's two rows, with the weights from `first` to `end`
    in the order of `thread_sums`: of two at a time, one after the other."""
    lines = []
    for i in range(first, end, 2):
        to = f"sum{i // 2 % 2}"
        if i < 4:
            lines.append(f"add.f32 {to}, ${i}, ${i + 1};")
        else:
            lines += [f"add.f32 pair, ${i}, ${i + 1};", f"add.f32 {to}, {to}, pair;"]
    return lines


@gluon.constexpr_function
def _run_lines(n, s, offset, coefficients):
    """PTX for weights and sums of rows whose exponents are polynomials: of each of the two rows of
    a thread, the names of its coefficients."""
    rows = (offset, offset + 2)
    lines = [
        # 0, which ptxas does not know: scales are positive.
        ".reg .b32 nil;",
        "mov.b32 nil, unit;",
        "shr.u32 nil, nil, 31;",
        *(f".reg .b32 from{r}_{g};" for r in range(2) for g in range(n // GROUP)),
    ]
    for g in range(n // GROUP):
        for r in range(2):
            lines.append(
                f"mov.b32 from{r}_{g}, ${rows[r]};"
                if g < AHEAD
                else f"lop3.b32 from{r}_{g}, awaited{r}_{g - AHEAD}, nil, ${rows[r]}, 0xea;"
            )
        for i in range(g * GROUP, (g + 1) * GROUP):
            r = i // 2 % 2
            lines += _polynomial_lines(coefficients[r], f"${s + i}", f"from{r}_{g}", f"e{i}")
            lines.append(f"ex2.approx.ftz.f32 ${i}, e{i};")
        lines += _sum_lines(g * GROUP, (g + 1) * GROUP)
        for r in range(2):
            lines += [f".reg .b32 awaited{r}_{g};", f"mov.b32 awaited{r}_{g}, sum{r};"]
    return ["{", *lines, "}"]


@gluon.constexpr_function
def _tier_of_rows_lines():
    """PTX: whether a row is above all tiers, `high`, and its coefficients `c`, of as many terms as
    the last tier has: those of a lower tier end with zeros, which add nothing."""
    first, end = TIERS[0]
    second, end_of_second = TIERS[1]
    lines = [".reg .pred low0, low1, high0, high1;"]
    for r in range(2):
        names = [f"c{r}_{k}" for k in range(len(second))]
        lines += [
            f".reg .f32 {', '.join(names)};",
            f"setp.le.and.f32 low{r}, top{r}, {_hex(end)}, !unfit0;",
            f"setp.le.and.f32 high{r}, top{r}, {_hex(end_of_second)}, !unfit1;",
            f"or.pred high{r}, high{r}, low{r};",
            f"not.pred high{r}, high{r};",
            *(
                f"selp.f32 {name}, {f'a0_{k}' if k < len(first) else _hex(0.0)}, a1_{k}, low{r};"
                for k, name in enumerate(names)
            ),
        ]
    return lines


@gluon.constexpr_function
def _above_lines(n, s, offset, coefficients):
    """PTX for weights and sums where some rows of a warp are above all tiers."""
    lines = [f"mov.f32 e{i}, ${s + i};" for i in range(n)]
    lines += [
        # Where all rows are, nothing is a polynomial.
        "and.pred any, high0, high1;",
        "vote.sync.all.pred any, any, 0xffffffff;",
        "@any bra.uni NO_POLYNOMIAL;",
    ]
    for i in range(n):
        r = i // 2 % 2
        lines += _polynomial_lines(
            coefficients[r], f"e{i}", f"${offset + i}", f"e{i}", f"@!high{r}"
        )
    lines += [
        "NO_POLYNOMIAL:",
        ".reg .f32 doubled, fall;",
        f"mul.f32 doubled, unit, {_hex(2 * LOG2E.value)};",
        "add.f32 fall, height, height;",
    ]
    for i in range(0, n, 2):
        guard = f"@high{i // 2 % 2}"
        lines += _reciprocal_lines(f"e{i}", f"e{i + 1}", f"${offset + i}", guard)
    lines += [f"ex2.approx.ftz.f32 ${i}, e{i};" for i in range(n)]
    return [*lines, *_sum_lines(0, n)]


@gluon.constexpr_function
def _assembly(n):
    """PTX for a thread with n scores. Operands: n weights, n times the sum of the row's, n scores,
    n offsets, and n times each scale / softcap and softcap·log2(e). In the layout of wgmma, the
    first two of every four elements are in the upper row of a thread, the others in its lower
    row."""
    sums, s, offset, unit, height = n, 2 * n, 3 * n, 4 * n, 5 * n
    first, end = TIERS[0]
    second = TIERS[1][0]
    coefficients = [[f"c{r}_{k}" for k in range(len(second))] for r in range(2)]
    first_names = [f"a0_{k}" for k in range(len(first))]
    lines = [
        ".reg .pred large, any;",
        f".reg .f32 unit, height, sum0, sum1, pair, {', '.join(f'e{i}' for i in range(n))};",
        f"mov.f32 unit, ${unit};",
        f"mov.f32 height, ${height};",
        *_coefficient_lines(0, first),
        *_maxima_lines(n, s),
        f"setp.gt.or.f32 large, top0, {_hex(end)}, unfit0;",
        f"setp.gt.or.f32 large, top1, {_hex(end)}, large;",
        "vote.sync.any.pred large, large, 0xffffffff;",
        "@large bra.uni LARGE;",
        *_run_lines(n, s, offset, (first_names, first_names)),
        "bra.uni DONE;",
        "LARGE:",
        *_coefficient_lines(1, second),
        *_tier_of_rows_lines(),
        "or.pred any, high0, high1;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "@any bra.uni ABOVE;",
        *_run_lines(n, s, offset, coefficients),
        "bra.uni DONE;",
        "ABOVE:",
        *_above_lines(n, s, offset, coefficients),
        "DONE:",
    ]
    lines += [f"mov.f32 ${sums + i}, sum{i // 2 % 2};" for i in range(n)]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=&r"] * (2 * n) + ["r"] * (4 * n))


@gluon.jit
def _weights(s, offset, scale_over_cap, softcap):
    N: gl.constexpr = s.shape[0] * s.shape[1] // WARPGROUP
    assembly: gl.constexpr = _assembly(N)
    constraints: gl.constexpr = _constraints(N)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    operands = [s, offset, zero + scale_over_cap, zero + softcap * LOG2E]
    types: gl.constexpr = float32s(2)
    weights, sums = gl.inline_asm_elementwise(
        assembly, constraints, operands, types, is_pure=False, pack=N
    )
    like = thread_sums(zero)
    layout: gl.constexpr = like.type.layout
    return weights, per_thread(sums, 0, layout)


@gluon.jit
def capped_maxima(top, scale_over_cap, softcap):
    """The largest scores of rows [BLOCK_Q] as weights take them, in log2 units; -inf stays it."""
    height = softcap * LOG2E
    # exp2 may overflow to inf, which makes the reciprocal 0.
    r = reciprocal(1.0 + gl.exp2(top * (scale_over_cap * 2.0 * LOG2E)))
    zero = gl.zeros_like(top)
    capped = gl.fma(r, zero - 2.0 * height, zero + height)
    return gl.where(top == -float("inf"), top, capped)


@gluon.jit
def capped_weights(s, m, scale_over_cap, softcap):
    """Weights [BLOCK_Q, BLOCK_KV] of scores q·k relative to m [BLOCK_Q] in log2 units, and the sums
    [BLOCK_Q, 4] of `thread_sums`."""
    # Rows that have seen no key measure from 0.
    offset = gl.expand_dims(gl.where(m == -float("inf"), 0.0, -m), 1) + gl.zeros_like(s)
    return _weights(s, offset, scale_over_cap, softcap)


@gluon.jit
def capped_offset_weights(s, offset, scale_over_cap, softcap):
    """The same with the offset [BLOCK_Q, 4] of `exact_weights.py`."""
    return _weights(s, per_weight(offset, s), scale_over_cap, softcap)
