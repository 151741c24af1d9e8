"""The backward kernel: five matrix products per pair of tiles, each computed once.

    Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    Pᵀ = exp2(Sᵀ·scale - lse)    dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ += dS·K

A program owns BLOCK_KV = 128 keys and walks over the query tiles that see them. Two warpgroups of
64 keys hold dK and dV in registers. Only dQ sums over all 128 keys: for it dSᵀ goes through shared
memory, and each warpgroup multiplies one half of the tile of dQ, which is then added to sums in
global memory (`backward_turns.py`). How the two go about it depends on the head dim:
`backward_together.py`, `backward_apart.py`. Further warps have one task each: to load tiles, to
wait for turns at dQ, to add to it, and where there is a mask, to look for what is not finite.
"""

from __future__ import annotations

from lockstep.kernels.hopper.backward_apart import consume_apart
from lockstep.kernels.hopper.backward_strays import inspect
from lockstep.kernels.hopper.backward_tiles import STAGES, Tiles
from lockstep.kernels.hopper.backward_together import consume_together
from lockstep.kernels.hopper.backward_turns import Turns, add_parts, take_turns
from lockstep.kernels.hopper.backward_walk import assign
from lockstep.kernels.hopper.gluon_shim import (
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)


@gluon.jit
def produce(job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc, v_desc,
            dk_desc, dv_desc):  # fmt: skip
    """Partition of one warp: loads k, v and the query tiles, and stores dk and dv."""
    mbarrier.expect(tiles.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, job.kv_coordinates(), tiles.kv_full, tiles.k.index(0))
    tma_load(v_desc, job.kv_coordinates(), tiles.kv_full, tiles.v.index(0))
    tile = walk.first_tile
    t = tile * 0
    head = job.head * heads_per_kv
    for n in range(walk.n_steps):
        slot = n % STAGES
        row = job.q_coordinates(head, (job.first_q_tile + t) * walk.BLOCK_Q)
        if n >= STAGES:
            tiles.await_empty(slot)
        full = tiles.full.index(slot)
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
        tma_load(q_desc, row, full, tiles.q.index(slot))
        tma_load(stats_desc, [tile * (2 * walk.BLOCK_Q)], full, tiles.stats.index(slot))
        tma_load(dout_desc, row, full, tiles.dout.index(slot))
        tile, t = walk.next(tile, t)
        head = gl.where(t == 0, head + 1, head)
    mbarrier.wait(tiles.dkv_full, 0)
    tma_store(dk_desc, job.dkv_coordinates(), tiles.k.index(0))
    tma_store(dv_desc, job.dkv_coordinates(), tiles.v.index(0))
    tma_store_wait(0)


@gluon.jit
def consume(
    W: gl.constexpr, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    """Partition of four warps: the keys from W·ROWS on, and one half of every tile of dQ."""
    if walk.BLOCK_Q == 64:
        consume_together(W, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED, HIDES_SCORES)
    else:
        consume_apart(W, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED, HIDES_SCORES)


@gluon.jit(
    do_not_specialize=[
        "turn_ptr", "ticket_ptr", "cu_q_ptr", "cu_kv_ptr", "kv_lens_ptr", "kv_slots", "q_slots",
        "n_heads", "heads_at_once", "Hkv", "heads_per_kv", "B", "Sq", "Skv", "left", "right",
        "kv_batch_rows",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, turn_ptr,
    ticket_ptr, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, scale, scale_log2, cap_log2, kv_slots, q_slots,
    n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left, right, kv_batch_rows,
    LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr,
    CAPPED: gl.constexpr, HIDES_SCORES: gl.constexpr,
):  # fmt: skip
    # Drawn in the order in which programs start to run.
    ticket = gl.atomic_add(ticket_ptr, 1)
    job, walk = assign(
        ticket, kv_slots, q_slots, n_heads, heads_at_once, Hkv, heads_per_kv, B, Sq, Skv, left,
        right, kv_batch_rows, cu_q_ptr, cu_kv_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT,
        HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3],
    )  # fmt: skip
    tiles = Tiles.create(q_desc, dout_desc, stats_desc, k_desc, v_desc)
    turns = Turns.create(sums_desc)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if HAS_LEFT or HAS_RIGHT:
        gl.warp_specialize(
            [
                (consume, (0, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (produce, (job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc,
                           v_desc, dk_desc, dv_desc)),
                (take_turns, (turns, turn_ptr, walk)),
                (add_parts, (turns, sums_desc, turn_ptr, walk)),
                (inspect, (walk, tiles)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (consume, (1, walk, tiles, turns, scale, scale_log2, cap_log2, CAPPED,
                           HIDES_SCORES)),
                (produce, (job, walk, tiles, heads_per_kv, q_desc, dout_desc, stats_desc, k_desc,
                           v_desc, dk_desc, dv_desc)),
                (take_turns, (turns, turn_ptr, walk)),
                (add_parts, (turns, sums_desc, turn_ptr, walk)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
