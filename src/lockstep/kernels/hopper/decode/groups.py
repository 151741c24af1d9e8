"""What the kernels of decode take together: `kernels.spread` takes it apart for Triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """What the kernel reads and writes besides the tiles of k and v."""

    k_ptr: Any  # the keys once more, for those that rows begin with in query-invariant calls
    v_ptr: Any  # the values once more, for those that are not finite
    q_ptr: Any  # [B, Hq, Sq, D], or packed
    out_ptr: Any  # contiguous [B, Hq, Sq, Dv], or [Tq, Hq, Dv]
    lse_ptr: Any  # the same without Dv, fp32
    statistics_ptr: Any  # [*lse, 2], of calls with a dense cache
    parts_ptr: Any  # [slots, n_spans, n_rows, Dv] fp32
    part_stats_ptr: Any  # [slots, n_spans, n_rows, 2] fp32
    slots_ptr: Any  # [slots, 3]: `producer.note_slot`
    arrivals_ptr: Any  # [slots] int64: `folding/arrivals.py`
    sinks_ptr: Any  # [Hq]
    kv_lens_ptr: Any  # [B], or the table of tiles (`tiles.py`)
    kv_starts_ptr: Any  # [B]
    page_table_ptr: Any  # [B, ·]


class Strides(NamedTuple):
    """Strides of q."""

    b: Any
    h: Any
    s: Any


class RowStrides(NamedTuple):
    """Strides of lse, and of out in rows."""

    rows_b: Any
    rows_h: Any
    rows_s: Any


class PageStrides(NamedTuple):
    """Strides of k or v, from one page, token and head to the next."""

    p: Any
    s: Any
    h: Any


class Numbers(NamedTuple):
    """Sizes of a call and limits of its window, and how it is cut: `plan.py`."""

    B: Any
    group: Any
    heads: Any
    Sq: Any
    Skv: Any
    n_pages: Any
    page_size: Any
    left: Any
    right: Any
    wanted: Any
    least: Any
    least_of_short: Any
    most_of_tall: Any
    team: Any
    waves: Any
    q_tiles: Any
    whole: Any
    n_spans: Any
    n_rows: Any


class Scales(NamedTuple):
    """Factors that make scores of products: `rows.Rows`."""

    cap_scale: Any
    score_scale: Any
    unit: Any
    natural: Any
    mark: Any  # of counters that are in use: `folding/arrivals.py`


class FoldPointers(NamedTuple):
    """The parts that are folded, and where the results go."""

    parts_ptr: Any  # [slots, n_spans, n_rows, DV] fp32
    part_stats_ptr: Any  # [slots, n_spans, n_rows, ·] fp32: `plan.py`
    slots_ptr: Any  # [slots, 3]: `producer.note_slot`
    sinks_ptr: Any  # [Hq]
    out_ptr: Any
    lse_ptr: Any
    statistics_ptr: Any
    tiles_ptr: Any  # `tiles.py`


class FoldSizes(NamedTuple):
    """Sizes of a call and of its parts."""

    n_slots: Any
    group: Any
    heads: Any
    q_tiles: Any
    Sq: Any
    n_spans: Any
    n_rows: Any
