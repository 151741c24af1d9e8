"""The tests of spans, splits and blocks of keys of the Triton kernels, and of wrong lengths,
offsets and pages, in Triton's interpreter."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_spans_and_bad_metadata_in_the_interpreter():
    assert_they_pass(
        "test_triton_forward_spans.py",
        "test_triton_split_kv.py",
        "test_triton_carry.py",
        "test_bad_metadata.py",
        at_least=74,
    )
