"""Tiles of packed queries for the decode kernel, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton_device import DEVICE, needs_triton

from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.kernels.hopper.decode import plan
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.kernels.hopper.decode.tiles import FIELDS, list_tiles

pytestmark = needs_triton
Skv, Hkv = 9000, 8
# With so many, tall tiles have longer spans.
KEYS_PER_ROW = plan.WIDE_KEYS_PER_ROW


def tiles_of(offsets: list[int], kv_lens: list[int], T: int, group: int = 4) -> list[list[int]]:
    n = T * group // ROWS + len(kv_lens) + 1
    tiles = torch.full((n, FIELDS), -9, dtype=torch.int32, device=DEVICE)
    given = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets, kv_lens)]
    slots = torch.full((n * Hkv, 3), 5, dtype=torch.int32, device=DEVICE)
    sizes = (len(kv_lens), T, Skv, Hkv, n * Hkv - 1)
    constants = {"GROUP": group, "ROWS": ROWS, "KEYS_PER_ROW": KEYS_PER_ROW}
    list_tiles[(n,)](*given, tiles, slots, *sizes, **constants)
    assert slots[:, 0].tolist() == [-1] * (n * Hkv - 1) + [5]
    # What there is of it: a tile that is not needed has no spans.
    return [x for x in tiles.tolist() if x[2] > 0]


def expected(kv_len: int, n_q: int, b: int, tile: int, start: int, group: int = 4) -> list[int]:
    n_rows = n_q * group
    spans = spans_of.fn(Hkv * -(-n_rows // ROWS), plan.WANTED)
    least = least_of.fn(min(n_rows, ROWS), KEYS_PER_ROW, plan.LEAST_SPAN, plan.MOST_SPAN)
    before, behind = tile * ROWS // group, max(n_q - (tile + 1) * ROWS // group, 0)
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
