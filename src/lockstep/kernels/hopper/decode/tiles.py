"""Tiles of query rows of packed sequences.

A tile is up to ROWS query rows of one sequence. Where queries are packed, it is a row of FIELDS
numbers in a table that `list_tiles` writes, so that the decode kernel reads the offsets of a batch
once. The table has room for every batch of as many queries and sequences; rows that are not needed
have 0 spans. Long sequences may be the forward's (`forward/ragged_pages.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.kernels.hopper.forward.scheduling.sequence_order import sort_sequences
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
    """Programs [n], each of which writes one tile."""
    _list_tile(
        tl.program_id(0), cu_seqlens_q_ptr, kv_lens_ptr, tiles_ptr, slots_ptr, B, Sq, Skv, Hkv,
        n_slots, Sq, GROUP, ROWS, KEYS_PER_ROW,
    )  # fmt: skip


@unspecialized(triton.jit, any_address=("cu_seqlens_q_ptr", "kv_lens_ptr", "sequence_order_ptr"))
def list_and_sort(
    cu_seqlens_q_ptr,  # [B + 1]
    kv_lens_ptr,  # [B]
    tiles_ptr,  # [n, FIELDS] int32
    slots_ptr,  # [n_slots, 3] int32
    sequence_order_ptr,
    B,
    Sq,
    Skv,
    Hkv,
    n_slots,
    n_sorters,
    least_queries,  # of sequences that are the forward's, in tiles of block_q rows
    block_q,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Programs [n_sorters + n]: the first put the forward's sequences in order, each of the others
    writes one tile."""
    gdc_launch_dependents()
    program = tl.program_id(0)
    if program < n_sorters:
        sort_sequences(
            program, cu_seqlens_q_ptr, kv_lens_ptr, sequence_order_ptr, B, Sq, Skv, block_q, 1, 0,
            least_queries, True, SEQUENCES, OTHERS,
        )  # fmt: skip
    else:
        _list_tile(
            program - n_sorters, cu_seqlens_q_ptr, kv_lens_ptr, tiles_ptr, slots_ptr, B, Sq, Skv,
            Hkv, n_slots, least_queries - 1, GROUP, ROWS, KEYS_PER_ROW,
        )  # fmt: skip


@triton.jit
def _list_tile(
    slot, cu_seqlens_q_ptr, kv_lens_ptr, tiles_ptr, slots_ptr, B, Sq, Skv, Hkv, n_slots,
    most_queries, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write one tile, with 0 spans if its sequence has more than the most queries. Also notes that
    there is nothing yet in the slots that tiles have where these are few (`producer.py`)."""
    b, tile, is_good, q_start, n_q, _kv_start, kv_len = find_queries(
        slot, cu_seqlens_q_ptr, None, kv_lens_ptr, B, Sq, Skv, GROUP, ROWS
    )
    n_rows = n_q * GROUP
    q_tiles = tl.cdiv(n_rows, ROWS)
    # As if each sequence were alone.
    wanted = spans_of(Hkv * tl.maximum(q_tiles, 1), WANTED)
    least = least_of(tl.minimum(n_rows, ROWS), KEYS_PER_ROW, LEAST_SPAN, MOST_SPAN)
    # Rows of no sequence stay here, however many.
    is_here = (tile < q_tiles) & ((n_q <= most_queries) | (b >= B))
    last = (tl.minimum((tile + 1) * ROWS, n_rows) - 1) // GROUP
    to = tiles_ptr + slot * _FIELDS
    numbers = (
        tl.where(is_good, kv_len, -1), n_q, tl.where(is_here, wanted, 0), least,
        tile * ROWS // GROUP, n_q - 1 - last, b, tile, q_start.to(tl.int32),
    )  # fmt: skip
    for i in tl.static_range(_FIELDS):
        tl.store(to + i, numbers[i])
    for head in range(slot * Hkv, tl.minimum((slot + 1) * Hkv, n_slots)):
        tl.store(slots_ptr + 3 * head, -1)
