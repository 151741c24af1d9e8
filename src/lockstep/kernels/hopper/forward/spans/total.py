"""Where the products of the spans that have ended are kept: `common/spans.py`.

They take as many registers as the products under way, for which there may be no room. Those of the
last columns, TOTAL_COLUMNS of a build, are in shared memory, in the order of the registers: a
thread reads what it wrote. At D 128 that is where out is on its way to global memory.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import as_registers, from_registers, zeros
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, reinterpret, tma_store_wait


@gluon.jit
def allocate_total(COLUMNS: gl.constexpr):
    """Shared memory for the products of so many columns."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [COLUMNS // 4, 256], layout)


@gluon.jit
def in_memory_of_out(o_smem):
    """Shared memory for the products of 64 columns, where 128 of out leave."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(o_smem, gl.float32, [16, 256], layout)


@gluon.jit
def empty_products(COLUMNS: gl.constexpr, IN_MEMORY: gl.constexpr):
    """The products in registers before the first span."""
    found = ()
    if COLUMNS > IN_MEMORY:
        found = (zeros(COLUMNS - IN_MEMORY),)
    return found


@gluon.jit
def add_products(total, memory, keep, acc, add, is_first, IN_MEMORY: gl.constexpr):
    """The products of a span that ended, acc, times `add` [ROWS], and those before times `keep`;
    None is 1. The first span finds nothing in memory."""
    parts = _parts(acc[0], IN_MEMORY)
    kept = ()
    for i in gl.static_range(len(total)):
        x = _fold(_like(total[i], parts[i]), keep, parts[i], add)
        kept = kept + (_like(x, total[i]),)  # noqa: RUF005, Gluon does not unpack
    if IN_MEMORY > 0:
        part = parts[len(total)]
        if add is not None:
            part = part * _rows_of(add, part)
        flat = as_registers(part)
        if is_first:
            # Out of the tile before may not have left yet.
            tma_store_wait(0)
            flat = flat + 0.0
        else:
            before = memory.load(flat.type.layout)
            if keep is None:
                flat = before + flat
            else:
                flat = gl.fma(before, as_registers(_rows_of(keep, part)), flat)
        memory.store(flat)
    return kept


@gluon.jit
def all_products(total, memory, keep, acc, add, IN_MEMORY: gl.constexpr):
    """`add_products` of the last span, as accumulators of all columns."""
    like: gl.constexpr = acc[0].type.layout
    parts = _parts(acc[0], IN_MEMORY)
    found = ()
    for i in gl.static_range(len(total)):
        x = _fold(_like(total[i], parts[i]), keep, parts[i], add)
        found = found + (x,)  # noqa: RUF005
    if IN_MEMORY > 0:
        part = parts[len(total)]
        flat = as_registers(part)
        before = _like(from_registers(memory.load(flat.type.layout), IN_MEMORY), part)
        found = found + (_fold(before, keep, part, add),)  # noqa: RUF005
    x = found[0]
    if len(found) == 2:
        x = _joined(x, found[1])
    return (gl.convert_layout(x, like, assert_trivial=True),)


@gluon.jit
def _parts(x, IN_MEMORY: gl.constexpr):
    """Columns of x [ROWS, ·] that are kept apart, those in memory last."""
    if IN_MEMORY == 0 or x.shape[1] == IN_MEMORY:
        return (x,)
    else:  # noqa: RET505, Gluon would go on and return both
        return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _joined(a, b):
    """x of `_parts` a and b."""
    return gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _like(x, y):
    return gl.convert_layout(x, y.type.layout, assert_trivial=True)


@gluon.jit
def _rows_of(factor, part):
    """A factor [ROWS] for each product of a part [ROWS, ·]."""
    rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    factor = gl.convert_layout(factor, rows, assert_trivial=True)
    return gl.expand_dims(factor, 1) + gl.zeros_like(part)


@gluon.jit
def _fold(total, keep, part, add):
    """total · keep + part · add for one part [ROWS, ·]; a factor that is None is 1."""
    if add is not None:
        part = part * _rows_of(add, part)
    if keep is None:
        return total + part
    else:  # noqa: RET505
        return gl.fma(total, _rows_of(keep, part), part)
