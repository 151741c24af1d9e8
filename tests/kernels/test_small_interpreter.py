"""Tests in Triton's interpreter that are soon done: a first answer for the Triton kernels."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_tf32_and_the_order_of_sequences_in_the_interpreter():
    names = ("test_triton_tf32.py", "test_hopper_sequence_order.py", "test_hopper_decode_tiles.py")
    assert_they_pass(*names, at_least=21)
