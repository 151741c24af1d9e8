"""What the warps of a backward program share: tiles in shared memory, and the barriers of each."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
)
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE, arrive, await_all
from lockstep.kernels.hopper.common.shared_memory import allocate_tiles, barriers

STAGES = gl.constexpr(2)
PARTS = gl.constexpr(2)  # tiles of dQ of a program that may wait to be added
DS_TILES = gl.constexpr(2)  # one to be multiplied, one to be written

CONSUMERS = gl.constexpr(256)  # threads
CONSUMERS_AND_WARP = gl.constexpr(288)
MEETING = FIRST_FREE
STAGED = gl.constexpr(FIRST_FREE.value + 1)  # PARTS of them
EMPTY = gl.constexpr(STAGED.value + PARTS.value)  # STAGES of them
KEYS_EMPTY = gl.constexpr(EMPTY.value + STAGES.value)
DERIVED = gl.constexpr(KEYS_EMPTY.value + 1)


@aggregate
class Tiles:
    """`stats` holds lse2 and delta of a query tile. `full` complete when the tiles of a step are
    there, the last of them when tiles have landed that are to be inspected before; when both
    consumers are done with them, the named barriers from EMPTY on do. Likewise `kv_full` and
    KEYS_EMPTY for the keys of a loop. At its end dk and dv lie where nobody needs anything any
    more, or not yet: DERIVED says that they are there, `dkv_stored` that they are gone."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    stats: gl.shared_memory_descriptor  # [STAGES, 2 * BLOCK_Q] fp32
    dout: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    k: gl.shared_memory_descriptor  # [1, 1, 1, 1, BLOCK_KV, D]
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # [DS_TILES, 1, 1, 1, BLOCK_Q, BLOCK_KV]
    full: gl.shared_memory_descriptor  # [STAGES + 1, 1]
    ds_full: gl.shared_memory_descriptor  # for consumers apart
    ds_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    dkv_stored: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, full, ds_bars, kv_bars):
        self.q = queries[0]
        self.stats = queries[1]
        self.dout = queries[2]
        self.k = keys[0]
        self.v = keys[1]
        self.ds = keys[2]
        self.full = full
        self.ds_full = ds_bars[0]
        self.ds_empty = ds_bars[1]
        self.kv_full = kv_bars[0]
        self.dkv_stored = kv_bars[1]

    @gluon.jit
    def create(q_desc, dout_desc, stats_desc, k_desc, v_desc):
        dtype: gl.constexpr = q_desc.dtype
        BLOCK_Q: gl.constexpr = q_desc.block_shape[3]
        BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
        q = allocate_tiles(q_desc, STAGES)
        stats = allocate_tiles(stats_desc, STAGES)
        dout = allocate_tiles(dout_desc, STAGES)
        k = allocate_tiles(k_desc, 1)
        v = allocate_tiles(v_desc, 1)
        ds_shape: gl.constexpr = [DS_TILES, 1, 1, 1, BLOCK_Q, BLOCK_KV]
        ds = gl.allocate_shared_memory(dtype, ds_shape, q_desc.layout)
        return Tiles(
            (q, stats, dout),
            (k, v, ds),
            barriers(STAGES + 1, 1),
            (barriers(DS_TILES, 2), barriers(DS_TILES, 2)),
            (barriers(1, 1).index(0), barriers(1, 1).index(0)),
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
        return self.matrix(self.k.index(index)), self.matrix(self.v.index(index))

    @gluon.jit
    def release(self, slot):
        """Consumer: this step's tiles may be written over."""
        arrive(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def await_empty(self, slot):
        """Producer: wait until the tiles of the step before the last may be written over."""
        await_all(EMPTY + slot, CONSUMERS_AND_WARP)

    @gluon.jit
    def release_keys(self):
        """Consumer: k and v may be written over."""
        arrive(KEYS_EMPTY, CONSUMERS_AND_WARP)

    @gluon.jit
    def await_keys_empty(self):
        """Producer: wait until k and v of the loop before may be written over."""
        await_all(KEYS_EMPTY, CONSUMERS_AND_WARP)

    @gluon.jit
    def meet(self):
        """Consumer: wait for the other one."""
        await_all(MEETING, CONSUMERS)

    @gluon.jit
    def derived(self, slot, i: gl.constexpr):
        """Where the i-th tiles [BLOCK_Q, D] of dk and dv lie, if `slot` is that of the loop's last
        query tile. The next loop begins with the other one."""
        if self.q.shape[4] == self.k.shape[4]:
            return self.q.index(slot), self.dout.index(slot)
        else:  # noqa: RET505, Gluon would compile both
            return (self.q if i == 0 else self.dout).index(slot), self.ds.index(i)

    @gluon.jit
    def leave(self, W: gl.constexpr, slot, dk, dv):
        """Consumer: its rows of dk and dv, to be stored."""
        BLOCK_Q: gl.constexpr = self.q.shape[4]
        ROWS: gl.constexpr = dk.shape[0]
        row: gl.constexpr = W * ROWS
        dk_tile, dv_tile = self.derived(slot, row // BLOCK_Q)
        rows: gl.constexpr = row % BLOCK_Q
        self.matrix(dk_tile).slice(rows, ROWS, dim=0).store(dk.to(dk_tile.dtype))
        self.matrix(dv_tile).slice(rows, ROWS, dim=0).store(dv.to(dv_tile.dtype))
        fence_async_shared()
        arrive(DERIVED, CONSUMERS_AND_WARP)

    @gluon.jit
    def await_derived(self):
        """Producer: wait until dk and dv are there."""
        await_all(DERIVED, CONSUMERS_AND_WARP)
