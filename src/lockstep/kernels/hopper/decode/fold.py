"""Parts that the decode kernel handed out, folded into results.

    out = Σ acc_i · exp(m_i) / Σ l_i · exp(m_i)        lse = log Σ l_i · exp(m_i)

One program folds some columns of a few rows of one slot, part after part, as the decode kernel does
with the parts that it keeps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lockstep.kernels.launch import unspecialized
from lockstep.kernels.parts import close, fold, fold_sink

# Parts that are loaded at once: enough to hide how long memory takes, few enough for registers.
BATCH: tl.constexpr = tl.constexpr(32)


@unspecialized(triton.jit, any_address=("sinks_ptr",))
def fold_slots(
    parts_ptr,
    part_stats_ptr,
    slots_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    Hkv,
    group,
    heads,
    q_tiles,
    Sq,
    n_spans,
    n_rows,
    unit,
    natural,
    HAS_SINKS: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Programs [slots, n_rows / ROWS, DV / COLUMNS]."""
    slot = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gdc_wait()
    work = tl.load(slots_ptr + 2 * slot)
    count = tl.load(slots_ptr + 2 * slot + 1)
    if work < 0:
        return
    b, head = work // heads, work % heads
    number = head % q_tiles * 64 + row
    is_row = (row < n_rows) & (number < Sq * group)
    at = slot.to(tl.int64) * n_spans * n_rows + row
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, BATCH):
        ms, ls, accs = (), (), ()
        for i in tl.static_range(BATCH):
            part = at + tl.cast(first + i, tl.int64) * n_rows
            inside = is_row & (first + i < count)
            m_ptr = part_stats_ptr + part * 2
            acc_ptr = parts_ptr + part[:, None] * DV + d
            ms = ms + (tl.load(m_ptr, mask=inside, other=float("-inf")),)  # noqa: RUF005
            ls = ls + (tl.load(m_ptr + 1, mask=inside, other=0.0),)  # noqa: RUF005
            accs = accs + (tl.load(acc_ptr, mask=inside[:, None], other=0.0),)  # noqa: RUF005
        for i in tl.static_range(BATCH):
            m, l, acc = fold(m, l, acc, ms[i], ls[i], accs[i], unit)
    q_head = head // q_tiles * group + number % group
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=is_row, other=0.0).to(tl.float32)
        m, l, acc = fold_sink(m, l, acc, sink, natural, unit)
    out, lse = close(m, l, acc, natural)
    to = ((b * Hkv * group + q_head) * Sq + number // group).to(tl.int64)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * DV + d, out, mask=is_row[:, None])
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + to, lse, mask=is_row)
