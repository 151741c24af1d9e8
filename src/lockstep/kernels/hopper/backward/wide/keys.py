"""dK and dV for head dims above 128: one warpgroup sums dV, another one dK.

    Sᵀ = K·Qᵀ    Pᵀ = exp2(Sᵀ·scale - lse)        dV += Pᵀ·dO
    dPᵀ = V·dOᵀ  dSᵀ = Pᵀ∘(dPᵀ - delta)           dK += dSᵀ·Q

A program owns BLOCK_KV = 64 keys and loops over the query tiles that see them. At head dim 256, dK
and dV of 64 keys fill half of the registers of an SM, so each warpgroup holds one of them. That
also parts the products: the line above needs nothing of the one below, and the one below only the
weights Pᵀ, which go from each thread of the first warpgroup to the same thread of the second
through shared memory. Scores are computed transposed, so that Pᵀ and dSᵀ are already the left
operands, in registers, of the products for dV and dK. While one warpgroup computes weights, the
products of the other keep the matrix units busy.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.hopper.backward.groups import ScoreNumbers, ShareNumbers, SizeNumbers
from lockstep.kernels.hopper.backward.nonfinite import has_nonfinite
from lockstep.kernels.hopper.backward.query_loop import assign_keys
from lockstep.kernels.hopper.backward.scores import Scores
from lockstep.kernels.hopper.backward.shares import store_share
from lockstep.kernels.hopper.backward.sizes import Sizes, with_slots
from lockstep.kernels.hopper.backward.wide.tiles import (
    CHUNK,
    PieceRing,
    add_products,
    issue_scores,
    no_sums,
    pieces_of,
    wait_all,
)
from lockstep.kernels.hopper.common.accumulator import as_registers, from_registers
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.pieces import multiply_all
from lockstep.kernels.hopper.common.ring import Ring
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers
from lockstep.kernels.launch import unspecialized

STAGES = gl.constexpr(2)  # query tiles that may be under way


@aggregate
class Program:
    """Tiles and sizes that the warps of a program share."""

    k: PieceRing  # dk in the end
    v: PieceRing
    q: PieceRing
    dout: PieceRing
    stats_smem: gl.shared_memory_descriptor  # [STAGES, 4 · BLOCK_Q] fp32, full with q
    inspected_bar: gl.shared_memory_descriptor  # of v, q and dout
    weights_smem: gl.shared_memory_descriptor  # [2, 16, 256] fp32: `as_registers`
    weights: Ring  # of weights_smem
    done_bar: gl.shared_memory_descriptor  # with all products
    dkv_full_bar: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys, queries, stats_smem, inspected_bar, weights, end_bars):
        self.k = keys[0]
        self.v = keys[1]
        self.q = queries[0]
        self.dout = queries[1]
        self.stats_smem = stats_smem
        self.inspected_bar = inspected_bar
        self.weights_smem = weights[0]
        self.weights = weights[1]
        self.done_bar = end_bars[0]
        self.dkv_full_bar = end_bars[1]

    @gluon.jit
    def create(
        q_desc, dout_desc, stats_desc, k_desc, v_desc, ND: gl.constexpr, NDV: gl.constexpr,
        MASKED: gl.constexpr,
    ):  # fmt: skip
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        weights_smem = gl.allocate_shared_memory(gl.float32, [2, 16, 256], flat)
        dout = PieceRing.create(dout_desc, NDV, STAGES, 2)
        # Barriers that nothing waits for would share their memory with tiles: `narrow/tiles.py`.
        inspected_bar = dout.ring.full_bar
        if MASKED:
            inspected_bar = barriers(STAGES, 1)
        return Program(
            (PieceRing.create(k_desc, ND, 1, 1), PieceRing.create(v_desc, NDV, 1, 1)),
            (PieceRing.create(q_desc, ND, STAGES, 2), dout),
            allocate_tiles(stats_desc, STAGES),
            inspected_bar,
            (weights_smem, Ring.create(2, CONSUMERS=1, BY_BITS=True)),
            (barriers(1, 2).index(0), barriers(1, 2).index(0)),
        )

    @gluon.jit
    def await_dout(self, n, MASKED: gl.constexpr, pred=True):
        """Until the n-th tile of dO is there and, under a mask, rid of what is not finite."""
        ready = self.inspected_bar if MASKED else self.dout.ring.full_bar
        mbarrier.wait(ready.index(n % STAGES), (n // STAGES) & 1, pred=pred)


@gluon.jit
def sum_values(loop, program, scores, sizes):
    """Partition of four warps: S, the weights and dV."""
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dv = no_sums(program.v.N)
    t = loop.first_number()
    program.k.wait(0)
    program.q.wait(0, pred=loop.n_steps > 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(program.k, 0, 0, program.q, 0),))
    program.q.release(0)
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    for n in range(loop.n_steps):
        stats_smem = program.stats_smem.index(n % STAGES)
        m = gl.expand_dims(stats_smem.slice(0, loop.BLOCK_Q).load(columns), 0)
        log2_l = gl.expand_dims(stats_smem.slice(2 * loop.BLOCK_Q, loop.BLOCK_Q).load(columns), 0)
        p, slope = scores.weights(s, m, log2_l, loop, t, 0, MASKED)
        program.weights.wait_empty(n)
        weights_smem = program.weights_smem.index(program.weights.slot(n))
        weights_smem.store(as_registers(p * slope if scores.CAPPED else p))
        program.weights.fill(n)
        program.await_dout(n, MASKED)
        dv = add_products(dv, p, program.dout, n)
        is_more = n + 1 < loop.n_steps
        program.q.wait(n + 1, pred=is_more)
        # After the last tile this multiplies whatever is in the slot; the result is not used.
        s = issue_scores(program.k, 0, 0, program.q, n + 1)
        s, dv = wait_all(s, dv)
        program.dout.release(n)
        program.q.release(n + 1, pred=is_more)
        t = loop.next_number(t)
    FIRST: gl.constexpr = program.k.N * CHUNK
    _finish(program, program.v, dv, 1.0, loop, sizes, FIRST)


@gluon.jit
def sum_keys(loop, program, scores, sizes):
    """Partition of four warps: dP, dS and dK."""
    MASKED: gl.constexpr = loop.HAS_LEFT or loop.HAS_RIGHT
    dk = no_sums(program.k.N)
    program.v.wait(0)
    program.await_dout(0, MASKED, pred=loop.n_steps > 0)
    dp = warpgroup_mma_wait(0, deps=(issue_scores(program.v, 0, 0, program.dout, 0),))
    program.dout.release(0)
    columns: gl.constexpr = gl.SliceLayout(0, dp.type.layout)
    registers: gl.constexpr = as_registers(dp).type.layout
    for n in range(loop.n_steps):
        program.q.wait(n)
        delta = program.stats_smem.index(n % STAGES).slice(loop.BLOCK_Q, loop.BLOCK_Q).load(columns)
        dp = dp - gl.expand_dims(delta, 0)
        program.weights.wait_full(n)
        weights_smem = program.weights_smem.index(program.weights.slot(n))
        p = from_registers(weights_smem.load(registers))
        ds = gl.convert_layout(p, dp.type.layout) * dp
        program.weights.release(n)
        dk = add_products(dk, ds, program.q, n)
        is_more = n + 1 < loop.n_steps
        program.await_dout(n + 1, MASKED, pred=is_more)
        dp = issue_scores(program.v, 0, 0, program.dout, n + 1)
        dp, dk = wait_all(dp, dk)
        program.q.release(n)
        program.dout.release(n + 1, pred=is_more)
    _finish(program, program.k, dk, scores.scale, loop, sizes, 0)


@gluon.jit
def _finish(program, to, sums, scale, loop, sizes, FIRST: gl.constexpr):
    """Leave scale · sums to the producer, where k or v was; those of one share of several go to
    memory as they are, as columns from FIRST on."""
    mbarrier.arrive(program.done_bar, count=1)
    mbarrier.wait(program.done_bar, 0)
    if sizes.SHARED:
        if loop.share >= 0:
            ALL: gl.constexpr = (program.k.N + program.v.N) * CHUNK
            sums = multiply_all(sums, 1.0 + loop.nan_if_bad())
            store_share(sizes.shares_ptr, loop.share, sums, FIRST, to.N * CHUNK, ALL)
        else:
            _stage(to, sums, scale, loop)
    else:
        _stage(to, sums, scale, loop)
    mbarrier.arrive(program.dkv_full_bar, count=1)


@gluon.jit
def _stage(to, sums, scale, loop):
    """scale · sums, where k or v was."""
    factor = scale + loop.nan_if_bad()
    for p in gl.static_range(pieces_of(to.N)):
        x = sums[p]
        if loop.HAS_LEFT or loop.HAS_RIGHT:
            # Whatever is not finite is NaN: `nonfinite.py`.
            x += x * 0.0
        to.piece(0, p).store((x * factor).to(to.main_smem.dtype))
    fence_async_shared()


@gluon.jit
def produce(
    key_tile, loop, program, q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Partition of one warp: loads k, v and the query tiles, and stores dk and dv."""
    program.k.send(0, k_desc, key_tile.kv_coordinates())
    program.v.send(0, v_desc, key_tile.kv_coordinates())
    tile = loop.first_tile
    t = loop.first_number()
    head = key_tile.q_head
    for n in range(loop.n_steps):
        slot = n % STAGES
        row = key_tile.q_coordinates(head, (key_tile.first_q_tile + t) * loop.BLOCK_Q)
        program.q.send(n, q_desc, row, stats_desc.block_type.nbytes)
        stats_at = [tile * (4 * loop.BLOCK_Q)]
        tma_load(stats_desc, stats_at, program.q.ring.full(n), program.stats_smem.index(slot))
        program.dout.send(n, dout_desc, row)
        tile, t = loop.next(tile, t)
        head = gl.where(t == loop.first_number(), head + 1, head)
    mbarrier.wait(program.dkv_full_bar, 0)
    is_whole = key_tile.share < 0 if SHARED else True
    if is_whole:
        program.k.store(dk_desc, key_tile.dkv_coordinates())
        program.v.store(dv_desc, key_tile.dkv_coordinates())
        tma_store_wait(0)


@gluon.jit
def inspect(loop, program):
    """Partition of one warp: takes what is not finite out of v, and out of query tiles with hidden
    pairs, before dO and then q are multiplied: `nonfinite.py`."""
    t = loop.first_number()
    for n in range(loop.n_steps):
        if n == 0:
            program.v.wait(0)
            program.v.replace_nonfinite(0, 0, loop.CONSTANT_TIME)
        program.q.wait(n)
        program.dout.wait(n)
        if loop.cuts(t):
            if loop.CONSTANT_TIME:
                program.q.replace_nonfinite(n, 0, True)
                program.dout.replace_nonfinite(n, 0, True)
            elif has_nonfinite(program.stats_smem.index(n % STAGES), loop.BLOCK_Q):
                program.q.replace_nonfinite(n, 0, False)
                program.dout.replace_nonfinite(n, 0, False)
        fence_async_shared()
        mbarrier.arrive(program.inspected_bar.index(n % STAGES), count=1)
        t = loop.next_number(t)


@unspecialized(gluon.jit, any_address=("bounds_ptr", "kv_lens_ptr"))
def keys_kernel(
    q_desc, dout_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, bounds_ptr, kv_lens_ptr,
    shares_ptr, plan_ptr, of_scores: ScoreNumbers, kv_slots, q_slots, n_heads,
    numbers: SizeNumbers, shares: ShareNumbers,
    ND: gl.constexpr, NDV: gl.constexpr, LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_EDGE: gl.constexpr, CAPPED: gl.constexpr,
    HIDES_SCORES: gl.constexpr, CONSTANT_TIME: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    # One head after the other, which shares most of L2; the first keys of a head first, which have
    # the longest loops under a causal mask.
    sizes = Sizes(
        with_slots(q_slots, numbers), bounds_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT,
        HAS_EDGE, q_desc.block_shape[3], k_desc.block_shape[3], CONSTANT_TIME,
        (shares_ptr, shares.share_heads, shares.span_tiles, shares.spans, shares.n_shares)
        if SHARED else None,
        plan_ptr,
    )  # fmt: skip
    scores = Scores(of_scores.scale, of_scores.unit, of_scores.softcap, CAPPED, HIDES_SCORES)
    MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    program = Program.create(q_desc, dout_desc, stats_desc, k_desc, v_desc, ND, NDV, MASKED)
    # Statistics are there from here on, for the next kernel, too, which needs no more than those.
    gdc_wait()
    gdc_launch_dependents()
    key_tile, loop = assign_keys(gl.program_id(0), kv_slots, n_heads, 1, sizes)
    # Tuples are written out in place: bound to a name, the constants in them become tensors.
    if MASKED:
        gl.warp_specialize(
            [
                (sum_values, (loop, program, scores, sizes)),
                (sum_keys, (loop, program, scores, sizes)),
                (produce, (key_tile, loop, program, q_desc, dout_desc, stats_desc, k_desc, v_desc,
                           dk_desc, dv_desc, SHARED)),
                (inspect, (loop, program)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (sum_values, (loop, program, scores, sizes)),
                (sum_keys, (loop, program, scores, sizes)),
                (produce, (key_tile, loop, program, q_desc, dout_desc, stats_desc, k_desc, v_desc,
                           dk_desc, dv_desc, SHARED)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
