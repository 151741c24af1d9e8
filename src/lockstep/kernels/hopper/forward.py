"""The forward kernel: two warps that serve two or three consumer warpgroups of 64 query rows.

    S = Q·Kᵀ,  P = exp2(S·scale - m·scale),  O = Σ P·V / l,  lse = m + log(l)

The usher (`usher.py`) says which tile is next, the producer streams its Q, K and V into shared
memory by TMA, and the consumers (`consumer.py`) do the rest.
"""

from __future__ import annotations

from lockstep.kernels.hopper.board import Board
from lockstep.kernels.hopper.channel import Channel, Lap
from lockstep.kernels.hopper.consumer import consume
from lockstep.kernels.hopper.gluon_shim import gl, gluon
from lockstep.kernels.hopper.schedule import Schedule
from lockstep.kernels.hopper.second_lap import produce_again
from lockstep.kernels.hopper.shared_memory import allocate_tiles
from lockstep.kernels.hopper.team import ROWS, Build, Results, Team
from lockstep.kernels.hopper.usher import usher

# Values in int32 and pointers that must not make a kernel of their own: none is compiled for a
# length that happens to be 1 or a multiple of 16.
UNSPECIALIZED = [
    "row_stride_b",
    "row_stride_h",
    "row_stride_s",
    "Dv",
    "order",
    "n_q_tiles",
    "heads",
    "Hq",
    "heads_per_kv",
    "B",
    "Sq",
    "Skv",
    "left",
    "right",
    "kv_batch_rows",
    "l2_keys",
    "sinks_ptr",
    "cu_q_ptr",
    "cu_kv_ptr",
    "kv_lens_ptr",
    "line_ptr",
]


@gluon.jit
def produce(team, q_desc, k_desc, v_desc, q_channels):
    """Send every tile its queries, and block by block its keys and values."""
    schedule = team.schedule
    sent = 0
    tiles = 0
    tile = team.board.read(tiles)
    while tile.exists:
        for c in gl.static_range(team.build.CONSUMERS):
            at = schedule.q_coordinates(tile, tile.q_idx + c * ROWS)
            q_channels[c].send(tiles, q_desc, at)
        begin, end = schedule.blocks(tile, tile.q_idx, schedule.BLOCK_Q)
        for block in range(begin, end):
            at = schedule.kv_coordinates(tile, block)
            team.k.send(sent, k_desc, at)
            team.v.send(sent, v_desc, at)
            sent += 1
        tiles += 1
        tile = team.board.read(tiles)
    if team.build.SECOND_LAP:
        produce_again(team, q_desc, k_desc, v_desc, q_channels[0], sent, tiles)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q_desc,  # tiles [ROWS, D] of q [B, Hq, Sq, D]
    k_desc,  # tiles [BLOCK_KV, D] of k [B, Hkv, Skv, D]
    v_desc,  # tiles [BLOCK_KV, Dv] of v [B, Hkv, Skv, Dv]
    o_desc,  # tiles [ROWS, Dv] of out, or half of Dv
    out_ptr,  # contiguous [B, Hq, Sq, Dv], packed [Tq, Hq, Dv]
    lse_ptr,  # contiguous [B, Hq, Sq] fp32, packed [Tq, Hq]
    statistics_ptr,  # [*lse, 2]
    sinks_ptr,  # [Hq]
    cu_q_ptr,  # [B + 1]
    cu_kv_ptr,  # [B + 1]
    kv_lens_ptr,  # [B]
    line_ptr,  # see line_up.py
    scale,
    softcap,
    row_stride_b,  # of lse, and of out in rows
    row_stride_h,
    row_stride_s,
    Dv,
    order,
    n_q_tiles,
    heads,
    Hq,
    heads_per_kv,
    B,
    Sq,
    Skv,
    left,
    right,
    kv_batch_rows,
    l2_keys,
    LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SCORES: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    SETTLED: gl.constexpr,
    SECOND_LAP: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    SERVER_REGISTERS: gl.constexpr,
):
    schedule = Schedule(
        (
            order,
            n_q_tiles,
            heads,
            Hq,
            heads_per_kv,
            B,
            Sq,
            Skv,
            left,
            right,
            kv_batch_rows,
            l2_keys,
        ),
        (cu_q_ptr, cu_kv_ptr, kv_lens_ptr, line_ptr),
        LAYOUT,
        HAS_LEFT,
        HAS_RIGHT,
        CONSUMERS * ROWS,
        k_desc.block_shape[3],
    )
    team = Team(
        schedule,
        Channel.create(k_desc, STAGES, CONSUMERS),
        Channel.create(v_desc, STAGES, CONSUMERS),
        Board.create(CONSUMERS + 1),
        Lap.create(CONSUMERS),
        Build(CONSUMERS, TURNS, SETTLED, SECOND_LAP, Q_STAGES, SCORES, HAS_SINKS),
        scale,
        softcap,
    )
    results = Results(
        (out_ptr, lse_ptr, statistics_ptr, sinks_ptr), row_stride_b, row_stride_h, row_stride_s, Dv
    )
    q_0 = Channel.create(q_desc, Q_STAGES, 1)
    q_1 = Channel.create(q_desc, Q_STAGES, 1)
    o_0 = allocate_tiles(o_desc, 1)
    o_1 = allocate_tiles(o_desc, 1)
    # Arguments are written out in place: bound to a name, the constants in them become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, team, results, q_0, o_0, o_desc)),
                (consume, (1, team, results, q_1, o_1, o_desc)),
                (produce, (team, q_desc, k_desc, v_desc, (q_0, q_1))),
                (usher, (team,)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )
    else:
        q_2 = Channel.create(q_desc, Q_STAGES, 1)
        o_2 = allocate_tiles(o_desc, 1)
        gl.warp_specialize(
            [
                (consume, (0, team, results, q_0, o_0, o_desc)),
                (consume, (1, team, results, q_1, o_1, o_desc)),
                (consume, (2, team, results, q_2, o_2, o_desc)),
                (produce, (team, q_desc, k_desc, v_desc, (q_0, q_1, q_2))),
                (usher, (team,)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, SERVER_REGISTERS, SERVER_REGISTERS],
        )
