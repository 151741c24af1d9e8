"""The order of packed sequences, longest first: a small kernel before the forward.

A program that draws a long tile when all others are done keeps the whole launch waiting. So the
sequences with the most keys come first, and the tiles drawn last are short. Only the device knows
the lengths, and it takes microseconds to sort them there.

A sequence order is one tensor of int32. It has P = B + 1 places, one of them for rows that belong
to no sequence:

    [0]                  the tickets drawn so far, beyond the first of every program
    [1]                  of sequences in pages, whether each part of a tile has a ticket of its own
                         (`key_parts.py`), and what comes before a place is counted in parts
    [2 : 2 + P]          for each place, how many tiles of a head come before it
    [2 + P : 2 + 5P]     for each place, where its sequence lies: start and length of its queries,
                         start and length of its keys, which is -1 for a bad one
    [2 + 5P :]           for each ticket, the one its program had before (`scheduler.py`)

This kernel alone checks the offsets; the forward reads the order. If any offset is wrong
(`kernels.sequences`), sequences keep the order of the batch.

Of sequences in pages, the kernel that lists the tiles of short ones writes the order, too
(`decode/tiles.py`). The forward's come first there, and the number of a sequence stands for where
its keys start. The places of others have no queries, and more tiles before them than there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.launch import Buffer, Launch, unspecialized
from lockstep.kernels.sequences import given_bounds, look_at, next_clean
from lockstep.problem import AttentionProblem

BOX = tl.constexpr(sizes.BOX)
SEQUENCES, OTHERS = 32, 128  # that a program sorts, and that it compares them with at a time
HEAD, NUMBERS = 2, 5  # numbers before all places, and of each place

FIRST = tl.constexpr(HEAD)


@unspecialized(triton.jit, any_address=("cu_q_ptr", "cu_kv_ptr", "order_ptr"))
def sort_sequences_kernel(
    cu_q_ptr,  # [B + 1]
    cu_kv_ptr,  # [B + 1]
    order_ptr,
    B,
    Tq,
    Tk,
    block_q,
    group,
    short_keys,
    SEQUENCES: tl.constexpr,
    OTHERS: tl.constexpr,
    EARLY: tl.constexpr,  # the next kernel may start before this one ends, and waits itself
):
    """Each sequence counts the sequences before it, and their tiles."""
    if EARLY:
        gdc_launch_dependents()
    mine = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    my_start, my_queries, my_first_key, my_keys = _sizes(cu_q_ptr, cu_kv_ptr, mine, B, Tq, Tk)
    place = tl.zeros([SEQUENCES], tl.int32)
    tiles_before = tl.zeros([SEQUENCES], tl.int32)
    wrong = tl.zeros([OTHERS], tl.int32)
    for first in range(0, B + 1, OTHERS):
        other = first + tl.arange(0, OTHERS)
        _, queries, _, keys = _sizes(cu_q_ptr, cu_kv_ptr, other, B, Tq, Tk)
        longer = keys[None, :] > my_keys[:, None]
        earlier = (keys[None, :] == my_keys[:, None]) & (other[None, :] < mine[:, None])
        before = (longer | earlier).to(tl.int32)  # [SEQUENCES, OTHERS]
        place += tl.sum(before, 1)
        tiles = _tiles_of(queries, keys, block_q, group, short_keys)
        tiles_before += tl.sum(before * tiles[None, :], 1)
        _, is_wrong = look_at(other, cu_q_ptr, B, Tq)
        _, is_key_wrong = look_at(other, cu_kv_ptr, B, Tk)
        wrong |= (is_wrong | is_key_wrong).to(tl.int32)
    is_first = tl.program_id(0) == 0
    if tl.max(wrong, 0) == 0:
        store_place(
            order_ptr, B, place, tiles_before, my_start, my_queries, my_first_key, my_keys,
            mine <= B,
        )  # fmt: skip
    elif is_first:
        _store_in_given_order(cu_q_ptr, cu_kv_ptr, order_ptr, B, Tq, Tk, block_q, group, short_keys)
    if is_first:
        tl.store(order_ptr, 0)


@triton.jit
def _tiles_of(queries, keys, block_q, group, short_keys):
    """How many tiles the forward has for sequences of this size, of a head or of a group of heads
    that share them (`grouped_rows.py`)."""
    is_short = (keys > 0) & (keys <= short_keys)
    return tl.where(is_short, 0, tiles_of_queries(queries, block_q, group))


@triton.jit
def tiles_of_queries(queries, block_q, group):
    """How many tiles so many queries have, of a head or of a group of heads."""
    return tl.cdiv(tl.cdiv(queries, BOX) * BOX * group, block_q)


@triton.jit
def _sizes(cu_q_ptr, cu_kv_ptr, b, B, Tq, Tk):
    """Where sequences b begin in queries and keys, and how many of both there are, as the offsets
    say. Sequence B, of rows that belong to none, has -1 keys; those beyond it have no queries."""
    q_start, q_end = given_bounds(b, cu_q_ptr, B, Tq)
    kv_start, kv_end = given_bounds(b, cu_kv_ptr, B, Tk)
    len_q = tl.where(b <= B, q_end - q_start, 0).to(tl.int32)
    len_kv = tl.where(b < B, kv_end - kv_start, -1).to(tl.int32)
    return q_start.to(tl.int32), len_q, kv_start.to(tl.int32), len_kv


@triton.jit
def store_place(order_ptr, B, place, tiles_before, q_start, len_q, kv_start, len_kv, exists):
    """Write what stands at places that exist."""
    tl.store(order_ptr + FIRST + place, tiles_before, mask=exists)
    at = order_ptr + FIRST + (B + 1) + place * 4
    tl.store(at, q_start, mask=exists)
    tl.store(at + 1, len_q, mask=exists)
    tl.store(at + 2, kv_start, mask=exists)
    tl.store(at + 3, len_kv, mask=exists)


@triton.jit
def _store_in_given_order(
    cu_q_ptr, cu_kv_ptr, order_ptr, B, Tq, Tk, block_q, group, short_keys
):  # fmt: skip
    """Store all sequences in the order of the batch, by offsets of which none is wrong."""
    q_start, kv_start = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    tiles = tl.full([], 0, tl.int32)
    for b in range(B + 1):
        q_end = next_clean(q_start, b + 1, cu_q_ptr, B, Tq)
        kv_end = next_clean(kv_start, b + 1, cu_kv_ptr, B, Tk)
        given_q_start, given_q_end = given_bounds(b, cu_q_ptr, B, Tq)
        given_kv_start, given_kv_end = given_bounds(b, cu_kv_ptr, B, Tk)
        is_good = (b < B) & (q_start == given_q_start) & (q_end == given_q_end)
        is_good = is_good & (kv_start == given_kv_start) & (kv_end == given_kv_end)
        len_q = (q_end - q_start).to(tl.int32)
        len_kv = tl.where(is_good, kv_end - kv_start, -1).to(tl.int32)
        store_place(
            order_ptr, B, b, tiles, q_start.to(tl.int32), len_q, kv_start.to(tl.int32), len_kv,
            True,
        )  # fmt: skip
        tiles += _tiles_of(len_q, len_kv, block_q, group, short_keys)
        q_start, kv_start = q_end, kv_end


def order_buffer(problem: AttentionProblem, n_tickets: int, sorts: bool) -> Buffer:
    """The memory of the order. If `sorts` is false, there are as many programs as tickets, and the
    order stays empty."""
    size = HEAD + NUMBERS * (problem.B + 1) + n_tickets if sorts else 1
    return Buffer((size,), torch.int32)


def sort_launch(
    problem: AttentionProblem, block_q: int, short_keys: int = 0, group: int = 1
) -> Launch:
    """The launch of `sort_sequences_kernel`, for tiles that so many heads share. Sequences with up
    to `short_keys` keys, but not none, have no tiles: another kernel runs them."""
    return Launch(
        sort_sequences_kernel,
        (triton.cdiv(problem.B + 1, SEQUENCES),),
        {
            "B": problem.B,
            "Tq": problem.Sq,
            "Tk": problem.Skv,
            "block_q": block_q,
            "group": group,
            "short_keys": short_keys,
            "SEQUENCES": SEQUENCES,
            "OTHERS": OTHERS,
            "EARLY": True,
        },
        names={"cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_k", "order": "sequence_order"},
    )
