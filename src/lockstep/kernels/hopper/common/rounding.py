"""What rounding the weights to bf16 changes about the sum of a row.

A product with V takes the weights rounded to bf16, the sum adds them unrounded. The roundings of
many weights cancel out; that of one weight which outweighs all others is an error of the whole row.
That of the maximum is known (`normalize`), and a row with a running maximum needs no more. With a
fixed maximum later weights may be larger. Most builds have `exact_weights.py` for it. In those with
spans or a window on the left their rounding errors are kept beside the sum l, as the row's
*residue*, and the output is divided by l + residue.

A weight can matter that much only if the sum of its block, in the thread that has it, exceeds all
that the thread has summed before. In rows whose weights are alike this ends after two or three
blocks. So a warp votes on it once per block, and looks for the largest weights only if any of its
rows may need them. What is added to a row does not depend on the other rows that voted.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.thread_numbers import per_thread, per_weight


@gluon.constexpr_function
def _assembly(n):
    """PTX for a thread with `n` weights. Operands: `n` results, of which $0 and $2 are written, and
    `n` each of weights, sums of the block, sums before it, and residues. In the layout of wgmma,
    the first two of every four elements are in the upper row of a thread, the others in its lower
    row, eight below."""
    weights, part, before, residue = n, 2 * n, 3 * n, 4 * n
    lines = [
        ".reg .pred upper, lower, any;",
        ".reg .b32 top_upper, top_lower, both;",
        ".reg .f32 r_upper, r_lower, x_upper, x_lower, y_upper, y_lower;",
        f"mov.b32 r_upper, ${residue};",
        f"mov.b32 r_lower, ${residue + 2};",
        f"setp.gt.f32 upper, ${part}, ${before};",
        f"setp.gt.f32 lower, ${part + 2}, ${before + 2};",
        "or.pred any, upper, lower;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        "@!any bra.uni DONE;",
    ]
    # Weights are not negative: their bits order as they do, and integers have an instruction for
    # the largest of three.
    for top, first in (("top_upper", weights), ("top_lower", weights + 2)):
        lines.append(f"max.s32 {top}, ${first}, ${first + 1};")
        for i in range(first + 4, first + n, 4):
            lines.append(f"max.s32 {top}, {top}, ${i};")
            lines.append(f"max.s32 {top}, {top}, ${i + 1};")
    lines += [
        "mov.b32 x_upper, top_upper;",
        "mov.b32 x_lower, top_lower;",
        "cvt.rn.bf16x2.f32 both, x_lower, x_upper;",
        "shl.b32 top_upper, both, 16;",
        "and.b32 top_lower, both, 0xffff0000;",
        "mov.b32 y_upper, top_upper;",
        "mov.b32 y_lower, top_lower;",
        "sub.f32 y_upper, y_upper, x_upper;",
        "sub.f32 y_lower, y_lower, x_lower;",
        "@upper add.f32 r_upper, r_upper, y_upper;",
        "@lower add.f32 r_lower, r_lower, y_lower;",
        "DONE:",
        "mov.b32 $0, r_upper;",
        "mov.b32 $2, r_lower;",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _assembly_of_row(n):
    """`_assembly` of a thread whose weights are all of one row; $0 is written."""
    weights, part, before, residue = n, 2 * n, 3 * n, 4 * n
    lines = [
        ".reg .pred larger, any;",
        ".reg .b32 top, both;",
        ".reg .f32 r, x, y;",
        f"mov.b32 r, ${residue};",
        f"setp.gt.f32 larger, ${part}, ${before};",
        "vote.sync.any.pred any, larger, 0xffffffff;",
        "@!any bra.uni DONE;",
        f"max.s32 top, ${weights}, ${weights + 1};",
        *(f"max.s32 top, top, ${i};" for i in range(weights + 2, weights + n)),
        "mov.b32 x, top;",
        "cvt.rn.bf16x2.f32 both, x, x;",
        "and.b32 both, both, 0xffff0000;",
        "mov.b32 y, both;",
        "sub.f32 y, y, x;",
        "@larger add.f32 r, r, y;",
        "DONE:",
        "mov.b32 $0, r;",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=r"] * n + ["r"] * (4 * n))


@gluon.jit
def sums_before(l, m):
    """The sums that `add_residue` compares a block's with: l, but infinity for rows that have not
    seen a key. Their first block has the maximum."""
    rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    first = gl.where(m == -float("inf"), float("inf"), 0.0)
    return l + gl.expand_dims(gl.convert_layout(first, rows), 1)


@gluon.jit
def add_residue(residue, weights, part, before):
    """`residue` [BLOCK_Q, 4] of threads, with the rounding errors of the largest weights of a block
    where its sum `part` exceeds the sum `before` it. BLOCK_Q is 64, or 32 where each thread has
    weights of one row."""
    N: gl.constexpr = weights.shape[0] * weights.shape[1] // 128
    assembly: gl.constexpr = _assembly(N) if weights.shape[0] == 64 else _assembly_of_row(N)
    constraints: gl.constexpr = _constraints(N)
    operands = [
        weights,
        per_weight(part, weights),
        per_weight(before, weights),
        per_weight(residue, weights),
    ]
    results = gl.inline_asm_elementwise(
        assembly, constraints, operands, gl.float32, is_pure=False, pack=N
    )
    layout: gl.constexpr = residue.type.layout
    return per_thread(results, 0, layout)
