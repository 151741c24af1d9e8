"""The forward kernel: warps that serve two or three consumer warpgroups of 64 query rows.

    S = Q·Kᵀ,  P = exp2(S·scale - m·scale),  O = Σ P·V / l,  lse = m + log(l)

The scheduler warp (`scheduling/scheduler.py`) says which tile is next, the producer streams its Q,
K and V into shared memory by TMA, and the consumers (`consumer.py`) do the rest. In constant time,
under a mask, a cleaner looks at values before them (`cleaning.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pages import PageTable
from lockstep.kernels.hopper.common.ring import TileRing
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles
from lockstep.kernels.hopper.forward.cleaning import CLEANER_WARPS, Cleaned, clean_blocks
from lockstep.kernels.hopper.forward.consumer import consume
from lockstep.kernels.hopper.forward.program import Build, Program, Results
from lockstep.kernels.hopper.forward.scheduling.failed_tiles import FailedTiles
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import has_sequences
from lockstep.kernels.hopper.forward.scheduling.schedule import Schedule
from lockstep.kernels.hopper.forward.scheduling.scheduler import end_beside_others, schedule_tiles
from lockstep.kernels.hopper.forward.scheduling.tile_queue import TileQueue
from lockstep.kernels.hopper.forward.second_pass import produce_second_pass
from lockstep.kernels.hopper.forward.sending import send_block, send_queries
from lockstep.kernels.hopper.forward.spans.total import allocate_total
from lockstep.kernels.launch import unspecialized

ANY_ADDRESS = ("sinks_ptr", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr", "sequence_order_ptr")
ANY_ADDRESS += ("page_table_ptr",)
# Blocks of keys that are left to be sent of a tile when its program draws the next one.
BLOCKS_LEFT = gl.constexpr(4)


@gluon.jit
def produce(program, q_desc, k_desc, v_desc, q_rings):
    """Send every tile its queries, and block by block its keys and values. Where there are two
    producers, each has None for what the other one sends."""
    schedule = program.schedule
    sent = 0
    tiles = 0
    tile = program.tile_queue.read(tiles)
    while tile.exists:
        if q_desc is not None:
            for c in gl.static_range(program.build.CONSUMERS):
                send_queries(schedule, q_rings[c], tiles, q_desc, tile, tile.q_idx + c * ROWS)
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        for block in range(begin, end):
            if schedule.LAYOUT == "varlen" and q_desc is not None:  # noqa: SIM102, as elsewhere
                if block == gl.maximum(end - BLOCKS_LEFT, begin):
                    program.tile_queue.wish()
            send_block(program, k_desc, v_desc, tile, block, sent, 0)
            sent += 1
        tiles += 1
        tile = program.tile_queue.read(tiles)
    if program.build.SECOND_PASS:
        produce_second_pass(program, q_desc, k_desc, v_desc, q_rings[0], sent, tiles)


class RowPointers(NamedTuple):
    """The results of each row, and the sinks."""

    out_ptr: Any  # contiguous [B, Hq, Sq, Dv], packed [Tq, Hq, Dv]
    lse_ptr: Any  # contiguous [B, Hq, Sq] fp32, packed [Tq, Hq]
    statistics_ptr: Any  # [*lse, 2]
    sinks_ptr: Any  # [Hq]


class SequencePointers(NamedTuple):
    """Where sequences begin, and how long they are."""

    cu_q_ptr: Any  # [B + 1]
    cu_kv_ptr: Any  # [B + 1]
    kv_lens_ptr: Any  # [B]
    sequence_order_ptr: Any  # see sequence_order.py


class RowStrides(NamedTuple):
    """Strides of lse, and of out in rows."""

    row_stride_b: Any
    row_stride_h: Any
    row_stride_s: Any


class Numbers(NamedTuple):
    """The sizes of `schedule.Schedule`."""

    order: Any
    n_q_tiles: Any
    heads: Any
    Hq: Any
    heads_per_kv: Any
    B: Any
    Sq: Any
    Skv: Any
    left: Any
    right: Any
    kv_batch_rows: Any
    l2_keys: Any
    turn: Any
    parts: Any


class PartPointers(NamedTuple):
    """The parts of tiles whose keys have several: `key_parts.py`."""

    tile_parts_ptr: Any  # [slots, BLOCK_Q, DV_COLUMNS] fp32
    tile_part_lse_ptr: Any  # [slots, BLOCK_Q] fp32
    tile_arrivals_ptr: Any  # [slots, CONSUMERS] int32


class PageNumbers(NamedTuple):
    """Numbers of a page table: see pages.py."""

    stride_tb: Any
    n_pages: Any
    page_size: Any


@gluon.jit
def allocate_rows(program, q_desc, o_desc, D_COLUMNS: gl.constexpr, OUT_COLUMNS: gl.constexpr):
    """Shared memory for the queries of one consumer, and for columns of its results."""
    if program.schedule.HEADS:
        q_ring = TileRing.create_in_boxes(q_desc, program.build.Q_STAGES, 1, D_COLUMNS, ROWS)
        shape: gl.constexpr = [1, 1, 1, 1, ROWS, OUT_COLUMNS]
        o_smem = gl.allocate_shared_memory(o_desc.dtype, shape, o_desc.layout)
    else:
        q_ring = TileRing.create(q_desc, program.build.Q_STAGES, 1, D_COLUMNS)
        o_smem = allocate_tiles(o_desc, 1)
    return q_ring, o_smem


@gluon.jit
def start_warps(
    program, results, q_desc, k_desc, v_desc, o_desc, D_COLUMNS: gl.constexpr,
    DV_COLUMNS: gl.constexpr, OUT_COLUMNS: gl.constexpr, PRODUCERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, SERVER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Start all warps of a program, with queries and results of each consumer in shared memory."""
    q_0, o_0 = allocate_rows(program, q_desc, o_desc, D_COLUMNS, OUT_COLUMNS)
    q_1, o_1 = allocate_rows(program, q_desc, o_desc, D_COLUMNS, OUT_COLUMNS)
    # The second sums of query-invariant builds: `spans/total.py`.
    t_0 = o_0
    t_1 = o_1
    if program.build.SPAN and DV_COLUMNS == 64 and program.build.TOTAL_COLUMNS > 0:
        t_0 = allocate_total(program.build.TOTAL_COLUMNS)
        t_1 = allocate_total(program.build.TOTAL_COLUMNS)
    # Arguments are written out in place: bound to a name, the constants in them become tensors.
    if PRODUCERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, program, results, q_0, o_0, o_desc, t_0)),
                (consume, (1, program, results, q_1, o_1, o_desc, t_1)),
                (produce, (program, q_desc, k_desc, None, (q_0, q_1))),
                (produce, (program, None, None, v_desc, (q_0, q_1))),
                (schedule_tiles, (program,)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )
    elif program.build.CONSUMERS == 2 and program.build.CLEANS:
        gl.warp_specialize(
            [
                (consume, (0, program, results, q_0, o_0, o_desc, t_0)),
                (consume, (1, program, results, q_1, o_1, o_desc, t_1)),
                (produce, (program, q_desc, k_desc, v_desc, (q_0, q_1))),
                (schedule_tiles, (program,)),
                (clean_blocks, (program,)),
            ],
            [4, 1, 1, CLEANER_WARPS],
            [CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )
    elif program.build.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, program, results, q_0, o_0, o_desc, t_0)),
                (consume, (1, program, results, q_1, o_1, o_desc, t_1)),
                (produce, (program, q_desc, k_desc, v_desc, (q_0, q_1))),
                (schedule_tiles, (program,)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )
    else:
        start_three(
            program, results, (q_0, q_1), (o_0, o_1), q_desc, k_desc, v_desc, o_desc, D_COLUMNS,
            OUT_COLUMNS, CONSUMER_REGISTERS, SERVER_REGISTERS,
        )  # fmt: skip


@gluon.jit
def start_three(
    program, results, q, o, q_desc, k_desc, v_desc, o_desc, D_COLUMNS: gl.constexpr,
    OUT_COLUMNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, SERVER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`start_warps` with three consumers, of which two have their queries and results. They have no
    second sums, and what stands for these is not used."""
    q_2, o_2 = allocate_rows(program, q_desc, o_desc, D_COLUMNS, OUT_COLUMNS)
    if program.build.CLEANS:
        gl.warp_specialize(
            [
                (consume, (0, program, results, q[0], o[0], o_desc, o[0])),
                (consume, (1, program, results, q[1], o[1], o_desc, o[1])),
                (consume, (2, program, results, q_2, o_2, o_desc, o_2)),
                (produce, (program, q_desc, k_desc, v_desc, (q[0], q[1], q_2))),
                (schedule_tiles, (program,)),
                (clean_blocks, (program,)),
            ],
            [4, 4, 1, 1, CLEANER_WARPS],
            [
                CONSUMER_REGISTERS,
                CONSUMER_REGISTERS,
                SERVER_REGISTERS,
                SERVER_REGISTERS,
                SERVER_REGISTERS,
            ],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, program, results, q[0], o[0], o_desc, o[0])),
                (consume, (1, program, results, q[1], o[1], o_desc, o[1])),
                (consume, (2, program, results, q_2, o_2, o_desc, o_2)),
                (produce, (program, q_desc, k_desc, v_desc, (q[0], q[1], q_2))),
                (schedule_tiles, (program,)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )


@gluon.jit
def create_ring(
    desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_KV: gl.constexpr, PAGE_ROWS: gl.constexpr, BY_BITS: gl.constexpr,
):  # fmt: skip
    """Shared memory for blocks of keys, or of values, which may come in boxes of a page's rows."""
    if PAGE_ROWS:
        return TileRing.create_in_boxes(desc, STAGES, CONSUMERS, COLUMNS, BLOCK_KV)
    else:  # noqa: RET505, Gluon would go on and return both
        return TileRing.create(desc, STAGES, CONSUMERS, COLUMNS, BY_BITS)


@gluon.jit
def create_notes(
    schedule, k_ring, SECOND_PASS: gl.constexpr, CLEANS: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Where warps note which tiles failed, and which blocks are clean."""
    # What a build does not use is not allocated, and any shared memory may stand for it: a barrier
    # of no further use would share its place with a tile, and setting it up is not ordered before
    # what the copy engine writes there.
    unused = k_ring.ring.full_bar
    failed = FailedTiles(unused, unused, CONSUMERS)
    if SECOND_PASS:
        failed = FailedTiles.create(CONSUMERS)
    cleaned = Cleaned(unused, unused)
    if CLEANS:
        cleaned = Cleaned.create(STAGES, schedule.BLOCK_KV, schedule.HAS_LEFT)
    return failed, cleaned


@unspecialized(gluon.jit, any_address=ANY_ADDRESS)
def forward_kernel(
    q_desc,  # tiles [ROWS, D] of q [B, Hq, Sq, D], or chunks of their columns, or boxes
    k_desc,  # tiles [BLOCK_KV, D] of k [B, Hkv, Skv, D], alike
    v_desc,  # tiles [BLOCK_KV, Dv] of v [B, Hkv, Skv, Dv], alike
    o_desc,  # tiles [ROWS, Dv] of out, or parts of them, or boxes
    pointers: RowPointers,
    sequences: SequencePointers,
    page_table_ptr,  # [B, ·]
    part_memory: PartPointers,
    scale,
    softcap,
    strides: RowStrides,
    Dv,
    numbers: Numbers,
    pages: PageNumbers,
    LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    D_COLUMNS: gl.constexpr,  # that are multiplied: D and Dv in multiples of 16, or 256
    DV_COLUMNS: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    PAGE_ROWS: gl.constexpr,  # that are loaded at once, 0 where keys are not in pages
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    PINGPONG: gl.constexpr,
    FIXED_MAX: gl.constexpr,
    SECOND_PASS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    TOTAL_COLUMNS: gl.constexpr,
    ADDS_LATE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    SERVER_REGISTERS: gl.constexpr,
    CONSTANT_TIME: gl.constexpr,
    ONE_LOOP: gl.constexpr,
    SPLIT: gl.constexpr,  # tiles may be: schedule.py
    HEADS: gl.constexpr,  # of a group that come together, 0 if a tile has one: grouped_rows.py
    OUT_COLUMNS: gl.constexpr,  # that leave through shared memory at once, where groups share tiles
    PARTS: gl.constexpr,  # keys of a tile may have several: key_parts.py
    EARLY: gl.constexpr,  # the kernel behind needs nothing of this one
):
    if EARLY:
        # It has the SMs that this one leaves.
        gdc_launch_dependents()
    EXACT: gl.constexpr = FIXED_MAX
    CLEANS: gl.constexpr = CONSTANT_TIME and (HAS_LEFT or HAS_RIGHT)
    CLEANERS: gl.constexpr = 1 if CLEANS else 0
    WIDE: gl.constexpr = DV_COLUMNS > 192
    # Without a branch every block is rescaled: of most heads wider than 64, while the next scores
    # are computed.
    RESCALES_LATE: gl.constexpr = CONSTANT_TIME and DV_COLUMNS > 64 and not (WIDE or ONE_LOOP)
    # Three consumers have no registers for halves.
    HALVES: gl.constexpr = CONSTANT_TIME and CONSUMERS == 2 and not WIDE
    # The tensor cores read a fifth less from shared memory then.
    Q_IN_REGISTERS: gl.constexpr = CONSTANT_TIME and D_COLUMNS == 128 and not (HAS_LEFT or ONE_LOOP)
    BY_BITS: gl.constexpr = CONSTANT_TIME and STAGES & (STAGES - 1) == 0
    schedule = Schedule(
        numbers, sequences, LAYOUT, HAS_LEFT, HAS_RIGHT, CONSUMERS * ROWS, BLOCK_KV, SPLIT, HEADS,
        PARTS,
    )  # fmt: skip
    k_ring = create_ring(k_desc, STAGES, CONSUMERS, D_COLUMNS, BLOCK_KV, PAGE_ROWS, BY_BITS)
    v_ring = create_ring(v_desc, STAGES, CONSUMERS, DV_COLUMNS, BLOCK_KV, PAGE_ROWS, BY_BITS)
    # Pages come in so many boxes of 64 columns that one warp would take longer to send them than
    # consumers need for a block.
    PRODUCERS: gl.constexpr = 2 if PAGE_ROWS and D_COLUMNS > 64 else 1
    tile_queue = TileQueue.create(CONSUMERS + PRODUCERS + CLEANERS, LAYOUT == "varlen", PARTS)
    failed, cleaned = create_notes(schedule, k_ring, SECOND_PASS, CLEANS, CONSUMERS, STAGES)
    program = Program(
        schedule, k_ring, v_ring,
        PageTable(page_table_ptr, pages.stride_tb, pages.n_pages, pages.page_size, PAGE_ROWS),
        tile_queue, failed, cleaned,
        Build(
            CONSUMERS, PINGPONG, FIXED_MAX, EXACT, SECOND_PASS, Q_STAGES, SCORES, HAS_SINKS, SPAN,
            TOTAL_COLUMNS, ADDS_LATE, CONSTANT_TIME, CLEANS, HALVES, RESCALES_LATE, Q_IN_REGISTERS,
            ONE_LOOP and (EXACT or CONSTANT_TIME),
        ),
        scale, softcap,
    )  # fmt: skip
    results = Results(
        pointers,
        strides.row_stride_b,
        strides.row_stride_h,
        strides.row_stride_s,
        Dv,
        part_memory,
    )
    if LAYOUT == "varlen" and not PAGE_ROWS:
        # The kernel that sorts the sequences lets this one start before it ends. Of sequences in
        # pages, decode comes between the two: it waits, and lets this one start behind that.
        gdc_wait()
    if LAYOUT == "varlen" and PAGE_ROWS:
        if has_sequences(schedule):
            start_warps(
                program, results, q_desc, k_desc, v_desc, o_desc, D_COLUMNS, DV_COLUMNS,
                OUT_COLUMNS, PRODUCERS, CONSUMER_REGISTERS, SERVER_REGISTERS,
            )  # fmt: skip
        else:
            end_beside_others()
    else:
        start_warps(
            program, results, q_desc, k_desc, v_desc, o_desc, D_COLUMNS, DV_COLUMNS, OUT_COLUMNS,
            PRODUCERS, CONSUMER_REGISTERS, SERVER_REGISTERS,
        )  # fmt: skip
