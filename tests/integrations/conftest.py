"""Fixtures of several integrations."""

from __future__ import annotations

import pytest

import lockstep


@pytest.fixture
def counted(monkeypatch):
    """The calls that reach lockstep.attention."""
    calls = []
    original = lockstep.attention

    def attention(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(lockstep, "attention", attention)
    return calls
