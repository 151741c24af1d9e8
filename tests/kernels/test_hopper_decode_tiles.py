"""Tiles of packed queries for the decode kernel, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from bad_metadata import clean
from triton_device import DEVICE, needs_triton

from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.folding.fold_plan import MOST_SLOTS
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.kernels.hopper.decode.tiles import FIELDS, list_tiles
from lockstep.kernels.hopper.forward.scheduling import part_rule
from lockstep.kernels.hopper.forward.scheduling.sequence_order import HEAD, NUMBERS

pytestmark = needs_triton
Skv, Hkv, Dv, BLOCK_Q = 9000, 8, 24, 128
# With so many, tall tiles have longer spans.
KEYS_PER_ROW = plan.WIDE_KEYS_PER_ROW


def tiles_of(offsets: list[int], kv_lens: list[int], T: int, group: int = 4) -> list[list[int]]:
    return tiles_and_order(offsets, kv_lens, T, group)[0]


def tiles_and_order(
    offsets: list[int],
    kv_lens: list[int],
    T: int,
    group: int = 4,
    least_queries: int | None = None,
    most_parts: int = 1,
    longest: int | None = None,
    refused: set[int] | None = None,
    few_queries: int = 0,
) -> tuple[list[list[int]], list[list[int]], list[list[int]], int]:
    """The tiles of decode; what stands at each place of the forward, if it has long sequences, of
    those whose tiles have one part of their keys, and of others; and whether these others count
    parts. Without long sequences, none may have more than the `longest`. `refused`: the rows that
    become NaN. Of sequences with `few_queries`, and if these are any, of those with parts, the
    heads of a group share tiles."""
    B, n = len(kv_lens), T * group // ROWS + len(kv_lens) + 1
    table = torch.full((1 + n, FIELDS), -9, dtype=torch.int32, device=DEVICE)
    given = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets, kv_lens)]
    n_slots = min(n * Hkv, MOST_SLOTS) - 1
    slots = torch.full((n_slots + 1, 3), 5, dtype=torch.int32, device=DEVICE)
    size = HEAD + NUMBERS * (B + 1) + 1
    orders = [torch.full((size,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    arrivals = torch.full((701,), -7, dtype=torch.int32, device=DEVICE)
    out, lse = (torch.zeros(T, Hkv * group, *dims, device=DEVICE) for dims in ((Dv,), ()))
    sizes = (B, T, Skv, Hkv, Dv, n_slots, least_queries or (longest or T) + 1, BLOCK_Q)
    sizes += (700, most_parts, Hkv * group, 1, group if few_queries else 1, 1)
    sizes += (T if least_queries else longest or T, few_queries)
    constants = {"GROUP": group, "ROWS": ROWS, "KEYS_PER_ROW": KEYS_PER_ROW, "EARLY": False}
    constants |= {"SORTS": least_queries is not None, "CUTS": most_parts > 1}
    list_tiles[(B + 1,)](*given, table, slots, *orders, arrivals, out, lse, *sizes, **constants)
    for x in (out, lse):
        rows = x.isnan().view(T, -1)
        assert rows.any(1).equal(rows.all(1))
        assert set(rows.any(1).nonzero().flatten().tolist()) == (refused or set())
    assert slots[:, 0].tolist() == [-1] * n_slots + [5]
    count, tiles = int(table[0, 0]), table[1:].tolist()
    assert all(-9 not in x for x in tiles[:count])
    assert all(set(x) == {-9} for x in tiles[count:])
    assert arrivals.tolist() == [0 if most_parts > 1 else -7] * 700 + [-7]
    places = []
    for order, is_there in zip(orders, (least_queries is not None, most_parts > 1), strict=True):
        assert order[[0, -1]].tolist() == [0 if is_there else -7, -7]
        before, bounds = order[HEAD : HEAD + B + 1], order[HEAD + B + 1 : -1].view(B + 1, 4)
        places.append(torch.cat([before[:, None], bounds], 1).tolist())
        if not is_there:
            assert set(order.tolist()) == {-7}
    return tiles[:count], *places, int(orders[1][1])


def expected(kv_len: int, n_q: int, b: int, tile: int, start: int, group: int = 4) -> list[int]:
    n_rows = n_q * group
    spans = spans_of.fn(Hkv * -(-n_rows // ROWS), plan.WANTED)
    least = least_of.fn(min(n_rows, ROWS), KEYS_PER_ROW, plan.LEAST_SPAN, plan.MOST_SPAN)
    before, behind = tile * ROWS // group, max(n_q + -(tile + 1) * ROWS // group, 0)
    return [kv_len, n_q, spans, least, before, behind, b, tile, start]


def test_every_tile_of_rows_is_there_once():
    found = tiles_of([0, 1, 2, 42, 42, 47], [100, 8000, 9000, 3, 5], T=47)
    wanted = [(100, 1, 0, 0, 0), (8000, 1, 1, 0, 1)]
    wanted += [(9000, 40, 2, tile, 2) for tile in range(3)]
    wanted += [(5, 5, 4, 0, 42)]
    assert found == [expected(*x) for x in wanted]


def test_wrong_numbers_have_no_keys_and_every_row_has_a_tile():
    found = tiles_of([0, 1, 2], [-1, Skv + 1], T=4)
    assert found == [
        expected(-1, 1, 0, 0, 0), expected(-1, 1, 1, 0, 1), expected(-1, 2, 2, 0, 2)
    ]  # fmt: skip
    found = tiles_of([0, 50, 10], [100, 200], T=20)
    assert [(x[0], x[8], x[8] + x[1]) for x in found] == [(-1, 0, 10), (-1, 10, 20)]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(("B", "behind"), [(1, 3), (7, 5), (300, 2)])
def test_a_sequence_longer_than_any_may_be_has_no_tile_and_is_nan(B, behind, wrong):
    """So are rows of no sequence, if they are as many."""
    draws, longest, group = random.Random(B), 4, 8
    q_lens = [draws.choice((0, 1, 1, 4, 5, 300 // B)) for _ in range(B)]
    offsets = [sum(q_lens[:b]) for b in range(B + 1)]
    T = offsets[-1] + behind
    given, right = list(offsets), [True] * (B + 1)
    if wrong:
        given[B // 2 + 1] = -1
        offsets, right = clean(given, T)
    ends = [*offsets[1:], T]
    bounds = list(zip(offsets, ends, strict=True))
    refused = {row for start, end in bounds if end - start > longest for row in range(start, end)}
    found, *_ = tiles_and_order(given, [50] * B, T, group, longest=longest, refused=refused)
    keys = [*(50 if right[b] and right[b + 1] else -1 for b in range(B)), -1]
    assert found == [
        expected(keys[b], end - start, b, 0, start, group)
        for b, (start, end) in enumerate(bounds) if 0 < end - start <= longest
    ]  # fmt: skip


@pytest.mark.parametrize(("most_parts", "group"), [(1, 1), (4, 1), (1, 4), (8, 4), (8, 7)])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("B", [1, 7, 300])
def test_long_sequences_are_the_forward_s_and_all_others_have_tiles(B, wrong, most_parts, group):
    draws = random.Random(B)
    q_lens = [draws.choice((0, 1, 127, 128, 500)) for _ in range(B)]
    kv_lens = [draws.choice((-3, 0, 77, 900, 8999, 9001)) for _ in range(B)]
    offsets = [sum(q_lens[:b]) for b in range(B + 1)]
    T = offsets[-1] + 400  # rows of no sequence, which are not the forward's
    given, right = list(offsets), [True] * (B + 1)
    if wrong:
        given[B // 2 + 1] = T + 1
        offsets, right = clean(given, T)
    few_queries = 200 if group > 1 and most_parts > 1 else 0
    found, whole, cut, counts_parts = tiles_and_order(
        given, kv_lens, T, group, 128, most_parts, few_queries=few_queries
    )

    ends = [*offsets[1:], T]
    n_q = [end - start for start, end in zip(offsets, ends, strict=True)]
    keys = [n if 0 <= n <= Skv else -1 for n in kv_lens]
    keys = [*(n if right[b] and right[b + 1] else -1 for b, n in enumerate(keys)), -1]
    is_long = [n >= 128 and b < B for b, n in enumerate(n_q)]
    assert found == [
        expected(keys[b], n_q[b], b, tile, offsets[b], group)
        for b in range(B + 1) if not is_long[b] for tile in range(-(-n_q[b] * group // ROWS))
    ]  # fmt: skip

    shared = group if few_queries else 1

    def n_tiles(b: int, heads: int = shared) -> int:
        """Of all heads of a group, if they share tiles: rows come in boxes of 8 queries."""
        return -(-(-(-n_q[b] // 8) * 8 * heads) // BLOCK_Q)

    def n_parts(b: int) -> int:
        n = kv_lens[b] if 0 <= kv_lens[b] <= Skv else -1
        tiles = n_tiles(b) * Hkv * group // shared
        rule = part_rule.WANTED, most_parts, part_rule.LEAST_KEYS
        return int(part_rule.parts_of.fn(tiles, n - n_q[b], *rule))

    def has_parts(b: int) -> bool:
        return n_parts(b) > 1 or n_q[b] < few_queries

    all_parts = sum(n_parts(b) * n_tiles(b) for b in range(B) if is_long[b] and has_parts(b))
    for is_cut, places in ((False, whole), (True, cut))[: 1 + (most_parts > 1)]:
        long = [b for b in range(B) if is_long[b] and has_parts(b) == is_cut]
        counts = is_cut and not wrong and all_parts * Hkv * group // shared <= part_rule.UNITS
        if is_cut and long:
            assert counts_parts == counts
        # By wrong offsets, in the order of the batch.
        tiles = 0
        for place, b in enumerate(long if wrong else sorted(long, key=lambda b: -keys[b])):
            assert places[place] == [tiles, offsets[b], n_q[b], b, keys[b]]
            tiles += n_tiles(b, shared if is_cut else 1) * (n_parts(b) if counts else 1)
        rest = places[len(long) :]
        assert all(x[1:] == [0, 0, 0, 0] for x in rest)
        # The first place is looked at even if it is none.
        assert all(x[0] > tiles for x in rest[not long :])
        assert long or rest[0][0] == 0
