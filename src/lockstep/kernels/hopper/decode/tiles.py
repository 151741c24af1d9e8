"""Tiles of query rows of packed sequences.

A tile is up to ROWS query rows of one sequence. Where queries are packed, it is a row of FIELDS
numbers in a table that `list_tiles` writes, so that the decode kernel reads the offsets of a batch
once. The first row of the table has the number of tiles, which follow in the order of the batch.
There is room for every batch of as many queries and sequences.

Long sequences may be the forward's (`forward/ragged_pages.py`). They have no tiles here, and the
same kernel puts them in order for the forward. Otherwise a call may say how many queries a sequence
has at most; one that has more has no tiles, either (`longer.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.folding.fold_plan import MOST_SLOTS
from lockstep.kernels.hopper.decode.longer import refuse_longer
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.kernels.hopper.forward.scheduling.sequence_order import store_place
from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import CHUNK, checked_length, given_bounds, look_at, next_clean

# The numbers of a tile: keys of its sequence, -1 if a number of it is wrong; queries of the
# sequence; the spans wanted of a head, and the least keys of one; queries before those of the tile,
# and behind them; the number of the sequence, that of the tile in it, and where the queries begin.
KV_LEN, N_Q, SPANS, LEAST, BEFORE, BEHIND, SEQUENCE, Q_TILE, Q_START = range(9)
FIELDS = 9

WANTED: tl.constexpr = tl.constexpr(plan.WANTED)
LEAST_SPAN: tl.constexpr = tl.constexpr(plan.LEAST_SPAN)
MOST_SPAN: tl.constexpr = tl.constexpr(plan.MOST_SPAN)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)
_SLOTS: tl.constexpr = tl.constexpr(MOST_SLOTS)
# Tiles that are written together.
_TOGETHER: tl.constexpr = tl.constexpr(32)
# More tiles than there are before any sequence of the forward.
_BEHIND_ALL: tl.constexpr = tl.constexpr(1 << 30)


@unspecialized(triton.jit, any_address=("cu_seqlens_q_ptr", "kv_lens_ptr", "sequence_order_ptr"))
def list_tiles(
    cu_seqlens_q_ptr,  # [B + 1]
    kv_lens_ptr,  # [B]
    tiles_ptr,  # [1 + tiles, FIELDS] int32
    slots_ptr,  # [n_slots, 3] int32
    sequence_order_ptr,  # `sequence_order.py`
    out_ptr,  # [Tq, Hq, Dv], contiguous, and lse [Tq, Hq]
    lse_ptr,
    B,
    Sq,
    Skv,
    Hkv,
    Dv,
    n_slots,
    least_queries,  # of sequences that are the forward's, in tiles of block_q rows
    block_q,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    SORTS: tl.constexpr,  # long sequences are the forward's, and refused otherwise
    EARLY: tl.constexpr,  # the next kernel may start before this one ends, and waits itself
):
    """Programs [B + 1], each for a sequence, the last for rows that belong to none."""
    if EARLY:
        gdc_launch_dependents()
    b = tl.program_id(0)
    q_start, q_end, is_good, before, n_long, long_tiles, is_any_wrong = _find(
        b, cu_seqlens_q_ptr, B, Sq, least_queries, block_q, GROUP, ROWS
    )
    n_q = (q_end - q_start).to(tl.int32)
    kv_len, is_length = checked_length(kv_lens_ptr, b, Skv, B)
    kv_len = tl.where(is_good & is_length, kv_len, -1)
    q_start = q_start.to(tl.int32)
    if SORTS:
        # Rows of no sequence stay here, however many.
        is_long = (n_q >= least_queries) & (b < B)
        if is_long:
            if not is_any_wrong:
                n_long, long_tiles = _count_longer(
                    b, kv_len, cu_seqlens_q_ptr, kv_lens_ptr, B, Sq, Skv, least_queries, block_q
                )
            store_place(
                sequence_order_ptr, B, n_long, long_tiles, q_start, n_q, b, kv_len, True
            )  # fmt: skip
        else:
            # Behind those of the forward, the last sequence first.
            place = B - (b - n_long)
            none = tl.where(place == 0, 0, _BEHIND_ALL)
            store_place(sequence_order_ptr, B, place, none, 0, 0, 0, 0, True)
    else:
        is_long = refuse_longer(out_ptr, lse_ptr, q_start, n_q, least_queries, Hkv * GROUP, Dv)
    count = tl.where(is_long, 0, tl.cdiv(n_q * GROUP, ROWS))
    _write_tiles(
        tiles_ptr + (1 + before) * _FIELDS, count, b, q_start, n_q, kv_len, Hkv, GROUP, ROWS,
        KEYS_PER_ROW,
    )  # fmt: skip
    if b == B:
        tl.store(tiles_ptr, before + count)
        # There is nothing yet in any slot (`producer.py`).
        slot = tl.arange(0, _SLOTS)
        tl.store(slots_ptr + 3 * slot, -1, mask=slot < n_slots)
        if SORTS:
            tl.store(sequence_order_ptr, 0)


@triton.jit
def _find(b, cu_ptr, B, Sq, least_queries, block_q, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Where sequence b begins and ends, and whether these are its own numbers (`sequences.py`); how
    many tiles are before its own, how many long sequences, and how many tiles these have; and
    whether any offset is wrong."""
    tiles = tl.zeros([CHUNK], tl.int32)
    long = tl.zeros([CHUNK], tl.int32)
    wrong = tl.zeros([CHUNK], tl.int32)
    for first in range(0, B + 1, CHUNK):
        other = first + tl.arange(0, CHUNK)
        start, end = given_bounds(other, cu_ptr, B, Sq)
        _, is_wrong = look_at(other, cu_ptr, B, Sq)
        wrong |= is_wrong.to(tl.int32)
        n_q = tl.where(other < b, end - start, 0).to(tl.int32)
        is_long = n_q >= least_queries
        tiles += tl.where(is_long, 0, tl.cdiv(n_q * GROUP, ROWS))
        long += is_long.to(tl.int32)
    before, n_long, long_tiles = tl.sum(tiles, 0), tl.sum(long, 0), b * 0
    q_start, q_end = given_bounds(b, cu_ptr, B, Sq)
    is_good = b < B
    is_any_wrong = tl.max(wrong, 0) != 0
    if is_any_wrong:
        # By offsets of which none is wrong, a step for each sequence before.
        given_start, given_end = q_start, q_end
        q_start, q_end = given_start * 0, given_start * 0
        before, n_long = b * 0, b * 0
        for i in range(1, b + 2):
            n_q = (q_end - q_start).to(tl.int32)
            is_long = n_q >= least_queries
            before += tl.where(is_long, 0, tl.cdiv(n_q * GROUP, ROWS))
            n_long += is_long.to(tl.int32)
            long_tiles += tl.where(is_long, tl.cdiv(n_q, block_q), 0)
            q_start = q_end
            q_end = next_clean(q_end, i, cu_ptr, B, Sq)
        is_good = is_good & (q_start == given_start) & (q_end == given_end)
    return q_start, q_end, is_good, before, n_long, long_tiles, is_any_wrong


@triton.jit
def _count_longer(
    b, kv_len, cu_seqlens_q_ptr, kv_lens_ptr, B, Sq, Skv, least_queries, block_q
):  # fmt: skip
    """How many long sequences have more keys than b, or as many and are before it; and how many
    tiles these have for the forward, by offsets of which none is wrong."""
    number = tl.zeros([CHUNK], tl.int32)
    tiles = tl.zeros([CHUNK], tl.int32)
    for first in range(0, B, CHUNK):
        other = first + tl.arange(0, CHUNK)
        start, end = given_bounds(other, cu_seqlens_q_ptr, B, Sq)
        n_q = (end - start).to(tl.int32)
        keys, is_length = checked_length(kv_lens_ptr, other, Skv, B)
        keys = tl.where(is_length, keys, -1)
        comes_first = (keys > kv_len) | ((keys == kv_len) & (other < b))
        comes_first = comes_first & (n_q >= least_queries) & (other < B)
        number += comes_first.to(tl.int32)
        tiles += tl.where(comes_first, tl.cdiv(n_q, block_q), 0)
    return tl.sum(number, 0), tl.sum(tiles, 0)


@triton.jit
def _write_tiles(
    to_ptr, count, b, q_start, n_q, kv_len, Hkv, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write so many tiles of sequence b, as if it were alone."""
    n_rows = n_q * GROUP
    wanted = spans_of(Hkv * tl.maximum(count, 1), WANTED)
    least = least_of(tl.minimum(n_rows, ROWS), KEYS_PER_ROW, LEAST_SPAN, MOST_SPAN)
    for first in range(0, count, _TOGETHER):
        tile = first + tl.arange(0, _TOGETHER)
        last = (tl.minimum((tile + 1) * ROWS, n_rows) - 1) // GROUP
        numbers = (
            kv_len, n_q, wanted, least, tile * ROWS // GROUP, n_q - 1 - last, b, tile, q_start,
        )  # fmt: skip
        for i in tl.static_range(_FIELDS):
            to = to_ptr + tile * _FIELDS + i
            tl.store(to, numbers[i] + tile * 0, mask=tile < count)
