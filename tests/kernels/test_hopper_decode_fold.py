"""What parts weigh in the second kernel of decode, against one part after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import make_plain

from lockstep.kernels import parts
from lockstep.kernels.hopper.common import division
from lockstep.kernels.hopper.decode.folding import fold, part_batches, units

BATCH, LOADED, ROWS, N_SPANS, N_ROWS, UNIT = 32, 16, 4, 90, 6, 0.3


class Shared:
    """Shared memory [BATCH / LOADED, ROWS, LOADED]."""

    shape = (BATCH // LOADED, ROWS, LOADED)

    def store(self, x):
        assert x.shape == self.shape
        self.content = x.permute(0, 2, 1).reshape(BATCH, ROWS)


def load(at, mask, other):
    return torch.where(mask, NUMBERS[torch.where(mask, at, 0)], other)


def plain_gluon():
    return SimpleNamespace(
        BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        num_warps=lambda: ROWS,
        arange=lambda a, b, _: torch.arange(a, b),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, _: x,
        associative_scan=lambda x, axis, _larger: x.cummax(axis).values,
        maximum=torch.maximum,
        max=lambda x, axis: x.amax(axis),
        where=torch.where,
        load=load,
        int64=torch.int64,
    )


torch.manual_seed(0)
# [slots, spans, rows, (m, l)] one behind the other; some rows see nothing in some spans.
NUMBERS = torch.randn(3, N_SPANS, N_ROWS, 2).mul(20)
NUMBERS[:, ::7, 1, 0] = -torch.inf
NUMBERS[:, :, 2, 0] = -torch.inf
# One sees nothing but in the last.
NUMBERS[:, :, 3, 0] = -torch.inf
NUMBERS[:, (0, 34, 89), 3, 0] = 1.0
NUMBERS = NUMBERS.flatten()


@pytest.mark.parametrize(("begin", "count"), [(0, 1), (3, 35), (5, 90)])
@pytest.mark.parametrize("group", [0, 1])
def test_parts_weigh_what_one_after_the_other_would(monkeypatch, begin, count, group):
    maths = SimpleNamespace(maximum=torch.maximum, where=torch.where, exp2=torch.exp2)
    constants = {"gl": plain_gluon(), "tl": maths, "NUMBERS": 2, "LOADED": LOADED}
    make_plain(monkeypatch, (fold, part_batches, parts), constants)
    monkeypatch.setattr(fold, "store_numbers", part_batches.store_numbers)
    monkeypatch.setattr(fold, "fold_weights", parts.fold_weights)
    slot = torch.tensor(1)
    rows = range(group * ROWS, min(group * ROWS + ROWS, N_ROWS))
    of_slot = NUMBERS.view(3, N_SPANS, N_ROWS, 2)[1]
    m = expected_m = torch.full((ROWS,), -torch.inf)
    for first in range(begin, count, BATCH):
        keep, add, l = Shared(), Shared(), Shared()
        given = (0, slot, group, first, begin, count, N_SPANS, N_ROWS, BATCH, ROWS)
        m = fold.store_part_factors(m, keep, add, l, fold.load_statistics(*given), UNIT)
        for i in range(first, min(first + BATCH, count)):
            part_m, part_l = torch.full((ROWS,), -torch.inf), torch.zeros(ROWS)
            part_m[: len(rows)] = of_slot[i, rows.start : rows.stop, 0]
            part_l[: len(rows)] = of_slot[i, rows.start : rows.stop, 1]
            expected_m, kept, added = parts.fold_weights(expected_m, part_m, UNIT)
            # torch's exp2 of a vector and of its end may differ in the last place.
            assert torch.allclose(keep.content[i - first], kept, rtol=1e-6, atol=0)
            assert torch.allclose(add.content[i - first], added, rtol=1e-6, atol=0)
            assert torch.equal(l.content[i - first], part_l)
        # Behind the last part nothing is added, and what there is stays.
        behind = slice(count - first, None) if count - first < BATCH else slice(0, 0)
        assert (add.content[behind] == 0).all()
        seen = expected_m > -torch.inf
        assert (keep.content[behind][:, seen] == 1).all()
        assert torch.equal(m, expected_m)


def plain_units(program, n_programs, slots):
    """Gluon for `units`, in a program of several."""

    def load(at, mask=True, other=-1):
        at = torch.as_tensor(at)
        return torch.where(torch.as_tensor(mask), slots.flatten()[at % slots.numel()], other)

    return SimpleNamespace(
        BlockedLayout=lambda *_: None,
        num_warps=lambda: 4,
        num_programs=lambda _: torch.tensor(n_programs),
        program_id=lambda _: torch.tensor(program),
        arange=lambda a, b, _: torch.arange(a, b),
        associative_scan=lambda x, axis, _add: x.cumsum(axis),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        where=lambda *x: torch.where(*(torch.as_tensor(y) for y in x)),
        load=load,
        int32=torch.int32,
    )


@pytest.mark.parametrize("n_programs", [56, 55, 8, 1], ids="{} programs".format)
@pytest.mark.parametrize("present", ["some", "all", "none"])
def test_each_unit_of_slots_with_parts_is_folded_once(monkeypatch, n_programs, present):
    n_groups, n_blocks = 2, 4
    slots = torch.arange(21).view(7, 3) + 100
    if present != "all":
        slots[:, 0] = -1
    if present == "some":
        slots[[1, 2, 6], 0] = 5
    monkeypatch.setattr(torch.Tensor, "type", SimpleNamespace(layout=None), raising=False)
    make_plain(monkeypatch, (units, division), {"SLOTS": 16, "divide": lambda a, b: a // b})
    found = []
    for program in range(n_programs):
        monkeypatch.setattr(units, "gl", plain_units(program, n_programs, slots))
        ranks, n_units = units.rank_slots(0, len(slots), n_blocks, n_groups)
        for number in range(program, int(n_units), n_programs):
            unit = units.find_unit(0, ranks, torch.tensor(number), len(slots), n_groups, n_blocks)
            slot, work, begin, count, group, block = (int(x) for x in unit)
            assert [work, begin, count] == slots[slot].tolist()
            found.append((slot, group, block))
    expected = {
        (slot, group, block)
        for slot in range(len(slots))
        if slots[slot, 0] >= 0
        for group in range(n_groups)
        for block in range(n_blocks)
    }
    assert len(found) == len(set(found))
    assert set(found) == expected
