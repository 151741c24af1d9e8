"""Gluon as Triton 3.6 to 3.9 spell it: every name that moved between them or is private in some.

The kernels of this package take their Gluon names from here and nowhere else.
"""

from __future__ import annotations

from typing import get_type_hints

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

__all__ = [
    "VIEWS_GROW",
    "TensorDescriptor",
    "aggregate",
    "async_copy",
    "await_warps",
    "copy_to_shared",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# Public since 3.8.
_aggregate = getattr(gluon, "aggregate", None) or core._aggregate


def aggregate(cls: type) -> type:
    """A class whose instances live in a kernel; its fields are its annotations."""
    # Triton looks the types up as they stand; postponed annotations are strings.
    cls.__annotations__ = get_type_hints(cls)
    return _aggregate(cls)


# A barrier of the warps of one partition. Renamed in 3.7.
await_warps = getattr(gl, "barrier", None) or gl.thread_barrier
# Renamed in 3.8, and gone by its old name in 3.9.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Renamed in 3.9, which keeps the old names for now.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# Whether `reinterpret` takes a shape larger than that of the memory: it does not since 3.8.
VIEWS_GROW = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


@builtin
def tma_add(desc, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory. Gluon has had a name for it since 3.8."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, tile.handle)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as another dtype, shape and layout. A public method since 3.9."""
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    return _semantic.memdesc_reinterpret(memory, dtype, shape, layout)
