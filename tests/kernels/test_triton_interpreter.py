"""The tests of the Triton kernels in Triton's interpreter: forward and backward, spans, splits and
blocks of keys, and wrong lengths, offsets and pages."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_triton_kernels_in_the_interpreter():
    """All in one process, which takes seconds to start."""
    assert_they_pass(
        "test_triton_forward.py",
        "test_triton_backward.py",
        "test_triton_constant_time.py",
        "test_left_padding.py",
        "test_alibi.py",
        "test_triton_forward_spans.py",
        "test_triton_split_kv.py",
        "test_triton_carry.py",
        "test_triton_terms.py",
        "test_bad_metadata.py",
        at_least=240,
    )
