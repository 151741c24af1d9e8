"""A mailbox in shared memory: one warp writes a few int32 numbers, other partitions read them."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.ring import Ring
from lockstep.kernels.hopper.common.shared_memory import (
    allocate_numbers,
    read_number,
    write_number,
)

# Messages that may be there at once: the one at work, and the next.
SLOTS = gl.constexpr(2)


@aggregate
class Mailbox:
    """Messages of FIELDS numbers each, in a ring."""

    fields_smem: gl.shared_memory_descriptor  # [slots · FIELDS, 1] int32
    ring: Ring
    FIELDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, fields_smem, ring, FIELDS):
        self.fields_smem = fields_smem
        self.ring = ring
        self.FIELDS = gl.constexpr(FIELDS)

    @gluon.jit
    def create(FIELDS: gl.constexpr, READERS: gl.constexpr, N: gl.constexpr = None):
        """A mailbox for N messages at once, SLOTS if N is not given."""
        slots: gl.constexpr = SLOTS if N is None else N
        return Mailbox(allocate_numbers(slots * FIELDS), Ring.create(slots, READERS), FIELDS)

    @gluon.jit
    def post(self, n, numbers):
        """Writer: the first fields of the n-th message, as soon as all readers have released the
        one whose place it takes."""
        self.ring.wait_empty(n)
        at = self.ring.slot(n) * self.FIELDS
        for i in gl.static_range(len(numbers)):
            write_number(self.fields_smem, at + i, numbers[i])
        self.ring.fill(n)

    @gluon.jit
    def wait(self, n):
        """Reader: wait until the n-th message is there."""
        self.ring.wait_full(n)

    @gluon.jit
    def field(self, n, i: gl.constexpr):
        """Reader: the i-th number of the n-th message, which is there."""
        return read_number(self.fields_smem, self.ring.slot(n) * self.FIELDS + i)

    @gluon.jit
    def release(self, n, READERS: gl.constexpr = 1):
        """Reader: the n-th message has been read, by so many readers."""
        self.ring.release(n, READERS)
