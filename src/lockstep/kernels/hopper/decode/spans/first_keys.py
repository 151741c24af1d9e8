"""The keys with which rows of query-invariant calls begin: all weights of a row are relative to the
maximum of these (`common/spans.py`). A program that has later keys of it loads them once more."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import accumulator, zeros
from lockstep.kernels.hopper.common.gluon_shim import (
    aggregate,
    await_warps,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lockstep.kernels.hopper.common.spans import FIRST, end_of_first, first_sum, span_weights
from lockstep.kernels.hopper.decode.few_rows import loaded_rows


@aggregate
class FirstKeys:
    """The first keys in global memory, and in shared memory, where they are multiplied."""

    k_ptr: gl.tensor  # [n_pages, page, Hkv, D]
    stride_kp: gl.tensor
    stride_ks: gl.tensor
    stride_kh: gl.tensor
    keys_smem: gl.shared_memory_descriptor  # [FIRST, D]

    @gluon.constexpr_function
    def __init__(self, k_ptr, strides, keys_smem):
        self.k_ptr = k_ptr
        self.stride_kp = strides[0]
        self.stride_ks = strides[1]
        self.stride_kh = strides[2]
        self.keys_smem = keys_smem

    @gluon.jit
    def create(k_ptr, strides, dtype: gl.constexpr, D: gl.constexpr):
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        return FirstKeys(k_ptr, strides, gl.allocate_shared_memory(dtype, [FIRST, D], layout))

    @gluon.jit
    def load(self, cache, run, group):
        """Keys [FIRST, D] of a run's sequence, from key `group` · FIRST on."""
        D: gl.constexpr = self.keys_smem.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        key = group * FIRST + gl.arange(0, FIRST, gl.SliceLayout(1, layout))
        d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
        page, row = cache.place_of(run.b, key, run.kv_len)
        at = page.to(gl.int64) * self.stride_kp + row.to(gl.int64) * self.stride_ks
        at += run.head.to(gl.int64) * self.stride_kh
        # `copy_engine.fit`: rows begin at multiples of 16 bytes.
        at = gl.multiple_of(at, [8])
        mask = gl.expand_dims(page < cache.n_pages, 1) & (d >= 0)
        return gl.load(self.k_ptr + gl.expand_dims(at, 1) + d, mask=mask, other=0.0)

    @gluon.jit
    def raise_maximum(self, rows, keys, group, q_smem, bounds, m, first):
        """m and `first` [ROWS], and of rows that begin among `keys` of `load` their maximum and
        `first_sum`."""
        layout: gl.constexpr = accumulator(FIRST)
        of_rows: gl.constexpr = gl.SliceLayout(1, layout)
        self.keys_smem.store(keys)
        fence_async_shared()
        await_warps()
        s = warpgroup_mma(
            q_smem, self.keys_smem.permute((1, 0)), zeros(FIRST), use_acc=False, is_async=True
        )
        s = rows.finish_scores(warpgroup_mma_wait(0, deps=(s,)))
        begin, end = bounds[0]
        begins_here = end_of_first(begin) == (group + 1) * FIRST
        key = group * FIRST + gl.arange(0, FIRST, gl.SliceLayout(0, layout))
        key = gl.expand_dims(key, 0)
        begin = gl.expand_dims(gl.convert_layout(begin, of_rows), 1)
        end = gl.expand_dims(gl.convert_layout(end, of_rows), 1)
        s = gl.where((key >= begin) & (key < end), s, -float("inf"))
        highest = gl.max(s, 1)
        found = first_sum(span_weights(s, highest, rows.unit))
        first = gl.where(begins_here, gl.convert_layout(found, m.type.layout), first)
        return gl.where(begins_here, gl.convert_layout(highest, m.type.layout), m), first

    @gluon.jit
    def load_with_queries(
        self, rows, sizes, cache, run, queries, bounds, m, first, FEW: gl.constexpr
    ):  # fmt: skip
        """Loads the queries of a run; m [ROWS] that its rows begin with, and their `first_sum`."""
        q_smem = queries.tile
        group = gl.maximum(bounds[1][0], 0) // FIRST
        last = gl.maximum(bounds[2][0], 0) // FIRST
        keys = self.load(cache, run, group)
        queries.load(rows, sizes, run, FEW, loaded_rows(FEW))
        m, first = self.raise_maximum(rows, keys, group, q_smem, bounds, m, first)
        for later in range(group + 1, last + 1):
            keys = self.load(cache, run, later)
            await_warps()
            m, first = self.raise_maximum(rows, keys, later, q_smem, bounds, m, first)
        return m, first
