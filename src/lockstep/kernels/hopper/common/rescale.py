"""Products times factors that are 1 in nearly all tiles: each warp votes on it, and jumps over the
multiplication. A branch of the whole warpgroup would take barriers in every tile."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.thread_numbers import WARPGROUP, per_weight


@gluon.constexpr_function
def _assembly(n):
    """PTX for a thread with `n` products. Operands: `n` results, `n` products and `n` factors. In
    the layout of wgmma, the first two of every four elements are in the upper row of a thread, the
    others in its lower row, eight below."""
    lines = [
        ".reg .pred upper, lower, any;",
        f"setp.neu.f32 upper, ${2 * n}, 0f3F800000;",
        f"setp.neu.f32 lower, ${2 * n + 2}, 0f3F800000;",
        "or.pred any, upper, lower;",
        "vote.sync.any.pred any, any, 0xffffffff;",
        *(f"mov.b32 ${i}, ${n + i};" for i in range(n)),
        "@!any bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)),
        "DONE:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=r"] * n + ["r"] * (2 * n))


@gluon.jit
def rescale(acc, alpha):
    """acc [64, ·], or the upper rows of one, times alpha of its rows."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factors = gl.expand_dims(gl.convert_layout(alpha, rows), 1) + gl.zeros_like(acc)
    return _rescale(acc, factors)


@gluon.jit
def rescale_all(acc, alpha):
    """Pieces [64, ·] times alpha of their rows."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[i], alpha),)  # noqa: RUF005, Gluon does not unpack
    return scaled


@gluon.jit
def rescale_by_threads(acc, factors):
    """The same with factors [64, 4], or [32, 4], of the threads that share a row."""
    return _rescale(acc, per_weight(factors, acc))


@gluon.jit
def rescale_all_by_threads(acc, factors):
    """The same of pieces [64, ·]."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (rescale_by_threads(acc[i], factors),)  # noqa: RUF005
    return scaled


@gluon.jit
def _rescale(acc, factors):
    N: gl.constexpr = acc.shape[0] * acc.shape[1] // WARPGROUP
    assembly: gl.constexpr = _assembly(N)
    constraints: gl.constexpr = _constraints(N)
    return gl.inline_asm_elementwise(
        assembly, constraints, [acc, factors], gl.float32, is_pure=False, pack=N
    )
