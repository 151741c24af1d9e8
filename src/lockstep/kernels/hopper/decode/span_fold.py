"""Parts that query-invariant decode handed out, folded into results: `fold.py` with the operations
of the Hopper forward (`common/spans.py`)."""

from __future__ import annotations

from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.softmax import close_rows
from lockstep.kernels.hopper.common.spans import fold_span
from lockstep.kernels.hopper.decode.fold import find_rows
from lockstep.kernels.launch import unspecialized

# Parts that are loaded at once: enough to hide how long memory takes, few enough for registers.
BATCH = gl.constexpr(16)


@unspecialized(gluon.jit, any_address=("sinks_ptr",))
def fold_spans(
    parts_ptr,  # [slots, n_spans, n_rows, DV] fp32
    part_stats_ptr,  # [slots, n_spans, n_rows, 4] fp32: m, l, r, error
    slots_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    statistics_ptr,
    tiles_ptr,  # `tiles.py`
    rows_b,
    rows_h,
    rows_s,
    group,
    heads,
    q_tiles,
    Sq,
    n_spans,
    n_rows,
    unit,
    PAGED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    DV: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Programs [slots, n_rows / ROWS, DV / COLUMNS], a warp for each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [ROWS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    slot = gl.program_id(0)
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, rows)
    d = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    d = gl.expand_dims(d, 0)
    gdc_wait()
    work = gl.load(slots_ptr + 3 * slot)
    begin = gl.load(slots_ptr + 3 * slot + 1)
    count = gl.load(slots_ptr + 3 * slot + 2)
    if work < 0:
        return
    is_row, b, head, query = find_rows(
        work, row, tiles_ptr, heads, group, q_tiles, Sq, n_rows, PACKED
    )
    at = slot.to(gl.int64) * n_spans * n_rows + row
    zero = gl.full([ROWS], 0.0, gl.float32, rows)
    sums = (zero - float("inf"), zero, zero, zero, zero)
    total = (gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout),)
    for first in range(begin, count, BATCH):
        ms = ()
        ls = ()
        rs = ()
        errors = ()
        accs = ()
        for i in gl.static_range(BATCH):
            part = at + (first + i).to(gl.int64) * n_rows
            inside = is_row & (first + i < count)
            statistics = part_stats_ptr + part * 4
            ms = ms + (gl.load(statistics, mask=inside, other=-float("inf")),)  # noqa: RUF005
            ls = ls + (gl.load(statistics + 1, mask=inside, other=0.0),)  # noqa: RUF005
            rs = rs + (gl.load(statistics + 2, mask=inside, other=0.0),)  # noqa: RUF005
            errors = errors + (gl.load(statistics + 3, mask=inside, other=0.0),)  # noqa: RUF005
            pointers = parts_ptr + gl.expand_dims(part * DV, 1) + d
            mask = gl.expand_dims(inside, 1) & (d >= 0)
            accs = accs + (gl.load(pointers, mask=mask, other=0.0),)  # noqa: RUF005
        for i in gl.static_range(BATCH):
            sums, total = fold_span(sums, total, ms[i], ls[i], rs[i], errors[i], (accs[i],), unit)
    sink = None
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + head, mask=is_row, other=0.0)
    one = gl.full([ROWS], 1.0, gl.float32, rows)
    out, lse, m, l = close_rows(total, sums[0], sums[1], sums[2], one, unit, sink, 0.0)
    to = (b * rows_b + head * rows_h + query * rows_s).to(gl.int64)
    x = out[0].to(out_ptr.dtype.element_ty)
    mask = gl.expand_dims(is_row, 1) & (d >= 0)
    gl.store(out_ptr + gl.expand_dims(to * DV, 1) + d, x, mask=mask)
    if gl.program_id(2) == 0:
        gl.store(lse_ptr + to, lse, mask=is_row)
        if not PAGED:
            gl.store(statistics_ptr + 2 * to, m, mask=is_row)
            gl.store(statistics_ptr + 2 * to + 1, l, mask=is_row)
