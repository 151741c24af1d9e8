"""Accumulators of a warpgroup: their layout, and the order of their registers.

Row 16·warp + 8·i + lane // 4 and column 8·j + 2·(lane % 4) + k of an accumulator are register
4·j + 2·i + k of a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma

ROWS = gl.constexpr(sizes.ROWS)


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product [ROWS, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_operand(columns):
    """The layout of the left operand, in registers, of a product [ROWS, columns]."""
    return gl.DotOperandLayout(0, accumulator(columns), 2)


@gluon.jit
def zeros(columns: gl.constexpr):
    """An accumulator [ROWS, columns] fp32 without products."""
    layout: gl.constexpr = accumulator(columns)
    return gl.zeros([ROWS, columns], gl.float32, layout)


@gluon.jit
def add_product(sums, weights, tile):
    """sums [ROWS, columns] + weights [ROWS, n] times a tile [n, columns], under way."""
    left: gl.constexpr = left_operand(tile.shape[1])
    return warpgroup_mma(gl.convert_layout(weights, left), tile, sums, is_async=True)


@triton.jit
def as_registers(x):
    """An accumulator [ROWS, n] as [n / 4, 256], in the order of its registers: four of thread 0, of
    thread 1, … of 128 threads, then their next four."""
    N: tl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return x.reshape([N // 4, 256])


@triton.jit
def from_registers(x, N: tl.constexpr = 64):
    """The [ROWS, N] of `as_registers`, from its numbers."""
    x = x.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return x.reshape([ROWS, N])
