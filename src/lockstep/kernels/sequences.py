"""Where sequences begin and how long they are, by numbers on the device that may be wrong.

The host cannot check these numbers: reading them back would make every call wait for the device. So
the kernels check them, and a sequence whose numbers are wrong is *bad*: its rows become NaN, and
none of its keys is read.

- A length in kv_lens is wrong unless it is in [0, Skv], a first key in kv_starts unless it is in
  [0, length].
- The first offset of packed sequences is wrong unless it is 0. Another one is wrong unless it is in
  [0, T] and at least as large as every offset before it in that range. A sequence is bad if it
  begins or ends at a wrong offset, of queries or of keys.

Every row has one owner nevertheless: in the place of a wrong offset stands the largest right one
before it (`bounds_of`). Rows from the last offset on belong to no sequence; the kernels take them
for those of one more sequence, number B, which is bad.

A page number is wrong unless it is in [0, n_pages); rows that see a key of such a page become NaN:
`triton.tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Offsets that are looked at together.
CHUNK: tl.constexpr = tl.constexpr(256)
# More than there are sequences.
MANY: tl.constexpr = tl.constexpr(1 << 32)


@triton.jit
def nan_where(is_wrong):
    """A number to add to others so that they are NaN, or stay as they are."""
    return tl.where(is_wrong, float("nan"), 0.0)


@triton.jit
def checked_length(kv_lens_ptr, b, Skv, B=None):
    """How many keys sequence b has, 0 if its length is wrong; and whether it is right.

    With B, b may be B: that sequence has no length.
    """
    if B is None:
        length = tl.load(kv_lens_ptr + b)
    else:
        length = tl.load(kv_lens_ptr + b, mask=b < B, other=0)
    is_good = (length >= 0) & (length <= Skv)
    return tl.where(is_good, length, 0).to(tl.int32), is_good


@triton.jit
def checked_range(b, Skv, kv_lens_ptr, kv_starts_ptr):
    """The first key of sequence b and the number of its keys, both 0 if one is wrong; and whether
    both are right. For sequences that are not packed."""
    kv_start = tl.full([], 0, tl.int64)
    kv_len, is_good = Skv, True
    if kv_lens_ptr is not None:
        kv_len, is_good = checked_length(kv_lens_ptr, b, Skv)
    if kv_starts_ptr is not None:
        start, is_start = checked_length(kv_starts_ptr, b, kv_len)
        is_good = is_start & is_good
        kv_len = tl.where(is_good, kv_len - start, 0)
        kv_start = tl.where(is_good, start, 0).to(tl.int64)
    return kv_start, kv_len, is_good


@triton.jit
def whole_sequence(b, Sq, Skv, kv_lens_ptr, kv_starts_ptr):
    """The results of `find_sequence` for sequence b, without its tile, if sequences are not
    packed."""
    q_start = tl.full([], 0, tl.int64)
    kv_start, kv_len, is_good = checked_range(b, Skv, kv_lens_ptr, kv_starts_ptr)
    return is_good, q_start, Sq, kv_start, kv_len


@triton.jit
def find_sequence(
    slot,
    cu_ptr,
    other_cu_ptr,
    B,
    T,
    other_T,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr = 1,
):
    """The sequence that owns slot number `slot` of a packed batch, and where it lies.

    Returns the sequence, its tile, whether it is good, its start and length by the offsets at
    `cu_ptr`, which slots go by, and the same by those at `other_cu_ptr`.
    """
    b, is_any_wrong = owner_of(
        slot, cu_ptr, other_cu_ptr, B, T, other_T, GROUP, BLOCK, SPARE
    )  # fmt: skip
    start, end, is_right = bounds_of(b, is_any_wrong, cu_ptr, B, T)
    other_start, other_end, is_other_right = bounds_of(b, is_any_wrong, other_cu_ptr, B, other_T)
    tile = (slot - start * GROUP // BLOCK - b * SPARE).to(tl.int32)
    length, other_length = (end - start).to(tl.int32), (other_end - other_start).to(tl.int32)
    return b, tile, is_right & is_other_right, start, length, other_start, other_length


@triton.jit
def find_queries(
    slot,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    kv_lens_ptr,
    B,
    Sq,
    Skv,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr = 1,
    kv_starts_ptr=None,
):
    """The results of `find_sequence` for a slot of packed queries. Keys are packed as well or,
    without `cu_seqlens_k_ptr`, in pages: each sequence then has a length, and its keys begin at 0,
    or where kv_starts says."""
    if cu_seqlens_k_ptr is not None:
        b, tile, is_good, q_start, q_len, kv_start, kv_len = find_sequence(
            slot, cu_seqlens_q_ptr, cu_seqlens_k_ptr, B, Sq, Skv, GROUP, BLOCK, SPARE
        )
    else:
        b, tile, is_good, q_start, q_len, kv_start, kv_len = find_sequence(
            slot, cu_seqlens_q_ptr, cu_seqlens_q_ptr, B, Sq, Sq, GROUP, BLOCK, SPARE
        )
        kv_start = tl.full([], 0, tl.int64)
        kv_len, is_length = checked_length(kv_lens_ptr, b, Skv, B)
        is_good = is_good & is_length
        if kv_starts_ptr is not None:
            start, is_start = checked_length(kv_starts_ptr, b, kv_len, B)
            is_good = is_good & is_start
            kv_len = kv_len - start
            kv_start = tl.where(is_good, start, 0).to(tl.int64)
    return b, tile, is_good, q_start, q_len, kv_start, tl.where(is_good, kv_len, 0)


@triton.jit
def owner_of(
    slot,
    cu_ptr,
    other_cu_ptr,
    B,
    T,
    other_T,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr = 1,
):
    """The sequence that owns a slot, found without counting tiles; and whether any offset is wrong.

    Sequence b owns the slots from `offset[b] * GROUP // BLOCK + b * SPARE` to where the next
    begins. With one SPARE slot that is always enough for its tiles and never more than one too
    many; slots of one row each (GROUP and BLOCK of 1) need none.
    """
    before = tl.zeros([CHUNK], tl.int64)  # sequences that begin at or before the slot
    for first in range(0, B + 1, CHUNK):
        b = first + tl.arange(0, CHUNK)
        start, is_wrong = look_at(b, cu_ptr, B, T)
        _, is_other_wrong = look_at(b, other_cu_ptr, B, other_T)
        is_before = (start * GROUP // BLOCK + b * SPARE <= slot) & (b <= B)
        before += is_before.to(tl.int64) - (is_wrong | is_other_wrong).to(tl.int64) * MANY
    owner = tl.sum(before, 0) - 1
    is_any_wrong = owner < 0
    b = owner.to(tl.int32)
    if is_any_wrong:
        b = search(slot, cu_ptr, B, T, GROUP, BLOCK, SPARE)
    return b, is_any_wrong


@triton.jit
def bounds_of(b, is_any_wrong, cu_ptr, B, T):
    """Start and end of sequence b, no wrong offset among them, and whether these are its own.

    If any offset is wrong, this takes a step for each sequence before it.
    """
    start, end = given_bounds(b, cu_ptr, B, T)
    is_right = b < B
    if is_any_wrong:
        given_start, given_end = start, end
        end = given_end * 0
        for i in range(1, b + 2):
            # Not `start = end`: Triton would leave it out of the loop.
            start = tl.where(i == b + 1, end, start)
            end = next_clean(end, i, cu_ptr, B, T)
        is_right = is_right & (start == given_start) & (end == given_end)
    return start, end, is_right


@triton.jit
def next_clean(clean, i, cu_ptr, B, T):
    """Offset i, or what stands in its place; `clean` is that of offset i - 1, 0 is the first."""
    offset = tl.load(cu_ptr + i, mask=i <= B, other=T).to(tl.int64)
    return tl.maximum(clean, tl.where((offset >= 0) & (offset <= T), offset, 0))


@triton.jit
def look_at(b, cu_ptr, B, T):
    """Where sequences b [n] begin; whether each begins after its end or ends after the tensor.

    If any offset is wrong, one of the B + 1 sequences does."""
    start, end = given_bounds(b, cu_ptr, B, T)
    return start, (start > end) | (end > T) | ((b == 0) & (start != 0))


@triton.jit
def given_bounds(b, cu_ptr, B, T):
    """Where sequences b begin and end, as the offsets say. Sequence B ends with the tensor."""
    start = tl.load(cu_ptr + b, mask=b <= B, other=0).to(tl.int64)
    end = tl.load(cu_ptr + b + 1, mask=b < B, other=T).to(tl.int64)
    return start, end


@triton.jit
def search(slot, cu_ptr, B, T, GROUP: tl.constexpr, BLOCK: tl.constexpr, SPARE: tl.constexpr):
    """The owner of a slot by clean offsets."""
    owner = slot * 0
    clean = owner.to(tl.int64)
    for b in range(1, B + 1):
        clean = next_clean(clean, b, cu_ptr, B, T)
        owner = tl.where(clean * GROUP // BLOCK + b * SPARE <= slot, b, owner)
    return owner
