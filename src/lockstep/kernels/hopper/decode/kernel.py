"""The decode kernel: a warp that streams pages of the cache, and a warpgroup that attends to them.

    out = softmax(softcap(scale · q kᵀ)) v        lse = log Σ exp(scores)

Programs are persistent and share all keys of the batch evenly (`schedule.py`). What is under way
from memory does not stop where one sequence ends and the next begins.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.decode.consumer import consume
from lockstep.kernels.hopper.decode.groups import (
    Numbers,
    PageStrides,
    Pointers,
    RowStrides,
    Scales,
    Strides,
)
from lockstep.kernels.hopper.decode.head_columns import columns_of_keys, columns_of_values
from lockstep.kernels.hopper.decode.narrow_consumer import Exchange
from lockstep.kernels.hopper.decode.producer import Cache, Tiles, produce
from lockstep.kernels.hopper.decode.queries import Queries
from lockstep.kernels.hopper.decode.rows import Rows
from lockstep.kernels.hopper.decode.runs import RunQueue
from lockstep.kernels.hopper.decode.schedule import FIELDS, Sizes
from lockstep.kernels.hopper.decode.spans.consumer import consume_spans
from lockstep.kernels.hopper.decode.spans.first_keys import FirstKeys
from lockstep.kernels.launch import unspecialized

_ANY_ADDRESS = ("sinks_ptr", "kv_lens_ptr", "kv_starts_ptr", "page_table_ptr")


@gluon.jit
def prefetch_maps(x):
    """Bring the two tensor maps to where the copy engine reads them; x is any int32 number. As
    arguments they are the first and, behind its shape and strides, the tenth."""
    gl.inline_asm_elementwise(
        "{ .reg .b64 at; mov.b64 at, decode_kernel_param_0; cvta.param.u64 at, at;"
        "prefetch.tensormap [at]; mov.b64 at, decode_kernel_param_9; cvta.param.u64 at, at;"
        "prefetch.tensormap [at]; mov.b32 $0, $1; }",
        "=r,r", [x], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def sizes_of_call(
    pointers, n, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_STARTS: gl.constexpr,
    PACKED: gl.constexpr, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """Sizes and masks, of the arguments of a call."""
    kv_lens_ptr = pointers.kv_lens_ptr
    n_tiles = n.B
    if PACKED:
        kv_lens_ptr += FIELDS
        n_tiles = gl.load(pointers.kv_lens_ptr)
    return Sizes(
        (kv_lens_ptr, pointers.kv_starts_ptr),
        (n_tiles, n.heads, n.Sq, n.Skv, n.left, n.right, n.wanted, n.least, n.least_of_short,
         n.most_of_tall, n.team, n.waves, n.q_tiles, n.group, n.whole),
        HAS_LEFT, HAS_RIGHT, HAS_STARTS, PACKED, BLOCK_KV,
    )  # fmt: skip


@gluon.jit
def rows_of_call(
    pointers, stride_q, row_strides, n, scales, SCORES: gl.constexpr, HAS_SINKS: gl.constexpr,
    PAGED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """What the consumer takes and returns, of the arguments of a call."""
    return Rows(
        (pointers.q_ptr, pointers.out_ptr, pointers.lse_ptr, pointers.statistics_ptr,
         pointers.parts_ptr, pointers.part_stats_ptr, pointers.sinks_ptr, pointers.arrivals_ptr),
        (stride_q.b, stride_q.h, stride_q.s, row_strides.rows_b, row_strides.rows_h,
         row_strides.rows_s, n.group, n.n_spans, n.n_rows, scales.cap_scale, scales.score_scale,
         scales.unit, scales.natural, scales.mark),
        SCORES, HAS_SINKS, not PAGED, D, DV, HEAD_DIM, HEAD_DIM_V,
    )  # fmt: skip


@gluon.jit
def start_warps(
    rows, sizes, queue, queries, loads, pointers, stride_k, QUERY_INVARIANT: gl.constexpr,
    FIXED_MAX: gl.constexpr, FEW: gl.constexpr, NARROW: gl.constexpr, PREFETCH: gl.constexpr,
    LATE: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Start the consumer and the producer of a program."""
    k, v, k_desc, _v_desc, cache = loads
    slots_ptr = pointers.slots_ptr
    if QUERY_INVARIANT:
        first = FirstKeys.create(pointers.k_ptr, stride_k, k_desc.dtype, k.D)
        gl.warp_specialize(
            [
                (consume_spans, (rows, sizes, queue, k, v, queries, cache, first, FIXED_MAX, FEW)),
                (produce, (sizes, queue, loads, slots_ptr, rows, queries, PREFETCH, LATE)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        exchange = queue  # in place of none
        if NARROW > 0:
            exchange = Exchange.create(NARROW, v.D)
        gl.warp_specialize(
            [
                (consume, (rows, sizes, queue, k, v, queries, exchange, cache, NARROW, FEW)),
                (produce, (sizes, queue, loads, slots_ptr, rows, queries, PREFETCH, LATE)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )


@unspecialized(gluon.jit, any_address=_ANY_ADDRESS)
def decode_kernel(
    k_desc,  # boxes [rows of a page, COLUMNS] of k [n_pages, Hkv, page, D]
    v_desc,
    pointers: Pointers,
    stride_q: Strides,
    row_strides: RowStrides,
    stride_k: PageStrides,
    stride_v: PageStrides,
    stride_tb,  # of the page table, from one sequence to the next
    numbers: Numbers,
    scales: Scales,
    D: gl.constexpr,  # columns of tiles of keys, and of values
    DV: gl.constexpr,
    HEAD_DIM: gl.constexpr,  # how many of them there are
    HEAD_DIM_V: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PACKED: gl.constexpr,
    SCORES: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PREFETCH: gl.constexpr,  # this one and LATE: `producer.produce`
    HAS_STARTS: gl.constexpr,
    WHOLE_PAGES: gl.constexpr,  # a tile has no less than a page
    PAGED: gl.constexpr,  # else the cache is dense, [B, Hkv, Skv, D]
    QUERY_INVARIANT: gl.constexpr,
    FIXED_MAX: gl.constexpr,  # of query-invariant calls, as in the forward
    FEW: gl.constexpr,  # `few_rows.py`: of query-invariant calls the most rows
    NARROW: gl.constexpr,  # the most rows that have the narrow consumer
    Q_ROWS: gl.constexpr,  # query rows for which there is room
    Q_ORDER: gl.constexpr,  # `queries.py`
    LATE: gl.constexpr,
    INSIDE: gl.constexpr,  # programs fold what they have cut: `folding/arrivals.py`
):
    # The second kernel may start as soon as there is room, and waits where it needs the parts.
    if not (LATE or PACKED):
        gdc_launch_dependents()
    prefetch_maps(numbers.B)
    n = numbers
    queue = RunQueue.create(PACKED, INSIDE)
    k = Tiles.create(k_desc, STAGES, BLOCK_KV, D, columns_of_keys(HEAD_DIM))
    v = Tiles.create(v_desc, STAGES, BLOCK_KV, DV, columns_of_values(DV, HEAD_DIM_V))
    queries = Queries.create(k_desc.dtype, Q_ROWS, D, Q_ORDER)
    rows = rows_of_call(
        pointers, stride_q, row_strides, n, scales, SCORES, HAS_SINKS, PAGED, D, DV, HEAD_DIM,
        HEAD_DIM_V,
    )  # fmt: skip
    cache = Cache(
        (pointers.page_table_ptr, pointers.v_ptr, pointers.kv_starts_ptr),
        (stride_tb, stride_v.p, stride_v.s, stride_v.h, n.n_pages, n.page_size),
        k_desc.block_shape[2], PAGED, WHOLE_PAGES, HAS_STARTS,
    )  # fmt: skip
    # What the kernels before have written, from here on: this one starts before they end.
    gdc_wait()
    if PACKED:
        # The forward, where it runs long sequences, needs the list alone, which is there now.
        gdc_launch_dependents()
    sizes = sizes_of_call(pointers, n, HAS_LEFT, HAS_RIGHT, HAS_STARTS, PACKED, BLOCK_KV)
    loads = (k, v, k_desc, v_desc, cache)
    if PACKED:
        # Where all sequences are the forward's, as prompts are, nothing else is set up.
        if sizes.B > 0:
            start_warps(
                rows, sizes, queue, queries, loads, pointers, stride_k, QUERY_INVARIANT, FIXED_MAX,
                FEW, NARROW, PREFETCH, LATE, PRODUCER_REGISTERS,
            )  # fmt: skip
    else:
        start_warps(
            rows, sizes, queue, queries, loads, pointers, stride_k, QUERY_INVARIANT, FIXED_MAX, FEW,
            NARROW, PREFETCH, LATE, PRODUCER_REGISTERS,
        )  # fmt: skip
