"""Tiles in shared memory that the warps of a program share, and the barriers of each."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
)
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE, arrive, await_all
from lockstep.kernels.hopper.common.pieces import store_pieces
from lockstep.kernels.hopper.common.ring import Ring
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers, phase_of, slot_of

STAGES = gl.constexpr(2)
PARTS = gl.constexpr(2)  # tiles of dQ of a program that may wait to be added
DS_TILES = gl.constexpr(2)  # one to be multiplied, one to be written

BOTH_CONSUMERS = gl.constexpr(256)  # threads
CONSUMERS_AND_WARP = gl.constexpr(288)
CONSUMERS_MEET = FIRST_FREE
DQ_FULL = gl.constexpr(FIRST_FREE.value + 1)  # PARTS of them
EMPTY = gl.constexpr(DQ_FULL.value + PARTS.value)  # STAGES of them
KV_EMPTY = gl.constexpr(EMPTY.value + STAGES.value)
DKV_FULL = gl.constexpr(KV_EMPTY.value + 1)


@aggregate
class Tiles:
    """Tiles of queries are in a ring of STAGES. `full_bar` complete when the tiles of a step are
    there, the last of them when tiles have landed that are to be inspected before; the named
    barriers from EMPTY on when both consumers have released them. `kv_full_bar` and KV_EMPTY are
    those of the keys of a loop. At its end dk and dv are staged in tiles that are not needed any
    more, or not yet: DKV_FULL says that they are there, `dkv_stored_bar` that they are in memory.
    """

    q_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    stats_smem: gl.shared_memory_descriptor  # [STAGES · STATS, 2 · BLOCK_Q] fp32
    dout_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    k_smem: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_KV, D]
    v_smem: gl.shared_memory_descriptor
    ds_smem: gl.shared_memory_descriptor  # [DS_TILES, 1, 1, 1, BLOCK_Q, BLOCK_KV]
    full_bar: gl.shared_memory_descriptor  # [STAGES + 1, 1]
    ds: Ring  # of ds_smem, for consumers that run apart
    kv_full_bar: gl.shared_memory_descriptor
    dkv_stored_bar: gl.shared_memory_descriptor
    D_COLUMNS: gl.constexpr  # that are multiplied
    DV_COLUMNS: gl.constexpr
    TOGETHER: gl.constexpr  # consumers take each step together
    STATS: gl.constexpr  # tiles of statistics of a query tile: `rows.py`

    @gluon.constexpr_function
    def __init__(self, queries, keys, full_bar, ds, kv_bars, columns, TOGETHER, STATS):
        self.q_smem = queries[0]
        self.stats_smem = queries[1]
        self.dout_smem = queries[2]
        self.k_smem = keys[0]
        self.v_smem = keys[1]
        self.ds_smem = keys[2]
        self.full_bar = full_bar
        self.ds = ds
        self.kv_full_bar = kv_bars[0]
        self.dkv_stored_bar = kv_bars[1]
        self.D_COLUMNS = gl.constexpr(columns[0])
        self.DV_COLUMNS = gl.constexpr(columns[1])
        self.TOGETHER = gl.constexpr(TOGETHER)
        self.STATS = gl.constexpr(STATS)

    @gluon.jit
    def create(
        q_desc, dout_desc, stats_desc, k_desc, v_desc, D_COLUMNS: gl.constexpr,
        DV_COLUMNS: gl.constexpr, TOGETHER: gl.constexpr, STATS: gl.constexpr = 1,
    ):  # fmt: skip
        dtype: gl.constexpr = q_desc.dtype
        BLOCK_Q: gl.constexpr = q_desc.block_shape[3]
        BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
        q = allocate_tiles(q_desc, STAGES)
        stats = allocate_tiles(stats_desc, STAGES * STATS)
        dout = allocate_tiles(dout_desc, STAGES)
        k = allocate_tiles(k_desc, 1)
        v = allocate_tiles(v_desc, 1)
        ds_shape: gl.constexpr = [DS_TILES, 1, 1, 1, BLOCK_Q, BLOCK_KV]
        ds = gl.allocate_shared_memory(dtype, ds_shape, q_desc.layout)
        full_bar = barriers(STAGES + 1, 1)
        if TOGETHER:
            # Consumers that run together use no ring, and must not have one: the compiler would
            # give the memory of barriers that nothing waits for to tiles. A GPU that switches to
            # another process writes barriers back to where they were made, and they are NaN.
            ring = Ring(full_bar, full_bar, DS_TILES, True)
        else:
            ring = Ring.create(DS_TILES, CONSUMERS=2, PRODUCERS=2, BY_BITS=True)
        return Tiles(
            (q, stats, dout),
            (k, v, ds),
            full_bar,
            ring,
            (barriers(1, 1).index(0), barriers(1, 1).index(0)),
            (D_COLUMNS, DV_COLUMNS),
            TOGETHER,
            STATS,
        )

    @gluon.jit
    def matrix(self, tile):
        """A tile as [rows, D]."""
        return tile.reshape([tile.shape[3], tile.shape[4]])

    @gluon.jit
    def keys(self, n, KEPT: gl.constexpr):
        """k and v [BLOCK_KV, D], in the n-th step. Unless KEPT, descriptors of operands take no
        registers from one step to the next: no compiler can know that the index is 0."""
        index = 0 if KEPT else n >> 30
        return self.matrix(self.k_smem.index(index)), self.matrix(self.v_smem.index(index))

    @gluon.jit
    def wait(self, n, pred=True):
        """Consumer: wait until the query tiles of the n-th step are there."""
        slot = slot_of(n, STAGES)
        mbarrier.wait(self.full_bar.index(slot), phase_of(n, STAGES), pred=pred)

    @gluon.jit
    def queries(self, slot):
        """q and dO [BLOCK_Q, D] in a slot, and their statistics [2 · BLOCK_Q]."""
        stats_smem = self.stats_smem.index(slot * self.STATS)
        q = self.matrix(self.q_smem.index(slot))
        return q, self.matrix(self.dout_smem.index(slot)), stats_smem

    @gluon.jit
    def log2_l(self, slot):
        """The second tile of statistics in a slot, which begins with log2 l."""
        return self.stats_smem.index(slot * self.STATS + 1)

    @gluon.jit
    def ds_tile(self, n):
        """Where dS [BLOCK_Q, BLOCK_KV] of the n-th step goes."""
        return self.matrix(self.ds_smem.index(slot_of(n, DS_TILES)))

    @gluon.jit
    def release(self, slot):
        """Consumer: this step's tiles may be written over."""
        arrive(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def wait_empty(self, slot):
        """Producer: wait until the tiles of the step before the last may be written over."""
        await_all(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def release_keys(self):
        """Consumer: k and v may be written over."""
        arrive(KV_EMPTY, CONSUMERS_AND_WARP)

    @gluon.jit
    def wait_keys_empty(self):
        """Producer: wait until k and v of the loop before may be written over."""
        await_all(KV_EMPTY, CONSUMERS_AND_WARP)

    @gluon.jit
    def sync_consumers(self):
        """Consumer: wait for the other one."""
        await_all(CONSUMERS_MEET, BOTH_CONSUMERS)

    @gluon.jit
    def dkv(self, slot, i: gl.constexpr):
        """Where the i-th tiles [BLOCK_Q, D] of dk and dv lie, if `slot` is that of the loop's last
        query tile. The next loop begins with the other one."""
        if self.q_smem.shape[4] == self.k_smem.shape[4]:
            return self.q_smem.index(slot), self.dout_smem.index(slot)
        else:  # noqa: RET505, Gluon would compile both
            return (self.q_smem if i == 0 else self.dout_smem).index(slot), self.ds_smem.index(i)

    @gluon.jit
    def stage_dkv(self, W: gl.constexpr, slot, dk, dv):
        """Consumer: pieces of its rows of dk and dv, to be stored."""
        BLOCK_Q: gl.constexpr = self.q_smem.shape[4]
        row: gl.constexpr = W * ROWS
        dk_tile, dv_tile = self.dkv(slot, row // BLOCK_Q)
        rows: gl.constexpr = row % BLOCK_Q
        dk_rows = self.matrix(dk_tile).slice(rows, ROWS, dim=0)
        store_pieces(dk, dk_rows, self.D_COLUMNS)
        dv_rows = self.matrix(dv_tile).slice(rows, ROWS, dim=0)
        store_pieces(dv, dv_rows, self.DV_COLUMNS)
        fence_async_shared()
        self.publish_dkv()

    @gluon.jit
    def publish_dkv(self):
        """Consumer: its rows of dk and dv are there."""
        arrive(DKV_FULL, CONSUMERS_AND_WARP)

    @gluon.jit
    def wait_dkv(self):
        """Producer: wait until dk and dv are there."""
        await_all(DKV_FULL, CONSUMERS_AND_WARP)
