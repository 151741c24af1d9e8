"""The tests of wrong lengths, offsets and pages in Triton's interpreter."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_bad_metadata_in_the_interpreter():
    assert_they_pass("test_bad_metadata.py", at_least=30)
