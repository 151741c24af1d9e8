"""The decode kernel: a warp that streams pages of the cache, and a warpgroup that attends to them.

    out = softmax(softcap(scale · q kᵀ)) v        lse = log Σ exp(scores)

Programs are persistent and share all keys of the batch evenly (`schedule.py`). What is under way
from memory does not stop where one sequence ends and the next begins.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.decode.consumer import Rows, consume
from lockstep.kernels.hopper.decode.first_keys import FirstKeys
from lockstep.kernels.hopper.decode.producer import Cache, Tiles, produce
from lockstep.kernels.hopper.decode.schedule import RunQueue, Sizes
from lockstep.kernels.hopper.decode.span_consumer import consume_spans
from lockstep.kernels.launch import unspecialized

_ANY_ADDRESS = ("sinks_ptr", "kv_lens_ptr", "kv_starts_ptr", "page_table_ptr")


@unspecialized(gluon.jit, any_address=_ANY_ADDRESS)
def decode_kernel(
    k_desc,  # boxes [rows of a page, COLUMNS] of k [n_pages, Hkv, page, D]
    v_desc,
    k_ptr,  # the keys once more, for those that rows begin with in query-invariant calls
    v_ptr,  # the values once more, for those that are not finite
    q_ptr,  # [B, Hq, Sq, D], or packed
    out_ptr,  # contiguous [B, Hq, Sq, Dv], or [Tq, Hq, Dv]
    lse_ptr,  # the same without Dv, fp32
    statistics_ptr,  # [*lse, 2], of calls with a dense cache
    parts_ptr,  # [slots, n_spans, n_rows, Dv] fp32
    part_stats_ptr,  # [slots, n_spans, n_rows, 2] fp32
    slots_ptr,  # [slots, 3]: `producer.note_slot`
    sinks_ptr,  # [Hq]
    kv_lens_ptr,  # [B], or the table of tiles (`tiles.py`)
    kv_starts_ptr,  # [B]
    page_table_ptr,  # [B, ·]
    stride_qb,
    stride_qh,
    stride_qs,
    rows_b,
    rows_h,
    rows_s,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_tb,
    B,
    group,
    heads,
    Sq,
    Skv,
    n_pages,
    page_size,
    left,
    right,
    wanted,
    least,
    team,
    waves,
    q_tiles,
    whole,
    n_spans,
    n_rows,
    cap_scale,
    score_scale,
    unit,
    natural,
    D: gl.constexpr,
    DV: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    SCORES: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PREFETCH: gl.constexpr,  # `producer.produce`
    HAS_STARTS: gl.constexpr,
    WHOLE_PAGES: gl.constexpr,  # a tile has no less than a page
    PAGED: gl.constexpr,  # else the cache is dense, [B, Hkv, Skv, D]
    QUERY_INVARIANT: gl.constexpr,
    FIXED_MAX: gl.constexpr,  # of query-invariant calls, as in the forward
    FEW: gl.constexpr,  # of query-invariant calls: up to 8 rows, `few_rows.py`
):
    # `fold.py` may start as soon as there is room, to wait for the parts where it needs them.
    gdc_launch_dependents()
    sizes = Sizes(
        (kv_lens_ptr, kv_starts_ptr),
        (B, heads, Sq, Skv, left, right, wanted, least, team, waves, q_tiles,
         group, whole),
        HAS_LEFT, HAS_RIGHT, HAS_STARTS, PACKED, BLOCK_KV,
    )  # fmt: skip
    queue = RunQueue.create(PACKED)
    k = Tiles.create(k_desc, STAGES, BLOCK_KV, D)
    v = Tiles.create(v_desc, STAGES, BLOCK_KV, DV)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], gl.NVMMASharedLayout(128, 16, 2))
    rows = Rows(
        (q_ptr, out_ptr, lse_ptr, statistics_ptr, parts_ptr, part_stats_ptr, sinks_ptr),
        (stride_qb, stride_qh, stride_qs, rows_b, rows_h, rows_s, group, n_spans, n_rows, cap_scale,
         score_scale, unit, natural),
        SCORES, HAS_SINKS, not PAGED, D,
    )  # fmt: skip
    cache = Cache(
        (page_table_ptr, v_ptr, kv_starts_ptr),
        (stride_tb, stride_vp, stride_vs, stride_vh, n_pages, page_size),
        k_desc.block_shape[2], PAGED, WHOLE_PAGES, HAS_STARTS,
    )  # fmt: skip
    # What the kernels before have written, from here on: this one starts before they end.
    gdc_wait()
    if QUERY_INVARIANT:
        first_keys = FirstKeys.create(k_ptr, (stride_kp, stride_ks, stride_kh), k_desc.dtype, D)
        gl.warp_specialize(
            [
                (
                    consume_spans,
                    (rows, sizes, queue, k, v, q_smem, cache, first_keys, FIXED_MAX, FEW),
                ),
                (produce, (sizes, queue, k, v, k_desc, v_desc, cache, slots_ptr, rows, PREFETCH)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (rows, sizes, queue, k, v, q_smem, cache)),
                (produce, (sizes, queue, k, v, k_desc, v_desc, cache, slots_ptr, rows, PREFETCH)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
