"""The tests of spans, splits and blocks of keys of the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_spans_in_the_interpreter():
    assert_they_pass(
        "test_triton_forward_spans.py",
        "test_triton_split_kv.py",
        "test_triton_carry.py",
        at_least=44,
    )
