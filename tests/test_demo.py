"""What `lockstep demo` lets pass."""

from __future__ import annotations

import pytest
import torch

from lockstep.demo import checks


@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (checks.Exactness("x", ours=2.0, theirs=1.0, allowed=2.0), True),
        (checks.Exactness("x", ours=2.1, theirs=1.0, allowed=2.0), False),
        (checks.Exactness("x", ours=float("nan"), theirs=1.0, allowed=2.0), False),
        (checks.SameBits("x", ours=1.0, theirs=0.5), True),
        (checks.SameBits("x", ours=0.999, theirs=1.0), False),
    ],
)
def test_what_a_check_lets_pass(check, ok):
    assert check.ok is ok


def test_a_check_sees_a_changed_bit(monkeypatch):
    calls = []

    def attention(q, k, v, **_):
        calls.append(q)
        return torch.zeros_like(q) if len(calls) == 1 else torch.full_like(q, 1e-45)

    monkeypatch.setattr("lockstep.attention", attention)
    assert next(checks.same_bits()).ours == 0.0
