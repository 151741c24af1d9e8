"""Parts of some rows, folded out of registers: a few are loaded at once, and folded then."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.parts import fold


@gluon.jit
def fold_from_memory(
    pointers, places, column, begin, count, n_rows, unit, DV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, AT_ONCE: gl.constexpr, layout: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of the parts from `begin` to `count`, from a column on. `pointers`: those of the
    parts and of their numbers. `places`: where each row has its first part, and whether there is
    such a row."""
    parts_ptr, part_stats_ptr = pointers
    first, is_row = places
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    m = gl.full(first.shape, -float("inf"), gl.float32, rows)
    l = gl.full(first.shape, 0.0, gl.float32, rows)
    acc = gl.full([first.shape[0], COLUMNS], 0.0, gl.float32, layout)
    for part in range(begin, count, AT_ONCE):
        all_m, all_l, all_acc = (), (), ()
        for i in gl.static_range(AT_ONCE):
            at = first + (part + i) * n_rows
            is_part = is_row & (part + i < count)
            numbers = part_stats_ptr + 2 * at
            mask = gl.expand_dims(is_part, 1) & (d < HEAD_DIM_V)
            products = parts_ptr + gl.expand_dims(at * DV, 1) + d
            # Not from L1, which other programs do not write to.
            part_acc = gl.load(products, mask=mask, other=0.0, cache_modifier=".cg")
            part_m = gl.load(numbers, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            part_l = gl.load(numbers + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            all_m, all_l = all_m + (part_m,), all_l + (part_l,)  # noqa: RUF005, Gluon does not unpack
            all_acc = all_acc + (part_acc,)  # noqa: RUF005
        for i in gl.static_range(AT_ONCE):
            m, l, acc = fold(m, l, acc, all_m[i], all_l[i], all_acc[i], unit)
    return m, l, acc
