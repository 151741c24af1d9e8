"""Tests in Triton's interpreter that are soon done: a first answer for the Triton kernels."""

from __future__ import annotations

import pytest
from in_interpreter import assert_they_pass, not_there_already

pytest.importorskip("triton")


@not_there_already
def test_tf32_the_order_of_sequences_and_the_fold_of_shares_in_the_interpreter():
    assert_they_pass(
        "test_triton_tf32.py",
        "test_hopper_sequence_order.py",
        "test_hopper_decode_tiles.py",
        "test_hopper_backward_fold.py",
        at_least=24,
    )
