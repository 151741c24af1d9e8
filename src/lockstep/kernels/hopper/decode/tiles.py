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
from lockstep.kernels.hopper.forward.scheduling import part_rule
from lockstep.kernels.hopper.forward.scheduling.part_rule import parts_of
from lockstep.kernels.hopper.forward.scheduling.sequence_order import store_place, tiles_of_queries
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
PARTS_WANTED: tl.constexpr = tl.constexpr(part_rule.WANTED)
LEAST_KEYS: tl.constexpr = tl.constexpr(part_rule.LEAST_KEYS)
UNITS: tl.constexpr = tl.constexpr(part_rule.UNITS)
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
    sequence_order_ptr,  # `sequence_order.py`: of long sequences
    cut_order_ptr,  # and of those of them whose tiles have several parts of their keys
    tile_arrivals_ptr,  # [n_arrivals], `forward/key_parts.py`
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
    n_arrivals,
    most_parts,  # of a tile of these
    Hq,
    diagonal,  # 1 if queries see no keys behind their own, 0 if they do
    group,  # heads that share a tile which may have parts
    whole_group,  # and any other
    longest,  # queries of any other sequence; longer ones are refused
    few_queries,  # sequences with fewer have such tiles
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    SORTS: tl.constexpr,  # long sequences are the forward's, and refused otherwise
    CUTS: tl.constexpr,  # tiles of some may have several parts
    EARLY: tl.constexpr,  # the next kernel may start before this one ends, and waits itself
):
    """Programs [B + 1], each for a sequence, the last for rows that belong to none."""
    if EARLY:
        gdc_launch_dependents()
    b = tl.program_id(0)
    rule = (least_queries, block_q, most_parts, Hq, diagonal, group, few_queries, whole_group)
    q_start, q_end, is_good, before, whole, cut, is_any_wrong = _find(
        b, cu_seqlens_q_ptr, kv_lens_ptr, B, Sq, Skv, rule, GROUP, ROWS
    )
    n_q = (q_end - q_start).to(tl.int32)
    q_start = q_start.to(tl.int32)
    given_len = _checked_keys(kv_lens_ptr, b, Skv, B)
    kv_len = tl.where(is_good, given_len, -1)
    is_long = b > B
    if SORTS:
        # Rows of no sequence stay here, however many.
        is_long = (n_q >= least_queries) & (b < B)
        is_cut = _has_parts(n_q, given_len, rule) & is_long
        has_slot_each = b * 0
        if is_long & (is_any_wrong == 0):
            place, tiles, has_slot_each = _count_longer(
                b, given_len, is_cut, cu_seqlens_q_ptr, kv_lens_ptr, B, Sq, Skv, rule
            )
            whole = (tl.where(is_cut, whole[0], place), tiles)
            cut = (tl.where(is_cut, place, cut[0]), tiles)
        is_whole = is_long & (is_cut == 0)
        _store_place(sequence_order_ptr, B, b, is_whole, whole, q_start, n_q, kv_len)
        if CUTS:
            _store_place(cut_order_ptr, B, b, is_cut, cut, q_start, n_q, kv_len)
            # All sequences of this order say the same.
            tl.store(cut_order_ptr + 1, has_slot_each, mask=is_cut)
    is_refused = refuse_longer(
        out_ptr, lse_ptr, q_start, tl.where(is_long, 0, n_q), longest + 1, Hq, Dv
    )
    count = tl.where(is_long | is_refused, 0, tl.cdiv(n_q * GROUP, ROWS))
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
        if CUTS:
            tl.store(cut_order_ptr, 0)
            for first in range(0, n_arrivals, _SLOTS):
                tl.store(tile_arrivals_ptr + first + slot, 0, mask=first + slot < n_arrivals)


@triton.jit
def _checked_keys(kv_lens_ptr, b, Skv, B):
    """How many keys sequences b have, -1 if that is wrong, or b is B or more."""
    keys, is_length = checked_length(kv_lens_ptr, b, Skv, B)
    return tl.where(is_length & (b < B), keys, -1)


@triton.jit
def _tile_parts(n_q, keys, rule):
    """How many parts the keys of a tile have in sequences of so many queries and keys."""
    _least_queries, block_q, most_parts, Hq, diagonal, group, _few, _whole_group = rule
    tiles = tiles_of_queries(n_q, block_q, group) * (Hq // group)
    return parts_of(tiles, keys - n_q * diagonal, PARTS_WANTED, most_parts, LEAST_KEYS)


@triton.jit
def _has_parts(n_q, keys, rule):
    """Whether such sequences are in the order of those whose tiles may have several parts."""
    return (_tile_parts(n_q, keys, rule) > 1) | (n_q < rule[6])


@triton.jit
def _forward_tiles(n_q, is_cut, rule):
    """How many tiles of the forward so many queries have, of a head, or of a group of heads that
    share them."""
    return tiles_of_queries(n_q, rule[1], tl.where(is_cut, rule[5], rule[7]))


@triton.jit
def _find(
    b, cu_ptr, kv_lens_ptr, B, Sq, Skv, rule, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Where sequence b begins and ends, and whether these are its own numbers (`sequences.py`); how
    many tiles are before its own; how many long sequences are, and if any offset is wrong, their
    tiles, of those whose tiles have one part and of others; and whether one is wrong."""
    least_queries = rule[0]
    tiles = tl.zeros([CHUNK], tl.int32)
    whole = tl.zeros([CHUNK], tl.int32)
    cut = tl.zeros([CHUNK], tl.int32)
    wrong = tl.zeros([CHUNK], tl.int32)
    for first in range(0, B + 1, CHUNK):
        other = first + tl.arange(0, CHUNK)
        start, end = given_bounds(other, cu_ptr, B, Sq)
        _, is_wrong = look_at(other, cu_ptr, B, Sq)
        wrong |= is_wrong.to(tl.int32)
        n_q = tl.where(other < b, end - start, 0).to(tl.int32)
        is_long = n_q >= least_queries
        is_cut = _has_parts(n_q, _checked_keys(kv_lens_ptr, other, Skv, B), rule)
        tiles += tl.where(is_long, 0, tl.cdiv(n_q * GROUP, ROWS))
        whole += (is_long & (is_cut == 0)).to(tl.int32)
        cut += (is_long & is_cut).to(tl.int32)
    before, n_whole, n_cut = tl.sum(tiles, 0), tl.sum(whole, 0), tl.sum(cut, 0)
    whole_tiles, cut_tiles = b * 0, b * 0
    q_start, q_end = given_bounds(b, cu_ptr, B, Sq)
    is_good = b < B
    is_any_wrong = tl.max(wrong, 0) != 0
    if is_any_wrong:
        # By offsets of which none is wrong, a step for each sequence before.
        given_start, given_end = q_start, q_end
        q_start, q_end = given_start * 0, given_start * 0
        before, n_whole, n_cut = b * 0, b * 0, b * 0
        for i in range(1, b + 2):
            # The first has no queries, and is none.
            n_q = (q_end - q_start).to(tl.int32)
            is_long = n_q >= least_queries
            keys = _checked_keys(kv_lens_ptr, tl.maximum(i - 2, 0), Skv, B)
            is_cut = is_long & _has_parts(n_q, keys, rule)
            is_whole = is_long & (is_cut == 0)
            before += tl.where(is_long, 0, tl.cdiv(n_q * GROUP, ROWS))
            n_whole += is_whole.to(tl.int32)
            n_cut += is_cut.to(tl.int32)
            n_tiles = _forward_tiles(n_q, is_cut, rule)
            whole_tiles += tl.where(is_whole, n_tiles, 0)
            cut_tiles += tl.where(is_cut, n_tiles, 0)
            q_start = q_end
            q_end = next_clean(q_end, i, cu_ptr, B, Sq)
        is_good = is_good & (q_start == given_start) & (q_end == given_end)
    return (
        q_start, q_end, is_good, before, (n_whole, whole_tiles), (n_cut, cut_tiles), is_any_wrong,
    )  # fmt: skip


@triton.jit
def _count_longer(b, my_keys, is_cut, cu_ptr, kv_lens_ptr, B, Sq, Skv, rule):
    """How many long sequences have more keys than b, or as many and are before it, of those whose
    tiles have several parts, or of others; how many tiles these have for the forward, or parts of
    tiles; and whether it is parts, since these are few enough in all sequences. By offsets of which
    none is wrong."""
    least_queries, heads = rule[0], rule[3] // rule[5]
    number = tl.zeros([CHUNK], tl.int32)
    tiles = tl.zeros([CHUNK], tl.int32)
    parts = tl.zeros([CHUNK], tl.int32)
    all_parts = tl.zeros([CHUNK], tl.int32)
    for first in range(0, B, CHUNK):
        other = first + tl.arange(0, CHUNK)
        start, end = given_bounds(other, cu_ptr, B, Sq)
        n_q = (end - start).to(tl.int32)
        keys = _checked_keys(kv_lens_ptr, other, Skv, B)
        n_parts = _tile_parts(n_q, keys, rule)
        is_alike = (n_q >= least_queries) & (other < B) & (_has_parts(n_q, keys, rule) == is_cut)
        n_tiles = tl.where(is_alike, _forward_tiles(n_q, is_cut, rule), 0)
        comes_first = is_alike & ((keys > my_keys) | ((keys == my_keys) & (other < b)))
        number += comes_first.to(tl.int32)
        tiles += tl.where(comes_first, n_tiles, 0)
        parts += tl.where(comes_first, n_tiles * n_parts, 0)
        all_parts += n_tiles * n_parts
    has_slot_each = is_cut & (tl.sum(all_parts, 0) * heads <= UNITS)
    before = tl.where(has_slot_each, tl.sum(parts, 0), tl.sum(tiles, 0))
    return tl.sum(number, 0), before, has_slot_each.to(tl.int32)


@triton.jit
def _store_place(order_ptr, B, b, is_there, before, q_start, n_q, kv_len):
    """Write the place of sequence b in an order, with so many sequences and tiles `before` it. One
    that is not there stands behind all that are, the last of the batch first."""
    place = tl.where(is_there, before[0], B - (b - before[0]))
    # The first place is looked at even if it is none.
    tiles = tl.where(is_there, before[1], tl.where(place == 0, 0, _BEHIND_ALL))
    store_place(
        order_ptr, B, place, tiles, tl.where(is_there, q_start, 0), tl.where(is_there, n_q, 0),
        tl.where(is_there, b, 0), tl.where(is_there, kv_len, 0), True,
    )  # fmt: skip


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
