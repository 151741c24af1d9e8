"""Parts that the decode kernel handed out, folded into results.

    out = Σ acc_i · exp(m_i) / Σ l_i · exp(m_i)        lse = log Σ l_i · exp(m_i)

One program folds some columns of a few rows of one slot, part after part, as the decode kernel does
with the parts that it keeps, and to the same bits.

Where rows are few, threads have a number each. Parts come to shared memory many at a time: left to
itself, the compiler loads one, folds it and loads the next. What each part weighs follows from the
maxima before it, and is worked out for many parts at once: only products and sums are left in the
chain from part to part. That takes many instructions for each unit. Where all SMs have many units,
threads have four numbers each, and load parts to registers as these are.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import (
    async_copy,
    await_warps,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.folding.part_batches import (
    LOADED,
    copy_columns,
    load_numbers,
    load_parts,
    parts_layout,
    store_numbers,
)
from lockstep.kernels.hopper.decode.folding.parts_in_registers import fold_from_memory
from lockstep.kernels.hopper.decode.folding.units import find_rows, find_unit, has_rows, rank_slots
from lockstep.kernels.hopper.decode.groups import FoldPointers, FoldSizes, RowStrides
from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import add_part, close, fold_sink, fold_weights, store_statistics

NUMBERS = gl.constexpr(plan.PART_NUMBERS)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def load_statistics(
    part_stats_ptr, slot, group, first, begin, count, n_spans, n_rows, BATCH: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """m and l [ROWS, BATCH] of parts from number `first` on, and m of the part before each."""
    layout: gl.constexpr = parts_layout(BATCH, ROWS, gl.num_warps())
    row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.expand_dims(row, 1)
    i = gl.expand_dims(first + gl.arange(0, BATCH, gl.SliceLayout(0, layout)), 0)
    at = part_stats_ptr + NUMBERS * ((slot.to(gl.int64) * n_spans + i) * n_rows + row)
    is_part = (i < count) & (row < n_rows)
    part_m = gl.load(at, mask=is_part, other=-float("inf"))
    part_l = gl.load(at + 1, mask=is_part, other=0.0)
    # Also behind the last, where what there is stays.
    has_before = (i > begin) & (i <= count) & (row < n_rows)
    before = gl.load(at - NUMBERS * n_rows, mask=has_before, other=-float("inf"))
    return part_m, part_l, before


@gluon.jit
def store_part_factors(m, keep_smem, add_smem, l_smem, statistics, unit):
    """The maximum of each row with parts of these `statistics`, where it was `m` before them. To
    shared memory go, for each part, the factors of the parts before it and of itself, and its l."""
    BATCH: gl.constexpr = l_smem.shape[0] * LOADED
    ROWS: gl.constexpr = l_smem.shape[1]
    layout: gl.constexpr = parts_layout(BATCH, ROWS, gl.num_warps())
    part_m, part_l, before = statistics
    before = gl.associative_scan(before, 1, _larger)
    m_of_rows = gl.convert_layout(m, gl.SliceLayout(1, layout))
    before = gl.maximum(before, gl.expand_dims(m_of_rows, 1))
    after, keep, add = fold_weights(before, part_m, unit)
    store_numbers(keep_smem, keep)
    store_numbers(add_smem, add)
    store_numbers(l_smem, part_l)
    return gl.max(after, 1)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def fold_slots(
    pointers: FoldPointers,
    strides: RowStrides,
    sizes: FoldSizes,
    unit,
    natural,
    PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    DV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,  # of as many columns as a part has, DV
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,  # parts that are loaded at once
    BATCHES: gl.constexpr,  # batches that are under way or at work; 0 for parts in registers
):
    """Programs share the units of all slots with parts, each ROWS rows and COLUMNS columns."""
    memory = pointers  # in place of none
    if BATCHES > 0:
        memory = allocate_batches(ROWS, COLUMNS, BATCH, BATCHES)
    N_BLOCKS: gl.constexpr = (HEAD_DIM_V + COLUMNS - 1) // COLUMNS
    n_groups = gl.cdiv(sizes.n_rows, ROWS)
    # The next call's kernel may start as soon as there is room, to wait for this one.
    gdc_launch_dependents()
    gdc_wait()
    ranks, n_units = rank_slots(pointers.slots_ptr, sizes.n_slots, N_BLOCKS, n_groups)
    for number in range(gl.program_id(0), n_units, gl.num_programs(0)):
        slot, work, begin, count, group, block = find_unit(
            pointers.slots_ptr, ranks, number, sizes.n_slots, n_groups, N_BLOCKS
        )
        if has_rows(work, group, sizes, ROWS, PACKED):
            column = block * COLUMNS
            if BATCHES > 0:
                m, l, acc = fold_batches(
                    pointers, sizes, slot, group, column, begin, count, memory, unit, DV
                )
            else:
                m, l, acc = fold_in_registers(
                    pointers, sizes, slot, group, column, begin, count, unit, DV, HEAD_DIM_V, ROWS,
                    COLUMNS, BATCH,
                )  # fmt: skip
            store_rows(
                pointers, strides, sizes, work, group, block, m, l, acc, unit, natural, PAGED,
                HAS_SINKS, PACKED, HEAD_DIM_V,
            )  # fmt: skip


@gluon.jit
def fold_in_registers(
    pointers, sizes, slot, group, column, begin, count, unit, DV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of the parts from `begin` to `count` of a group of rows, from `column` on."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // COLUMNS, COLUMNS // 4], [gl.num_warps(), 1], [1, 0]
    )
    row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    at = slot.to(gl.int64) * sizes.n_spans * sizes.n_rows + row
    return fold_from_memory(
        (pointers.parts_ptr, pointers.part_stats_ptr), (at, row < sizes.n_rows), column, begin,
        count, sizes.n_rows, unit, DV, HEAD_DIM_V, AT_ONCE, layout, COLUMNS,
    )  # fmt: skip


@gluon.jit
def allocate_batches(
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BATCH: gl.constexpr, BATCHES: gl.constexpr
):
    """Shared memory for batches of parts, for the factors of one batch, and for its l."""
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    acc_smem = gl.allocate_shared_memory(gl.float32, [BATCHES, BATCH, ROWS, COLUMNS], cube)
    keep_smem = gl.allocate_shared_memory(gl.float32, [BATCH // LOADED, ROWS, LOADED], cube)
    add_smem = gl.allocate_shared_memory(gl.float32, [BATCH // LOADED, ROWS, LOADED], cube)
    l_smem = gl.allocate_shared_memory(gl.float32, [BATCH // LOADED, ROWS, LOADED], cube)
    return acc_smem, keep_smem, add_smem, l_smem


@gluon.jit
def fold_batches(
    pointers, sizes, slot, group, column, begin, count, memory, unit, DV: gl.constexpr
):  # fmt: skip
    """`fold_in_registers` by way of shared memory, a warp or more for each row."""
    acc_smem, keep_smem, add_smem, l_smem = memory
    BATCHES: gl.constexpr = acc_smem.shape[0]
    BATCH: gl.constexpr = acc_smem.shape[1]
    ROWS: gl.constexpr = acc_smem.shape[2]
    COLUMNS: gl.constexpr = acc_smem.shape[3]
    WARPS: gl.constexpr = gl.num_warps() // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [ROWS, WARPS], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    # The same, LOADED parts after others.
    N: gl.constexpr = BATCH // LOADED
    accs = reinterpret(acc_smem, gl.float32, [BATCHES * N, LOADED, ROWS, COLUMNS], cube)
    keeps = reinterpret(keep_smem, gl.float32, [N, ROWS, LOADED], square)
    adds = reinterpret(add_smem, gl.float32, [N, ROWS, LOADED], square)
    all_l = reinterpret(l_smem, gl.float32, [N, ROWS, LOADED], square)
    parts_ptr, part_stats_ptr = pointers.parts_ptr, pointers.part_stats_ptr
    n_spans, n_rows = sizes.n_spans, sizes.n_rows
    m = gl.full([ROWS], -float("inf"), gl.float32, rows)
    l = gl.full([ROWS], 0.0, gl.float32, rows)
    acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout)
    # Of the unit before, warps that are behind may still read.
    await_warps()
    for i in gl.static_range(BATCHES - 1):
        copy_columns(
            acc_smem.index(i), parts_ptr, slot, group, begin + i * BATCH, count, n_spans, n_rows,
            column, DV,
        )  # fmt: skip
        async_copy.commit_group()
    statistics = load_statistics(
        part_stats_ptr, slot, group, begin, begin, count, n_spans, n_rows, BATCH, ROWS
    )
    batch = begin * 0
    for first in range(begin, count, BATCH):
        # Of the parts before, warps that are behind may still read.
        await_warps()
        ahead = batch + BATCHES - 1
        copy_columns(
            acc_smem.index(ahead % BATCHES), parts_ptr, slot, group, begin + ahead * BATCH, count,
            n_spans, n_rows, column, DV,
        )  # fmt: skip
        async_copy.commit_group()
        m = gl.convert_layout(
            store_part_factors(m, keep_smem, add_smem, l_smem, statistics, unit), rows
        )
        # Those of the next batch, while this one is folded.
        statistics = load_statistics(
            part_stats_ptr, slot, group, first + BATCH, begin, count, n_spans, n_rows, BATCH, ROWS
        )
        async_copy.wait_group(BATCHES - 1)
        await_warps()
        at = batch % BATCHES * N
        for some in range(gl.minimum(gl.cdiv(count - first, LOADED), N)):
            part_acc = load_parts(accs.index(at + some), layout)
            part_l = load_numbers(all_l.index(some), rows)
            keep = load_numbers(keeps.index(some), rows)
            add = load_numbers(adds.index(some), rows)
            for i in gl.static_range(LOADED):
                l, acc = add_part(l, acc, part_l[i], part_acc[i], keep[i], add[i])
        batch += 1
    async_copy.wait_group(0)
    return m, l, acc


@gluon.jit
def store_rows(
    pointers, strides, sizes, work, group, block, m, l, acc, unit, natural, PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr, PACKED: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """The results of a group of rows whose parts have all been folded."""
    layout: gl.constexpr = acc.type.layout
    row = group * acc.shape[0] + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    is_row, b, head, query = find_rows(
        work, row, pointers.tiles_ptr, sizes.heads, sizes.group, sizes.q_tiles, sizes.Sq,
        sizes.n_rows, PACKED,
    )  # fmt: skip
    if HAS_SINKS:
        sink = gl.load(pointers.sinks_ptr + head, mask=is_row, other=0.0).to(gl.float32)
        m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
    out, lse = close(m, l, acc, natural)
    to = (b * strides.rows_b + head * strides.rows_h + query * strides.rows_s).to(gl.int64)
    d = block * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    d = gl.expand_dims(d, 0)
    out = out.to(pointers.out_ptr.dtype.element_ty)
    mask = gl.expand_dims(is_row, 1) & (d < HEAD_DIM_V)
    gl.store(pointers.out_ptr + gl.expand_dims(to * HEAD_DIM_V, 1) + d, out, mask=mask)
    if block == 0:
        gl.store(pointers.lse_ptr + to, lse, mask=is_row)
        if not PAGED:
            store_statistics(pointers.statistics_ptr, to, m, l, is_row)
