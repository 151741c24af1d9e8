"""Tiles in shared memory that the warps of a program share, and the barriers of each.

Tiles of q and k have 192 columns, in two pieces, MAIN and REST: of 128 columns and of 64.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE, arrive, await_all
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers, phase_of, slot_of

STAGES = gl.constexpr(2)
MAIN = gl.constexpr(128)  # columns of the first piece

BOTH_CONSUMERS = gl.constexpr(256)  # threads
CONSUMERS_AND_WARP = gl.constexpr(288)
CONSUMER_AND_WARP = gl.constexpr(160)
CONSUMERS_MEET = FIRST_FREE
DQ_FULL = gl.constexpr(FIRST_FREE.value + 1)  # one of each consumer
EMPTY = gl.constexpr(DQ_FULL.value + 2)  # STAGES of them
DS_READ = gl.constexpr(EMPTY.value + STAGES.value)  # one of each consumer
DKV_FULL = gl.constexpr(DS_READ.value + 2)


@aggregate
class Tiles:
    """Tiles of queries are in a ring of STAGES. `full_bar` complete when the tiles of a step are
    there, the last of them when tiles have landed that are to be inspected before; the named
    barriers from EMPTY on when both consumers have released them, and after the last step of a loop
    k. `k_full_bar` and `v_full_bar` are those of the keys of a loop. At its end dk is staged in
    tiles that are not needed any more, or not yet, dv where v was: DKV_FULL says that they are
    there, `dkv_stored_bar` that they are in memory."""

    q_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, MAIN]
    q_rest_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, 64]
    stats_smem: gl.shared_memory_descriptor  # [STAGES, 4 · BLOCK_Q] fp32
    dout_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, DV]
    k_smem: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_KV, MAIN]
    k_rest_smem: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_KV, 64]
    v_smem: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_KV, DV]
    ds_smem: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_Q, BLOCK_KV]
    full_bar: gl.shared_memory_descriptor  # [STAGES + 1, 1]
    k_full_bar: gl.shared_memory_descriptor
    v_full_bar: gl.shared_memory_descriptor
    dkv_stored_bar: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, ds_smem, full_bar, kv_bars):
        self.q_smem, self.q_rest_smem, self.stats_smem, self.dout_smem = queries
        self.k_smem, self.k_rest_smem, self.v_smem = keys
        self.ds_smem = ds_smem
        self.full_bar = full_bar
        self.k_full_bar, self.v_full_bar, self.dkv_stored_bar = kv_bars

    @gluon.jit
    def create(q_desc, q_rest_desc, dout_desc, stats_desc, k_desc, k_rest_desc, v_desc):
        BLOCK_Q: gl.constexpr = q_desc.block_shape[3]
        BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
        ds_shape: gl.constexpr = [1, 1, 1, 1, BLOCK_Q, BLOCK_KV]
        return Tiles(
            (
                allocate_tiles(q_desc, STAGES),
                allocate_tiles(q_rest_desc, STAGES),
                allocate_tiles(stats_desc, STAGES),
                allocate_tiles(dout_desc, STAGES),
            ),
            (allocate_tiles(k_desc, 1), allocate_tiles(k_rest_desc, 1), allocate_tiles(v_desc, 1)),
            gl.allocate_shared_memory(q_desc.dtype, ds_shape, q_desc.layout),
            barriers(STAGES + 1, 1),
            (barriers(1, 1).index(0), barriers(1, 1).index(0), barriers(1, 1).index(0)),
        )

    @gluon.jit
    def matrix(self, tile):
        """A tile as [rows, columns]."""
        return tile.reshape([tile.shape[3], tile.shape[4]])

    @gluon.jit
    def keys(self, n):
        """Both pieces of k, and v [BLOCK_KV, ·], in the n-th step. Descriptors of operands take no
        registers from one step to the next: no compiler can know that the index is 0."""
        index = n >> 30
        return (
            self.matrix(self.k_smem.index(index)),
            self.matrix(self.k_rest_smem.index(index)),
            self.matrix(self.v_smem.index(index)),
        )

    @gluon.jit
    def wait(self, n, pred=True):
        """Consumer: wait until the query tiles of the n-th step are there."""
        slot = slot_of(n, STAGES)
        mbarrier.wait(self.full_bar.index(slot), phase_of(n, STAGES), pred=pred)

    @gluon.jit
    def queries(self, slot):
        """Both pieces of q, and dO [BLOCK_Q, ·] in a slot."""
        return (
            self.matrix(self.q_smem.index(slot)),
            self.matrix(self.q_rest_smem.index(slot)),
            self.matrix(self.dout_smem.index(slot)),
        )

    @gluon.jit
    def ds_tile(self, n):
        """Where dS [BLOCK_Q, BLOCK_KV] of the n-th step goes: `keys` says why it takes n."""
        return self.matrix(self.ds_smem.index(n >> 30))

    @gluon.jit
    def release(self, slot):
        """Consumer: this step's tiles, or k if it was a loop's last, may be written over."""
        arrive(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def wait_empty(self, slot):
        """Producer: wait until what consumers have released with this slot may be written over."""
        await_all(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def release_ds(self, W: gl.constexpr):
        """Consumer: it has read dS of this step."""
        arrive(DS_READ + W, BOTH_CONSUMERS)

    @gluon.jit
    def wait_ds_read(self, W: gl.constexpr):
        """Consumer: wait until the other one has read dS of the step before."""
        await_all(DS_READ + (1 - W), BOTH_CONSUMERS)

    @gluon.jit
    def sync_consumers(self):
        """Consumer: wait for the other one."""
        await_all(CONSUMERS_MEET, BOTH_CONSUMERS)

    @gluon.jit
    def dk_tiles(self, slot, W: gl.constexpr):
        """Where both pieces of a consumer's dk lie, if `slot` is that of the loop's last query
        tile. The next loop begins with the other one."""
        if W == 0:
            return self.q_smem.index(slot), self.q_rest_smem.index(slot)
        else:  # noqa: RET505, Gluon would compile both
            # The first 64 keys of dS, which lie together.
            shape: gl.constexpr = [2, 1, 1, 1, self.q_smem.shape[4], 64]
            ds = reinterpret(self.ds_smem, self.ds_smem.dtype, shape, self.q_smem.type.layout)
            return self.dout_smem.index(slot), ds.index(0)

    @gluon.jit
    def stage_dkv(self, W: gl.constexpr, slot, dk, dk_rest, dv):
        """Consumer: its rows of dk and dv, to be stored."""
        dtype: gl.constexpr = self.k_smem.dtype
        main, rest = self.dk_tiles(slot, W)
        self.matrix(main).store(dk.to(dtype))
        self.matrix(rest).store(dk_rest.to(dtype))
        _, _, v = self.keys(0)
        v.slice(W * ROWS, ROWS, dim=0).store(dv.to(dtype))
        fence_async_shared()
        arrive(DKV_FULL, CONSUMERS_AND_WARP)

    @gluon.jit
    def wait_dkv(self):
        """Producer: wait until dk and dv are there."""
        await_all(DKV_FULL, CONSUMERS_AND_WARP)
