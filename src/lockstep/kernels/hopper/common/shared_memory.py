"""Shared memory of a program: tiles, numbers, barriers; slots and phases of a ring."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, mbarrier


@gluon.jit
def allocate_tiles(desc, N: gl.constexpr):
    """Shared memory for N tiles of a tensor map."""
    shape: gl.constexpr = [N] + desc.block_shape  # noqa: RUF005, Gluon does not unpack
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def allocate_numbers(N: gl.constexpr):
    """Shared memory [N, 1] for int32 numbers that one partition writes and others read."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [N, 1], flat)


@gluon.jit
def write_number(numbers, at, value):
    """Write number `at` of `allocate_numbers`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(at).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def read_number(numbers, at):
    """Read number `at` of `allocate_numbers`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(numbers.index(at).load(one), 0)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers [N, 1], each of which completes when COUNT partitions have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def slot_of(n, N: gl.constexpr):
    """The slot of the n-th item in a ring of N slots, a power of two. `n % N` would be a signed
    division, in the way of the first product of each step."""
    return n & (N - 1)


@gluon.jit
def phase_of(n, N: gl.constexpr):
    """The parity of the phase that the n-th item completes of its slot's barrier."""
    return (n >> _log2(N)) & 1
