"""What the warps of a backward program share: tiles in shared memory, and the barriers of each."""

from __future__ import annotations

from lockstep.kernels.hopper.gluon_shim import aggregate, gl, gluon, mbarrier

STAGES = gl.constexpr(2)


@gluon.jit
def allocate_tiles(desc, N: gl.constexpr):
    """Shared memory for N tiles of a tensor map."""
    shape: gl.constexpr = [N] + desc.block_shape  # noqa: RUF005, Gluon does not unpack
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers [N, 1], each of which completes when COUNT partitions have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@aggregate
class Tiles:
    """`stats` holds lse2 and delta of a query tile. `*_full` complete when a tile has landed or was
    written, `*_empty` when both consumers are done with it."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    stats: gl.shared_memory_descriptor  # [STAGES, 2 * BLOCK_Q] fp32
    dout: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_Q, D]
    k: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_KV, D], dk in the end
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # [2, BLOCK_KV, BLOCK_Q]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    inspected: gl.shared_memory_descriptor  # of q and dout: `backward_strays`
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    dkv_full: gl.shared_memory_descriptor
    k_done: gl.shared_memory_descriptor
    k_inspected: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, q_bars, dout_bars, ds_bars, kv_bars):
        self.q = queries[0]
        self.stats = queries[1]
        self.dout = queries[2]
        self.k = keys[0]
        self.v = keys[1]
        self.ds = keys[2]
        self.q_full = q_bars[0]
        self.q_empty = q_bars[1]
        self.inspected = q_bars[2]
        self.dout_full = dout_bars[0]
        self.dout_empty = dout_bars[1]
        self.ds_full = ds_bars[0]
        self.ds_empty = ds_bars[1]
        self.kv_full = kv_bars[0]
        self.dkv_full = kv_bars[1]
        self.k_done = kv_bars[2]
        self.k_inspected = kv_bars[3]

    @gluon.jit
    def create(q_desc, dout_desc, stats_desc, k_desc, v_desc):
        dtype: gl.constexpr = q_desc.dtype
        BLOCK_Q: gl.constexpr = q_desc.block_shape[3]
        BLOCK_KV: gl.constexpr = k_desc.block_shape[3]
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_Q], dtype)
        q = allocate_tiles(q_desc, STAGES)
        stats = allocate_tiles(stats_desc, STAGES)
        dout = allocate_tiles(dout_desc, STAGES)
        k = allocate_tiles(k_desc, 1).index(0)
        v = allocate_tiles(v_desc, 1).index(0)
        ds = gl.allocate_shared_memory(dtype, [2, BLOCK_KV, BLOCK_Q], ds_layout)
        kv_full, k_inspected = barriers(1, 1).index(0), barriers(1, 1).index(0)
        dkv_full, k_done = barriers(1, 2).index(0), barriers(1, 2).index(0)
        return Tiles(
            (q, stats, dout),
            (k, v, ds),
            (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1)),
            (barriers(STAGES, 1), barriers(STAGES, 2)),
            (barriers(2, 2), barriers(2, 2)),
            (kv_full, dkv_full, k_done, k_inspected),
        )

    @gluon.jit
    def matrix(self, tile):
        """A tile as [rows, D]."""
        return tile.reshape([tile.shape[3], tile.shape[4]])
