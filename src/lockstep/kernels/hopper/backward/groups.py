"""What the launches of the backward take together: `kernels.spread` takes it apart for Triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class RowPointers(NamedTuple):
    """What is known of each row, and what `rows.prepare_rows` makes of it."""

    out_ptr: Any  # as dq lies in memory
    dout_ptr: Any
    statistics_ptr: Any  # m and l of the forward
    dlse_ptr: Any
    stats_ptr: Any  # `rows.py`, and so on
    large_ptr: Any
    flags_ptr: Any
    turn_ptr: Any
    ticket_ptr: Any
    bounds_ptr: Any
    plan_ptr: Any
    dq_ptr: Any  # where it writes that of tiles that see no key


class SequencePointers(NamedTuple):
    """Where sequences begin, and how long they are."""

    cu_q_ptr: Any  # [B + 1]
    cu_kv_ptr: Any  # [B + 1]
    kv_lens_ptr: Any  # [B]


class SinkPointers(NamedTuple):
    """Sinks, and what tiles have for their gradient."""

    sinks_ptr: Any  # [Hq]
    sink_sums_ptr: Any  # [n_tiles] fp64


class Strides(NamedTuple):
    """Strides of rows."""

    b: Any
    h: Any
    s: Any


class RowSizes(NamedTuple):
    """Sizes of the queries, and how many tiles of a head there may be."""

    H: Any
    B: Any
    Sq: Any
    Skv: Any
    q_slots: Any


class ShareRule(NamedTuple):
    """The numbers of `shares.divide_queries` that depend on the mask alone."""

    few_loops: Any
    enough_loops: Any
    least_steps: Any
    more_shares: Any
    more_loops: Any
    more_steps: Any
    round_loops: Any
    seen_tiles: Any
    most_spans: Any


class LoopPointers(NamedTuple):
    """What kernels of narrow heads read and write besides tiles: `rows.py`, `shares.py`."""

    large_ptr: Any
    flags_ptr: Any
    turn_ptr: Any
    ticket_ptr: Any
    bounds_ptr: Any
    kv_lens_ptr: Any
    shares_ptr: Any
    plan_ptr: Any


class ScoreNumbers(NamedTuple):
    """`scores.Scores`"""

    scale: Any
    unit: Any
    softcap: Any


class SizeNumbers(NamedTuple):
    """`sizes.Sizes` of programs that own keys, but for the slots."""

    Hkv: Any
    heads_per_kv: Any
    B: Any
    Sq: Any
    Skv: Any
    left: Any
    right: Any
    kv_batch_rows: Any


class ShareNumbers(NamedTuple):
    """Shares of a sequence of full length (`shares.Shares`), or spans of loops that are cut."""

    share_heads: Any
    span_tiles: Any
    spans: Any
    n_shares: Any


class CutNumbers(NamedTuple):
    """`cuts.Cuts`"""

    n_cut: Any
    first_cut: Any
    cut_from: Any
