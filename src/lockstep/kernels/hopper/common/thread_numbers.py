"""Numbers [BLOCK_Q, 4] of the four threads which share a row, as `thread_sums` has them.

In the layout of wgmma, thread t of them has the columns 8i + 2t and 8i + 2t + 1 of a row.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon

WARPGROUP = gl.constexpr(sizes.WARPGROUP)


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def per_weight(x, weights):
    """Numbers of threads for each of their weights [BLOCK_Q, BLOCK_KV]."""
    wide = gl.expand_dims(gl.expand_dims(x, 1), 3)
    shape: gl.constexpr = [weights.shape[0], weights.shape[1] // 8, 4, 2]
    zero = gl.full(shape, 0, x.dtype, wide.type.layout)
    wide, _ = gl.broadcast(wide, zero)
    layout: gl.constexpr = weights.type.layout
    return gl.convert_layout(wide.reshape(weights.shape), layout, assert_trivial=True)


@gluon.jit
def per_thread(x, i: gl.constexpr, LAYOUT: gl.constexpr):
    """The number of each thread in each row that is the first of the i-th two of its weights; with
    i = 0, `per_weight` undone."""
    HALVINGS: gl.constexpr = _log2(x.shape[1] // 8)
    x, _ = x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]).split()
    for step in gl.static_range(HALVINGS):
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)).split()
        x = right if (i >> (HALVINGS - 1 - step)) & 1 else left
    return gl.convert_layout(x.reshape([x.shape[0], 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def of_threads(x, l):
    """x [BLOCK_Q] for each of the threads that share a row, with the layout of l [BLOCK_Q, 4]."""
    rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return gl.expand_dims(gl.convert_layout(x, rows), 1) + gl.zeros_like(l)


@gluon.jit
def of_rows(x, LAYOUT: gl.constexpr):
    """[BLOCK_Q] of what the threads that share a row have in common."""
    return gl.convert_layout(gl.max(x, 1), LAYOUT)


@gluon.jit
def of_first_thread(x):
    """x [BLOCK_Q] as the first of the threads that share a row has it: each may have worked out
    another last bit."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1c1f, 0xffffffff;",
        "=f,f", [x], gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
