"""Which packed sequence owns a slot: a tile's place among those of one head of all sequences."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.forward.grouped_rows import BOX
from lockstep.kernels.hopper.forward.scheduling import sequence_order
from lockstep.kernels.sequences import bounds_of, look_at, next_clean, search

# Numbers before all places of a sequence order, and of each place: `sequence_order.py`.
ORDER_HEAD, ORDER_NUMBERS = gl.constexpr(sequence_order.HEAD), gl.constexpr(sequence_order.NUMBERS)
# The number of keys of a sequence whose length or offsets are wrong (`kernels.sequences`).
BAD = gl.constexpr(-1)


@gluon.jit
def sorted_sequence(schedule, slot):
    """The sequence that owns a slot, by the sequence order: how many tiles of a head come
    before its own, where its queries begin and how many there are, and the same of its keys."""
    n_places = schedule.B + 1
    low = slot * 0
    high = n_places
    while high - low > 1:
        middle = (low + high) // 2
        first = gl.load(schedule.sequence_order_ptr + ORDER_HEAD + middle)
        low = gl.where(first <= slot, middle, low)
        high = gl.where(first <= slot, high, middle)
    first = gl.load(schedule.sequence_order_ptr + ORDER_HEAD + low)
    at = schedule.sequence_order_ptr + ORDER_HEAD + n_places + low * 4
    return first, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def has_sequences(schedule):
    """Whether the sequence order has any with queries: the first place has, or none."""
    first = schedule.sequence_order_ptr + ORDER_HEAD + schedule.B + 1
    return gl.load(first + 1) > 0


@gluon.jit
def first_slot(schedule, start, b):
    """The first slot of sequence b, which begins with query `start`. Sequences before it have left
    a tile unfilled each, and of a group a box."""
    if schedule.HEADS:
        start = (start + (BOX - 1) * b) * schedule.heads_per_kv
    return start // schedule.BLOCK_Q + b


@gluon.jit
def clean_owner(schedule, slot):
    """The sequence that owns a slot by clean offsets (`kernels.sequences`)."""
    if schedule.HEADS:
        owner = slot * 0
        clean = owner.to(gl.int64)
        for b in range(1, schedule.B + 1):
            clean = next_clean(clean, b, schedule.cu_q_ptr, schedule.B, schedule.Sq)
            owner = gl.where(first_slot(schedule, clean.to(gl.int32), b) <= slot, b, owner)
        return owner
    else:  # noqa: RET505, Gluon would go on and return both
        return search(slot, schedule.cu_q_ptr, schedule.B, schedule.Sq, 1, schedule.BLOCK_Q, 1)


@gluon.jit
def unsorted_sequence(schedule, slot):
    """The same without a sequence order, for one warp and a few sequences.

    Sequence b has the slots from `first_slot` on: enough for its tiles, and known without looking
    at the lengths before it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    before = gl.full([32], 0, gl.int32, layout)
    wrong = gl.full([32], 0, gl.int32, layout)
    for i in range(0, schedule.B + 1, 32):
        b = i + gl.arange(0, 32, layout)
        start, is_wrong = look_at(b, schedule.cu_q_ptr, schedule.B, schedule.Sq)
        _, is_key_wrong = look_at(b, schedule.cu_kv_ptr, schedule.B, schedule.Skv)
        is_before = (first_slot(schedule, start.to(gl.int32), b) <= slot) & (b <= schedule.B)
        before += is_before.to(gl.int32)
        wrong |= (is_wrong | is_key_wrong).to(gl.int32)
    sequence = gl.sum(before, 0) - 1
    is_any_wrong = gl.max(wrong, 0) != 0
    if is_any_wrong:
        sequence = clean_owner(schedule, slot)
    q_start, q_end, is_good = bounds_of(
        sequence, is_any_wrong, schedule.cu_q_ptr, schedule.B, schedule.Sq
    )  # fmt: skip
    kv_start, kv_end, is_key_good = bounds_of(
        sequence, is_any_wrong, schedule.cu_kv_ptr, schedule.B, schedule.Skv
    )
    q_start = q_start.to(gl.int32)
    kv_start = kv_start.to(gl.int32)
    len_kv = gl.where(is_good & is_key_good, kv_end.to(gl.int32) - kv_start, BAD)
    first = first_slot(schedule, q_start, sequence)
    return first, q_start, q_end.to(gl.int32) - q_start, kv_start, len_kv
