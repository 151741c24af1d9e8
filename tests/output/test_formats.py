"""Numbers as text."""

from __future__ import annotations

import doctest

import pytest

from lockstep.output import formats
from lockstep.output.formats import duration, kilobytes, number


def test_the_examples_print_what_they_say():
    tested = doctest.testmod(formats)
    assert tested.attempted >= 4
    assert tested.failed == 0


def test_numbers_keep_three_digits():
    texts = [number(n) for n in (0, 736, 9999, 65536, 5_384_000)]
    assert texts == ["0", "736", "9999", "65.5k", "5.38M"]
    assert kilobytes(154560) == "150.9"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (3.14159e-6, "3.14 µs"),
        (999.6e-6, "1 ms"),
        (9.876e-3, "9.88 ms"),
        (0.1234, "123 ms"),
        (38.6, "38.6 s"),
        (1234.0, "1234 s"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text
