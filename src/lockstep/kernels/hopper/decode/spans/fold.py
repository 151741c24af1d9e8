"""Parts that query-invariant decode handed out, folded into results: `folding/fold.py` with the
operations of the Hopper forward (`common/spans.py`). What parts weigh is worked out for many at
once, and parts are loaded while those before are folded, as in `folding/fold.py`.

In bf16, parts of a row have one maximum unless a weight was so large that a span took one of its
own. Then all factors are 1, and where parts are many, they are added without them: the bits are the
same. With few parts the code for that takes longer to load than it saves."""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import (
    async_copy,
    await_warps,
    gl,
    gluon,
    reinterpret,
)
from lockstep.kernels.hopper.common.softmax import close_rows
from lockstep.kernels.hopper.common.spans import fold_maxima
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.folding import fold_plan
from lockstep.kernels.hopper.decode.folding.part_batches import (
    LOADED,
    copy_columns,
    load_numbers,
    load_parts,
    parts_layout,
    store_numbers,
)
from lockstep.kernels.hopper.decode.folding.units import find_rows, find_unit, has_rows, rank_slots
from lockstep.kernels.hopper.decode.groups import FoldPointers, FoldSizes, RowStrides
from lockstep.kernels.launch import unspecialized

NUMBERS, SUMS = gl.constexpr(plan.INVARIANT_PART_NUMBERS), gl.constexpr(plan.PART_SUMS)
# Parts of a batch from which on those with one maximum have code of their own.
MANY_PARTS = gl.constexpr(fold_plan.DEEP_FOLD_PLAN.batch)


@gluon.jit
def load_maxima(
    ptr, group, first, begin, count, n_rows, BATCH: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """m and error [ROWS, BATCH] of parts from number `first` on, and those of the part before
    each. `ptr` is where the numbers of the first part begin."""
    layout: gl.constexpr = parts_layout(BATCH, ROWS, gl.num_warps())
    row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.expand_dims(row, 1)
    i = gl.expand_dims(first + gl.arange(0, BATCH, gl.SliceLayout(0, layout)), 0)
    at = ptr + NUMBERS * (i * n_rows + row)
    is_part = (i < count) & (row < n_rows)
    m = gl.load(at, mask=is_part, other=-float("inf"))
    error = gl.load(at + 1, mask=is_part, other=0.0)
    # Also behind the last, where what there is stays.
    has_before = (i > begin) & (i <= count) & (row < n_rows)
    before = at - NUMBERS * n_rows
    before_m = gl.load(before, mask=has_before, other=-float("inf"))
    before_error = gl.load(before + 1, mask=has_before, other=0.0)
    # As in `fold_maxima`, a maximum that is NaN counts for nothing later.
    before_m = gl.where(before_m == before_m, before_m, -float("inf"))
    return m, error, before_m, before_error


@gluon.jit
def load_sums(ptr, group, first, count, n_rows, BATCH: gl.constexpr, ROWS: gl.constexpr):
    """Sums [ROWS, BATCH, 8] of parts from number `first` on: those of four threads, l and residue,
    in one thread each."""
    WARPS: gl.constexpr = gl.num_warps() // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [ROWS, WARPS, 1], [2, 1, 0])
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_parts))
    i = first + gl.arange(0, BATCH, gl.SliceLayout(0, of_parts))
    row, i = gl.expand_dims(row, 1), gl.expand_dims(i, 0)
    number = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    at = gl.expand_dims(NUMBERS * (i * n_rows + row), 2)
    at = at + SUMS + gl.expand_dims(gl.expand_dims(number, 0), 0)
    mask = gl.expand_dims((i < count) & (row < n_rows), 2) & (at >= 0)
    return gl.load(ptr + at, mask=mask, other=0.0)


@gluon.jit
def later_maximum(m, error, later_m, later_error):
    """m and error of two runs of parts, as `fold_maxima` has them."""
    is_later = later_m > m
    return gl.where(is_later, later_m, m), gl.where(is_later, later_error, error)


@gluon.jit
def store_span_factors(maxima, keep_smem, add_smem, sums_smem, numbers, sums, unit):
    """m and error of each row with parts of these `numbers`, where they were `maxima` before them.
    To shared memory go, for each part, the factors of the parts before it and of itself, and its
    sums, multiplied by that."""
    BATCH: gl.constexpr = keep_smem.shape[0] * LOADED
    ROWS: gl.constexpr = keep_smem.shape[1]
    layout: gl.constexpr = parts_layout(BATCH, ROWS, gl.num_warps())
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    part_m, part_error, before_m, before_error = numbers
    before = gl.associative_scan((before_m, before_error), 1, later_maximum)
    m = gl.expand_dims(gl.convert_layout(maxima[0], rows), 1) + gl.zeros_like(part_m)
    error = gl.expand_dims(gl.convert_layout(maxima[1], rows), 1) + gl.zeros_like(part_m)
    m, error = later_maximum(m, error, before[0], before[1])
    m, error, keep, add = fold_maxima(m, error, part_m, part_error, unit)
    store_numbers(keep_smem, keep)
    store_numbers(add_smem, add)
    add = gl.convert_layout(add, gl.SliceLayout(2, sums.type.layout))
    sums_smem.permute((1, 0, 2)).store(sums * gl.expand_dims(add, 2))
    # Maxima only rise; of errors, the last.
    i = gl.expand_dims(gl.arange(0, BATCH, gl.SliceLayout(0, layout)), 0)
    return gl.max(m, 1), gl.sum(gl.where(i == BATCH - 1, error, 0.0), 1)


@gluon.jit
def load_first(ptr, group, begin, n_rows, BATCH: gl.constexpr, ROWS: gl.constexpr):
    """m and error [ROWS, BATCH] of part `begin`, for each part of a batch."""
    layout: gl.constexpr = parts_layout(BATCH, ROWS, gl.num_warps())
    row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.expand_dims(row, 1) + gl.full([ROWS, BATCH], 0, gl.int32, layout)
    at = ptr + NUMBERS * (begin * n_rows + row)
    m = gl.load(at, mask=row < n_rows, other=-float("inf"))
    return m, gl.load(at + 1, mask=row < n_rows, other=0.0)


@gluon.jit
def differ(numbers, first_numbers, first, count):
    """How many parts of a batch, the first of which is number `first`, have not the m and error
    of the first part of all: 0 unless a weight was so large that a span took a maximum of its
    own."""
    layout: gl.constexpr = numbers[0].type.layout
    i = gl.expand_dims(first + gl.arange(0, numbers[0].shape[1], gl.SliceLayout(0, layout)), 0)
    is_same = (numbers[0] == first_numbers[0]) & (numbers[1] == first_numbers[1])
    return gl.sum(gl.sum(gl.where((i < count) & (is_same == 0), 1, 0), 1), 0)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def fold_spans(
    pointers: FoldPointers,
    strides: RowStrides,
    sizes: FoldSizes,
    unit,
    PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    DV: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,  # parts that are loaded at once
    BATCHES: gl.constexpr,  # batches that are under way or at work
):
    """Programs share the units of all slots with parts, each ROWS rows and COLUMNS columns: a warp
    for each row."""
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    acc_smem = gl.allocate_shared_memory(gl.float32, [BATCHES, BATCH, ROWS, COLUMNS], cube)
    keep_smem = gl.allocate_shared_memory(gl.float32, [BATCH // LOADED, ROWS, LOADED], cube)
    add_smem = gl.allocate_shared_memory(gl.float32, [BATCH // LOADED, ROWS, LOADED], cube)
    sums_smem = gl.allocate_shared_memory(gl.float32, [BATCH, ROWS, 8], cube)
    memory = (acc_smem, keep_smem, add_smem, sums_smem)
    N_BLOCKS: gl.constexpr = DV // COLUMNS
    n_groups = gl.cdiv(sizes.n_rows, ROWS)
    gdc_launch_dependents()
    gdc_wait()
    ranks, n_units = rank_slots(pointers.slots_ptr, sizes.n_slots, N_BLOCKS, n_groups)
    for number in range(gl.program_id(0), n_units, gl.num_programs(0)):
        slot, work, begin, count, group, block = find_unit(
            pointers.slots_ptr, ranks, number, sizes.n_slots, n_groups, N_BLOCKS
        )
        if has_rows(work, group, sizes, ROWS, PACKED):
            maxima, sums, acc = fold_parts(
                pointers, sizes, slot, group, block * COLUMNS, begin, count, memory, unit, DV
            )
            store_rows(
                pointers, strides, sizes, work, group, block, maxima, sums, acc, unit, PAGED,
                HAS_SINKS, PACKED, DV,
            )  # fmt: skip


@gluon.jit
def add_parts(acc, total, accs, all_sums, at, n_loads):
    """Products and sums of rows with the parts of a batch, all of whose factors are 1: LOADED of
    them so many times, from number `at` on in shared memory."""
    layout: gl.constexpr = acc.type.layout
    of_sums: gl.constexpr = total.type.layout
    for some in range(n_loads):
        part_acc = load_parts(accs.index(at + some), layout)
        part_sums = load_parts(all_sums.index(some), of_sums)
        for i in gl.static_range(LOADED):
            acc = acc + part_acc[i]
            total = total + part_sums[i]
    return acc, total


@gluon.jit
def fold_by_factors(acc, total, accs, all_sums, keeps, adds, at, n_loads):
    """The same with factors."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_sums: gl.constexpr = total.type.layout
    for some in range(n_loads):
        part_acc = load_parts(accs.index(at + some), layout)
        part_sums = load_parts(all_sums.index(some), of_sums)
        keep = load_numbers(keeps.index(some), rows)
        add = load_numbers(adds.index(some), rows)
        for i in gl.static_range(LOADED):
            # As `fold_sums` does; of sums, products are there.
            own, _acc = gl.broadcast(gl.expand_dims(keep[i], 1), acc)
            acc = gl.fma(acc, own, part_acc[i] * gl.expand_dims(add[i], 1))
            own = gl.expand_dims(gl.convert_layout(keep[i], gl.SliceLayout(1, of_sums)), 1)
            own, _total = gl.broadcast(own, total)
            total = gl.fma(total, own, part_sums[i])
    return acc, total


@gluon.jit
def fold_parts(
    pointers, sizes, slot, group, column, begin, count, memory, unit, DV: gl.constexpr
):  # fmt: skip
    """m and error, sums and products of the parts from `begin` to `count` of a group of rows, from
    `column` on."""
    acc_smem, keep_smem, add_smem, sums_smem = memory
    BATCHES: gl.constexpr = acc_smem.shape[0]
    BATCH: gl.constexpr = acc_smem.shape[1]
    ROWS: gl.constexpr = acc_smem.shape[2]
    COLUMNS: gl.constexpr = acc_smem.shape[3]
    WARPS: gl.constexpr = gl.num_warps() // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [ROWS, WARPS], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    # Sums of threads are summed as these have them: each by a thread.
    of_sums: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [ROWS, WARPS], [1, 0])
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    # The same, LOADED parts after others.
    N: gl.constexpr = BATCH // LOADED
    accs = reinterpret(acc_smem, gl.float32, [BATCHES * N, LOADED, ROWS, COLUMNS], cube)
    keeps = reinterpret(keep_smem, gl.float32, [N, ROWS, LOADED], square)
    adds = reinterpret(add_smem, gl.float32, [N, ROWS, LOADED], square)
    all_sums = reinterpret(sums_smem, gl.float32, [N, LOADED, ROWS, 8], cube)
    n_spans, n_rows = sizes.n_spans, sizes.n_rows
    parts_ptr = pointers.parts_ptr
    stats_ptr = pointers.part_stats_ptr + slot.to(gl.int64) * n_spans * n_rows * NUMBERS
    zero = gl.full([ROWS], 0.0, gl.float32, rows)
    maxima = (zero - float("inf"), zero)
    total = gl.full([ROWS, 8], 0.0, gl.float32, of_sums)
    acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout)
    # Of the unit before, warps that are behind may still read.
    await_warps()
    for i in gl.static_range(BATCHES - 1):
        copy_columns(
            acc_smem.index(i), parts_ptr, slot, group, begin + i * BATCH, count, n_spans, n_rows,
            column, DV,
        )  # fmt: skip
        async_copy.commit_group()
    numbers = load_maxima(stats_ptr, group, begin, begin, count, n_rows, BATCH, ROWS)
    sums = load_sums(stats_ptr, group, begin, count, n_rows, BATCH, ROWS)
    LOOKS: gl.constexpr = BATCH >= MANY_PARTS
    if LOOKS:
        first_numbers = load_first(stats_ptr, group, begin, n_rows, BATCH, ROWS)
    n_different = begin * 0
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
        if LOOKS:
            n_different += differ(numbers, first_numbers, first, count)
        if LOOKS and n_different == 0:
            sums_smem.permute((1, 0, 2)).store(sums)
            m = gl.max(first_numbers[0], 1)
            error = gl.max(first_numbers[1], 1)
        else:
            m, error = store_span_factors(
                maxima, keep_smem, add_smem, sums_smem, numbers, sums, unit
            )
        maxima = (gl.convert_layout(m, rows), gl.convert_layout(error, rows))
        # Those of the next batch, while this one is folded.
        numbers = load_maxima(stats_ptr, group, first + BATCH, begin, count, n_rows, BATCH, ROWS)
        sums = load_sums(stats_ptr, group, first + BATCH, count, n_rows, BATCH, ROWS)
        async_copy.wait_group(BATCHES - 1)
        await_warps()
        at = batch % BATCHES * N
        n_loads = gl.minimum(gl.cdiv(count - first, LOADED), N)
        if LOOKS and n_different == 0:
            acc, total = add_parts(acc, total, accs, all_sums, at, n_loads)
        else:
            acc, total = fold_by_factors(acc, total, accs, all_sums, keeps, adds, at, n_loads)
        batch += 1
    async_copy.wait_group(0)
    return maxima, total, acc


@gluon.jit
def store_rows(
    pointers, strides, sizes, work, group, block, maxima, sums, acc, unit, PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr, PACKED: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """The results of a group of rows whose parts have all been folded."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    # As `row_sums` does: the sum of all, l and residue, is r.
    is_l = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, sums.type.layout)), 0) < 4
    l = gl.convert_layout(gl.sum(gl.where(is_l, sums, 0.0), 1), rows)
    r = gl.convert_layout(gl.sum(sums, 1), rows)
    row = group * acc.shape[0] + gl.arange(0, acc.shape[0], rows)
    is_row, b, head, query = find_rows(
        work, row, pointers.tiles_ptr, sizes.heads, sizes.group, sizes.q_tiles, sizes.Sq,
        sizes.n_rows, PACKED,
    )  # fmt: skip
    sink = None
    if HAS_SINKS:
        sink = gl.load(pointers.sinks_ptr + head, mask=is_row, other=0.0)
    factor = gl.exp2(-maxima[1])
    out, lse, m, l = close_rows((acc,), maxima[0], l, r, factor, unit, sink, 0.0)
    to = (b * strides.rows_b + head * strides.rows_h + query * strides.rows_s).to(gl.int64)
    d = block * acc.shape[1] + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    d = gl.expand_dims(d, 0)
    x = out[0].to(pointers.out_ptr.dtype.element_ty)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    gl.store(pointers.out_ptr + gl.expand_dims(to * DV, 1) + d, x, mask=mask)
    if block == 0:
        gl.store(pointers.lse_ptr + to, lse, mask=is_row)
        if not PAGED:
            gl.store(pointers.statistics_ptr + 2 * to, m, mask=is_row)
            gl.store(pointers.statistics_ptr + 2 * to + 1, l, mask=is_row)
