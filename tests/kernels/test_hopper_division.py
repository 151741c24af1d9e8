"""Divisions by a reciprocal, with the errors that the instruction may have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import make_plain

from lockstep.kernels.hopper.common import division


@pytest.mark.parametrize("ulp", [-1, 0, 1])
def test_quotients_are_exact(monkeypatch, ulp):
    def reciprocal(x):
        return (1.0 / x).view(torch.int32).add(ulp).view(torch.float32)

    gl = SimpleNamespace(where=torch.where, float32=torch.float32, int32=torch.int32)
    make_plain(monkeypatch, (division,), {"gl": gl, "reciprocal": reciprocal})
    draw = torch.Generator().manual_seed(0)
    b = torch.cat([torch.arange(1, 2000), torch.randint(1, 1 << 31, (20_000,), generator=draw)])
    most = ((1 << 22) * b).clamp(max=(1 << 31) - 1)
    q = (torch.rand(len(b), 30, generator=draw, dtype=torch.float64) * (most // b)[:, None]).long()
    # On both sides of a multiple of b.
    for rest in (-1, 0, 1):
        a = (q * b[:, None] + rest).clamp(min=0)
        a = torch.minimum(a, most[:, None] - 1)
        found = division.divide(a.int(), b[:, None].int().expand_as(a))
        assert torch.equal(found.long(), a // b[:, None])
