"""What parts weigh in the second kernel of decode, against one part after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import make_plain

from lockstep.kernels import parts
from lockstep.kernels.hopper.decode import fold

BATCH, ROWS, N_SPANS, N_ROWS, UNIT = 32, 4, 90, 6, 0.3


class Shared:
    """Shared memory [BATCH, ROWS], which is written by rows."""

    shape = (BATCH, ROWS)

    def permute(self, order):
        assert order == (1, 0)
        return self

    def store(self, x):
        self.content = x.T


def load(at, mask, other):
    return torch.where(mask, NUMBERS[torch.where(mask, at, 0)], other)


def plain_gluon(program):
    return SimpleNamespace(
        BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        arange=lambda a, b, _: torch.arange(a, b),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, _: x,
        program_id=lambda _: program,
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
@pytest.mark.parametrize("program", [0, 1])
def test_parts_weigh_what_one_after_the_other_would(monkeypatch, begin, count, program):
    maths = SimpleNamespace(maximum=torch.maximum, where=torch.where, exp2=torch.exp2)
    constants = {"gl": plain_gluon(program), "tl": maths, "NUMBERS": 2}
    make_plain(monkeypatch, (fold, parts), constants)
    monkeypatch.setattr(fold, "fold_weights", parts.fold_weights)
    slot = torch.tensor(1)
    rows = range(program * ROWS, min(program * ROWS + ROWS, N_ROWS))
    of_slot = NUMBERS.view(3, N_SPANS, N_ROWS, 2)[1]
    m = expected_m = torch.full((ROWS,), -torch.inf)
    for first in range(begin, count, BATCH):
        keep, add, l = Shared(), Shared(), Shared()
        given = (0, slot, first, begin, count, N_SPANS, N_ROWS, BATCH, ROWS)
        m = fold.weigh_parts(m, keep, add, l, fold.load_statistics(*given), UNIT)
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
