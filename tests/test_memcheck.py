"""What `tests/memcheck.py` says of its samples: one that no kernel takes is none that is clean."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from memcheck import CLEAN, DIRTY, FAILED, UNUSABLE, UNUSED, report


@pytest.mark.parametrize(
    ("outcomes", "status", "said"),
    [
        ([CLEAN, CLEAN], 0, "2 of 2 samples clean"),
        ([CLEAN, UNUSED], 0, "1 of 1 samples clean, 1 that no kernel takes"),
        ([CLEAN, DIRTY, UNUSED], FAILED, "1 of 2 samples clean, 1 that no kernel takes"),
        ([UNUSED], UNUSABLE, "0 of 0 samples clean, 1 that no kernel takes"),
    ],
)
def test_report(outcomes, status, said, capsys):
    assert report("memcheck", outcomes) == status
    assert capsys.readouterr().out == f"memcheck: {said}\n"
