"""What counts as a difference, and what is said about it."""

from __future__ import annotations

import pytest
import torch

from lockstep.audit.bits import first_difference


def test_the_first_difference_is_placed_and_spelled_in_bits():
    expected = torch.ones(2, 3)
    got = expected.clone()
    got[1, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    got[1, 2] = 5.0
    found = first_difference({"lse": expected, "out": expected}, {"lse": expected, "out": got})
    assert found is not None
    assert (found.tensor, found.index) == ("out", (1, 0))
    assert (found.expected_bits, found.got_bits) == ("0x3f800000", "0x3f800001")
    assert (found.differing, found.elements) == (2, 6)
    assert "out[1, 0]" in str(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sign_of_zero_counts_and_a_kind_of_nan_does_not(dtype):
    zero, nan = torch.zeros(1, dtype=dtype), torch.full((1,), float("nan"), dtype=dtype)
    found = first_difference({"x": zero}, {"x": -zero})
    assert found is not None
    assert found.got_bits == "0x8" + "0" * (2 * zero.element_size() - 1)
    assert first_difference({"x": nan}, {"x": -nan}) is None


@pytest.mark.parametrize(
    "got", [{}, {"x": torch.zeros(3)}, {"x": torch.zeros(2, dtype=torch.float64)}]
)
def test_results_that_cannot_be_compared_are_an_error(got):
    with pytest.raises(ValueError, match="got"):
        first_difference({"x": torch.zeros(2)}, got)
