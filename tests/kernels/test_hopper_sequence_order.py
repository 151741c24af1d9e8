"""The order of packed sequences, longest first: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from bad_metadata import clean, spoil_offsets
from triton_device import DEVICE, needs_triton

from lockstep.kernels.hopper.forward.scheduling.sequence_order import (
    HEAD,
    NUMBERS,
    OTHERS,
    SEQUENCES,
    sort_sequences_kernel,
)

pytestmark = needs_triton
BLOCK_Q = 128


def sort(
    offsets: list[list[int]], T: list[int], dtype: torch.dtype, short_keys: int = 0, group: int = 1
) -> list[list[int]]:
    """What stands at each place: tiles before it, and where its sequence lies; and the ends."""
    P = len(offsets[0])
    order = torch.full((HEAD + 1 + NUMBERS * P,), -7, dtype=torch.int32, device=DEVICE)
    given = [torch.tensor(x, dtype=dtype, device=DEVICE) for x in offsets]
    sort_sequences_kernel[(-(-P // SEQUENCES),)](
        *given, order, P - 1, *T, BLOCK_Q, group, short_keys, SEQUENCES, OTHERS, False
    )
    assert order[[0, -1]].tolist() == [0, -7]
    before, bounds = order[HEAD : HEAD + P], order[HEAD + P : -1].view(P, 4)
    return torch.cat([before[:, None], bounds], 1).tolist()


def places(
    starts: list[list[int]],
    lens: list[list[int]],
    order: list[int],
    short_keys: int = 0,
    group: int = 1,
) -> list[list[int]]:
    """The same, of sequences in this order. Heads of a group have boxes of 8 queries."""
    found, tiles = [], 0
    for b in order:
        found.append([tiles, starts[0][b], lens[0][b], starts[1][b], lens[1][b]])
        rows = -(-lens[0][b] // 8) * 8 * group
        tiles += 0 if 0 < lens[1][b] <= short_keys else -(-rows // BLOCK_Q)
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("B", "short_keys", "group"), [(1, 0, 1), (7, 128, 5), (64, 0, 1), (200, 64, 1), (33, 0, 8)]
)
def test_order(B, short_keys, group, dtype):
    draws = random.Random(B)
    lens = [[draws.choice((0, 1, 128, 500, 999)) for _ in range(B)] for _ in range(2)]
    offsets = [[sum(x[:b]) for b in range(B + 1)] for x in lens]
    T = [x[-1] + draws.choice((0, 5)) for x in offsets]
    # Stable: the earlier of equals first. Behind all, rows of no sequence.
    order = [*sorted(range(B), key=lambda b: -lens[1][b]), B]
    lens = [[*lens[0], T[0] - offsets[0][-1]], [*lens[1], -1]]
    found = sort(offsets, T, dtype, short_keys, group)
    assert found == places(offsets, lens, order, short_keys, group)


@pytest.mark.parametrize("seed", range(6))
def test_order_by_wrong_offsets(seed):
    draws = random.Random(seed)
    T, B = [2000, 3000], 40
    offsets = [[0, *sorted(draws.randint(0, t) for _ in range(B - 1)), t] for t in T]
    for i in draws.choice([(0,), (1,), (0, 1)]):
        offsets[i] = spoil_offsets(draws, offsets[i], T[i])
    offsets[0][draws.randint(1, B)] = -1
    (q, q_right), (k, k_right) = (clean(x, t) for x, t in zip(offsets, T, strict=True))
    ends = [[*q[1:], T[0]], [*k[1:], T[1]]]
    lens = [
        [end - start for start, end in zip(*x, strict=True)] for x in zip((q, k), ends, strict=True)
    ]
    right = [a and b for a, b in zip(q_right, k_right, strict=True)]
    good = [*(a and b for a, b in pairwise(right)), False]
    lens[1] = [n if is_good else -1 for n, is_good in zip(lens[1], good, strict=True)]
    found = sort(offsets, T, torch.int64, 100)
    assert found == places([q, k], lens, list(range(B + 1)), 100)
