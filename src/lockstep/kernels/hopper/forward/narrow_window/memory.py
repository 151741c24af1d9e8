"""Shared memory of `kernel.py`: queries and keys by panels of 64 columns, and views of them.

Keys come in steps of 16, and a tile may begin with any step.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, reinterpret

# Keys of a step, and columns of a panel: a tile in shared memory has panels one after the other.
STEP, PANEL = gl.constexpr(16), gl.constexpr(64)


@gluon.constexpr_function
def strips(columns):
    """Columns as strips (start, width) of which each lies in one panel: powers of two."""
    found = []
    for start in range(0, columns, 64):
        rest, at = min(columns - start, 64), start
        for bit in (64, 32, 16):
            if rest & bit:
                found.append((at, bit))
                at += bit
    return tuple(found)


@gluon.constexpr_function
def n_strips(columns):
    return len(strips(columns))


@gluon.constexpr_function
def strip_start(columns, i):
    return strips(columns)[i][0]


@gluon.constexpr_function
def strip_width(columns, i):
    return strips(columns)[i][1]


@gluon.constexpr_function
def panels(columns):
    return -(-columns // 64)


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.jit
def allocate_queries(desc, COLUMNS: gl.constexpr):
    """Shared memory for a tile of queries, by panels."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    shape: gl.constexpr = [panels(COLUMNS), ROWS, PANEL]
    return gl.allocate_shared_memory(desc.dtype, shape, layout)


@gluon.jit
def allocate_keys(desc, N: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for N keys, or values, by panels and steps."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    shape: gl.constexpr = [panels(COLUMNS) * N // STEP, STEP, PANEL]
    return gl.allocate_shared_memory(desc.dtype, shape, layout)


@gluon.jit
def box_of(memory, desc, at):
    """The place of a box of a tensor map."""
    return reinterpret(memory.index(at), memory.dtype, desc.block_shape, desc.layout)


@gluon.jit
def strip_of_rows(rows, COLUMNS: gl.constexpr, i: gl.constexpr):
    """The i-th strip of columns in a panel that has it."""
    WIDTH: gl.constexpr = strip_width(COLUMNS, i)
    return rows if WIDTH == PANEL else rows.slice(strip_start(COLUMNS, i) % PANEL, WIDTH, dim=1)


@gluon.jit
def strip_of_tile(memory, COLUMNS: gl.constexpr, i: gl.constexpr):
    """The i-th strip of columns of a tile of queries."""
    return strip_of_rows(memory.index(strip_start(COLUMNS, i) // PANEL), COLUMNS, i)


@gluon.jit
def strip_of_keys(memory, at, N: gl.constexpr, COLUMNS: gl.constexpr, i: gl.constexpr):
    """The i-th strip of columns of N keys from step `at` on."""
    STEPS: gl.constexpr = memory.shape[0] // panels(COLUMNS)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    step = memory.index(at + strip_start(COLUMNS, i) // PANEL * STEPS)
    # A view of more than the step: see `VIEWS_GROW`.
    return strip_of_rows(reinterpret(step, memory.dtype, [N, PANEL], layout), COLUMNS, i)
