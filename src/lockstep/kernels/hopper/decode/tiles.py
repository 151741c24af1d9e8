"""Tiles of query rows of packed sequences.

A tile is up to ROWS query rows of one sequence. Where queries are packed, it is a row of FIELDS
numbers in a table that `list_tiles` writes, so that the decode kernel reads the offsets of a batch
once. The table has room for every batch of as many queries and sequences; rows that are not needed
have 0 spans.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.kernels.launch import unspecialized
from lockstep.kernels.sequences import find_queries

# The numbers of a tile: keys of its sequence, -1 if a number of it is wrong; queries of the
# sequence; the spans wanted of a head, and the least keys of one; queries before those of the tile,
# and behind them; the number of the sequence, that of the tile in it, and where the queries begin.
KV_LEN, N_Q, SPANS, LEAST, BEFORE, BEHIND, SEQUENCE, Q_TILE, Q_START = range(9)
FIELDS = 9

WANTED: tl.constexpr = tl.constexpr(plan.WANTED)
LEAST_SPAN: tl.constexpr = tl.constexpr(plan.LEAST_SPAN)
MOST_SPAN: tl.constexpr = tl.constexpr(plan.MOST_SPAN)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)


@unspecialized(triton.jit, any_address=("cu_seqlens_q_ptr", "kv_lens_ptr"))
def list_tiles(
    cu_seqlens_q_ptr,  # [B + 1]
    kv_lens_ptr,  # [B]
    tiles_ptr,  # [n, FIELDS] int32
    slots_ptr,  # [n_slots, 3] int32
    B,
    Sq,
    Skv,
    Hkv,
    n_slots,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
):
    """Programs [n], each of which writes one tile. Also notes that there is nothing yet in the
    slots that tiles have where these are few (`producer.py`)."""
    slot = tl.program_id(0)
    b, tile, is_good, q_start, n_q, _kv_start, kv_len = find_queries(
        slot, cu_seqlens_q_ptr, None, kv_lens_ptr, B, Sq, Skv, GROUP, ROWS
    )
    n_rows = n_q * GROUP
    q_tiles = tl.cdiv(n_rows, ROWS)
    # As if each sequence were alone.
    wanted = spans_of(Hkv * tl.maximum(q_tiles, 1), WANTED)
    least = least_of(tl.minimum(n_rows, ROWS), KEYS_PER_ROW, LEAST_SPAN, MOST_SPAN)
    last = (tl.minimum((tile + 1) * ROWS, n_rows) - 1) // GROUP
    to = tiles_ptr + slot * _FIELDS
    numbers = (
        tl.where(is_good, kv_len, -1), n_q, tl.where(tile < q_tiles, wanted, 0), least,
        tile * ROWS // GROUP, n_q - 1 - last, b, tile, q_start.to(tl.int32),
    )  # fmt: skip
    for i in tl.static_range(_FIELDS):
        tl.store(to + i, numbers[i])
    for head in range(slot * Hkv, tl.minimum((slot + 1) * Hkv, n_slots)):
        tl.store(slots_ptr + 3 * head, -1)
