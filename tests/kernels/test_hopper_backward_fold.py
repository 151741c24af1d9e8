"""The launch that adds up shares of dk and dv in the Hopper backward, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_device import INTERPRETED

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.backward import shares
from lockstep.kernels.hopper.common.pieces import n_pieces, piece_start, piece_width

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

BLOCK_KV, HKV, STALE = 128, 2, 7.0
# Head dims, and how many columns are multiplied.
D, COLUMNS, DV, DV_COLUMNS = 72, 80, 64, 64


def laid_out(x: torch.Tensor, columns: int) -> torch.Tensor:
    """64 rows of dk or dv as two warpgroups' registers lie in memory."""
    memory = torch.empty(64 * columns)
    for p in range(n_pieces(columns)):
        first, n = piece_start(columns, p), piece_width(columns, p)
        piece = x[:, first : first + n].reshape(4, 2, 8, n // 8, 4, 2).permute(3, 0, 2, 4, 1, 5)
        memory[64 * first : 64 * (first + n)] = piece.flatten()
    return memory


def fold(parts, shape, strides, B, Skv, slots, n_shares, bounds=None, plan=None):
    """dk and dv [*shape, ·] of shares `parts` [number, BLOCK_KV, COLUMNS + DV_COLUMNS]."""
    memory = [
        torch.cat(
            [
                torch.cat((laid_out(x[:, :COLUMNS], COLUMNS), laid_out(x[:, COLUMNS:], DV_COLUMNS)))
                for x in part.split(64)
            ]
        )
        for part in parts
    ]
    dk, dv = (torch.full((*shape, n), STALE, dtype=torch.float16) for n in (D, DV))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "gdc_wait", lambda: None)
        shares.finish_keys[(len(parts), BLOCK_KV // 32)](
            torch.stack(memory), dk, dv, bounds, plan, *strides, *strides, HKV, B, Skv, slots,
            n_shares, 0.5,
            D=D, DV=DV, D_COLUMNS=COLUMNS, DV_COLUMNS=DV_COLUMNS, BLOCK_KV=BLOCK_KV, MASKED=True,
        )  # fmt: skip
    return dk, dv


def drawn(n: int) -> torch.Tensor:
    """Small integers, whose sums are exact."""
    return torch.randint(-9, 10, (n * HKV, BLOCK_KV, COLUMNS + DV_COLUMNS)).float()


def expected_of(parts, first: int, n_shares: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv of the key tile whose shares begin with the one of this number."""
    total = sum(parts[(first + i) * HKV + head] for i in range(n_shares))
    return total[:, :D] * 0.5, total[:, COLUMNS:]


def test_dense():
    """Rows beyond the last key are not written."""
    B, Skv, n_shares = 2, 200, 3
    parts = drawn(B * 2 * n_shares)
    shape = (B, HKV, Skv)
    found = fold(parts, shape, (HKV * Skv, Skv, 1), B, Skv, 2 * n_shares, n_shares)
    for b in range(B):
        for head in range(HKV):
            for tile in range(2):
                rows = slice(128 * tile, min(128 * tile + 128, Skv))
                wanted = expected_of(parts, (2 * b + tile) * n_shares, n_shares, head)
                for x, y in zip(found, wanted, strict=True):
                    assert torch.equal(x[b, head, rows].float(), y[: rows.stop - rows.start])


@pytest.mark.parametrize("is_packed", [False, True])
def test_sequences_whose_lengths_the_host_does_not_know(is_packed):
    """Those with one share are left alone; of lengths in kv_lens, the rest of the last key tile is
    written, too."""
    lengths, counts = [130, 200, 0, 90], [3, 1, 1, 2]
    tiles = [2, 2, 0, 1]
    B, n = len(lengths), [t * c if c > 1 else 0 for t, c in zip(tiles, counts, strict=True)]
    # One more sequence, of rows that no other one owns; and memory for more than there are.
    firsts = [sum(n[:b]) for b in range(B + 1)] + [sum(n)]
    plan = torch.tensor([[0] * (B + 2), firsts, *[[0] * (B + 2)] * 3, [*counts, 1, 0]]).int()
    parts = drawn(sum(n) + 2)
    starts = [sum(lengths[:b]) for b in range(B + 1)]
    if is_packed:
        bounds = torch.tensor([[0] * (B + 2), [*starts, starts[-1]], [1] * B + [0, 0]]).int()
        shape, strides, Skv = (starts[-1], HKV), (0, 1, HKV), starts[-1]
    else:
        bounds, Skv = None, 256
        shape, strides = (B, HKV, Skv), (HKV * Skv, Skv, 1)
    found = fold(parts, shape, strides, B, Skv, 9, 1, bounds, plan)
    for b in range(B):
        for head in range(HKV):
            for i in range(2):
                own = found[i][starts[b] : starts[b + 1], head] if is_packed else found[i][b, head]
                wanted = torch.full_like(own, STALE).float()
                for tile in range(tiles[b] if counts[b] > 1 else 0):
                    first = firsts[b] + tile * counts[b]
                    rows = wanted[128 * tile : 128 * tile + 128]
                    rows[:] = expected_of(parts, first, counts[b], head)[i][: len(rows)]
                assert torch.equal(own.float(), wanted)
