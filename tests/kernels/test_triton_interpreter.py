"""The tests of the Triton forward in Triton's interpreter."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_triton_forward_in_the_interpreter():
    assert_they_pass(
        *("test_triton_forward.py", "test_left_padding.py", "test_alibi.py"),
        "test_triton_constant_time.py",
        at_least=88,
    )
