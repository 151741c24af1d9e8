"""The names a kernel may use: `cuda`, `wmma`, `ct`, `phase` and the parameter markers.

Everything here is a *name* that the front end recognises; calling one outside a kernel is an
error. Signatures are declared as Python signatures, so arguments bind as in any Python call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .types import ACCUMULATOR, ArrayType, Scalar


class Intrinsic:
    """A function of the language. Only the front end gives it a meaning."""

    def __init__(self, qualified: str, signature: inspect.Signature, doc: str | None):
        self.name = qualified
        self.signature = signature
        self.__doc__ = doc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.name}() has a meaning only inside a @simt.kernel function")

    def __repr__(self) -> str:
        return f"<{self.name}{self.signature}>"


class SpecialValue:
    """threadIdx.x and its like."""

    def __init__(self, name: str):
        self.name = name


class _Axes:
    """`.x`, `.y` and `.z` of a three-component value."""

    def __init__(self, name: str):
        self.x, self.y, self.z = (SpecialValue(f"{name}.{axis}") for axis in "xyz")


def _intrinsic(namespace: str) -> Callable[[Callable], Any]:
    def declare(function: Callable) -> Any:
        name = f"{namespace}.{function.__name__}"
        return Intrinsic(name, inspect.signature(function), function.__doc__)

    return declare


_cuda = _intrinsic("cuda")
_atomic = _intrinsic("cuda.atomic")
_wmma = _intrinsic("wmma")
_ct = _intrinsic("ct")


class cuda:
    """Thread indices, memory, synchronisation, warp and math functions."""

    threadIdx = _Axes("threadIdx")
    blockIdx = _Axes("blockIdx")
    blockDim = _Axes("blockDim")
    gridDim = _Axes("gridDim")
    laneid = SpecialValue("laneid")
    warpid = SpecialValue("warpid")
    warpsize = 32

    @_cuda
    def grid(ndim):
        """Index of this thread in the grid: `grid(1)`; for 2-D and 3-D use the components."""

    @_cuda
    def gridsize(ndim):
        """Threads in the grid along x: the step of a grid-stride loop."""

    class shared:
        """Memory shared by the threads of a block."""

        array = Intrinsic(
            "cuda.shared.array",
            inspect.signature(lambda shape, dtype, offset=0: None),
            "A shared array of constant shape. Shape 0: the launch's dynamic shared memory from "
            "byte `offset` on, up to the next dynamic array.",
        )

    class local:
        """Memory of one thread: registers, where indices are constant."""

        array = Intrinsic(
            "cuda.local.array",
            inspect.signature(lambda shape, dtype: None),
            "A small per-thread array; `dtype` may be `wmma.accumulator`.",
        )

    @_cuda
    def syncthreads():
        """Barrier and memory fence over the block."""

    @_cuda
    def syncwarp(mask=0xFFFFFFFF):
        """Barrier and memory fence over the lanes of the warp."""

    @_cuda
    def threadfence():
        """Memory fence of this thread for the whole GPU: with an atomic after it, a block hands
        over what it wrote; with an atomic before it, a block takes over what others wrote."""

    @_cuda
    def shfl_sync(mask, value, lane):
        """`value` of lane `lane` (modulo 32)."""

    @_cuda
    def shfl_up_sync(mask, value, delta):
        """`value` of the lane `delta` below, own value where there is none."""

    @_cuda
    def shfl_down_sync(mask, value, delta):
        """`value` of the lane `delta` above, own value where there is none."""

    @_cuda
    def shfl_xor_sync(mask, value, lane_mask):
        """`value` of the lane whose number is this lane's xor `lane_mask`."""

    @_cuda
    def all_sync(mask, predicate):
        """Whether `predicate` holds in every lane of `mask`."""

    @_cuda
    def any_sync(mask, predicate):
        """Whether `predicate` holds in some lane of `mask`."""

    @_cuda
    def ballot_sync(mask, predicate):
        """uint32 with one bit per lane for which `predicate` holds."""

    class atomic:
        """Atomic read-modify-write of int32 or uint32 elements; returns the old value."""

        @_atomic
        def add(array, index, value): ...

        @_atomic
        def sub(array, index, value): ...

        @_atomic
        def min(array, index, value): ...

        @_atomic
        def max(array, index, value): ...

        @_atomic
        def and_(array, index, value): ...

        @_atomic
        def or_(array, index, value): ...

        @_atomic
        def xor(array, index, value): ...

        @_atomic
        def exch(array, index, value): ...

        @_atomic
        def cas(array, index, old, value):
            """Write `value` where the element equals `old`."""

    @_cuda
    def vload(array, index, width):
        """`width` neighbouring elements in one instruction (4, 8 or 16 bytes, aligned to that)."""

    @_cuda
    def vstore(array, index, vector):
        """Store a vector in one instruction; alignment as for `vload`."""

    @_cuda
    def vec(*items):
        """A vector of 2, 4 or 8 items of one type."""

    @_cuda
    def memcpy_async(target, target_index, source, source_index, count):
        """Start copying `count` elements (4, 8 or 16 bytes) from global to shared memory."""

    @_cuda
    def pipeline_commit():
        """Close this thread's current group of asynchronous copies."""

    @_cuda
    def pipeline_wait_prior(pending):
        """Wait until at most `pending` of this thread's committed groups are in flight."""

    @_cuda
    def bitcast(value, dtype):
        """The same 32 (or 16) bits read as another type."""

    @_cuda
    def exp(x): ...

    @_cuda
    def exp2(x): ...

    @_cuda
    def log(x): ...

    @_cuda
    def log2(x): ...

    @_cuda
    def sqrt(x): ...

    @_cuda
    def rsqrt(x): ...

    @_cuda
    def tanh(x): ...

    @_cuda
    def floor(x): ...

    @_cuda
    def ceil(x): ...

    @_cuda
    def fma(x, y, z):
        """x * y + z with one rounding."""

    @_cuda
    def popc(x):
        """Number of bits set."""

    @_cuda
    def clz(x):
        """Leading zero bits."""

    @_cuda
    def ffs(x):
        """Position of the lowest bit set, counted from 1; 0 for zero."""

    @_cuda
    def brev(x):
        """Bits in reverse order."""


class wmma:
    """Warp matrix fragments, m16n16k16: float16 or bfloat16 in, float32 out.

    All lanes of a warp take part, with the same operands. Accumulators also take `+ - * /`,
    `min`, `max` and math functions element by element, with scalars or other accumulators.
    """

    accumulator = ACCUMULATOR

    @_wmma
    def fill(value):
        """An accumulator with every element `value`."""

    @_wmma
    def load_a(array, index, ld=None, layout="row"):
        """The left operand. `ld` defaults to the row stride of a two-dimensional array."""

    @_wmma
    def load_b(array, index, ld=None, layout="row"):
        """The right operand; layout "col" reads the transpose of what lies in memory."""

    @_wmma
    def load_c(array, index, ld=None, layout="row"):
        """An accumulator from float32 memory."""

    @_wmma
    def mma_sync(a, b, c):
        """a @ b + c."""

    @_wmma
    def store(array, index, fragment, ld=None, layout="row"):
        """Write an accumulator to float32 memory."""


class ct:
    """Constant-time primitives: no branch, whatever the operands."""

    @_ct
    def select(condition, if_true, if_false):
        """`if_true` where `condition` holds; both are evaluated. Scalars or vectors."""

    @_ct
    def exp2(x):
        """2^x, or 0 where that is below 2^-126: one instruction, where `cuda.exp2` has two more for
        such results."""

    @_ct
    def mask(condition):
        """uint32 of all ones where `condition` holds, else zero."""


phase = Intrinsic(
    "simt.phase",
    inspect.signature(lambda name: None),
    "`with simt.phase('softmax'):` names a region; the trace groups by it.",
)


class Constant:
    """Annotation of a specialisation parameter: an int, float, bool or type known when the kernel
    is compiled. `def copy(x, y, TILE: simt.Constant): ...`"""


class Secret:
    """Annotation of a secret parameter: `x: simt.Secret[float32[:]]`, or plain `simt.Secret` where
    the type comes from the argument. Of an array, the elements are secret; its shape is public."""

    def __init__(self, annotation: Scalar | ArrayType | None = None):
        self.annotation = annotation

    def __class_getitem__(cls, annotation: Scalar | ArrayType) -> Secret:
        return cls(annotation)
