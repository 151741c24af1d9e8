"""The tests of spans and splits of the Triton forward in Triton's interpreter."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_spans_in_the_interpreter():
    assert_they_pass(
        "test_triton_forward_spans.py",
        "test_triton_split_kv.py",
        at_least=40,
    )
