"""How the emitted CUDA C++ spells numbers, and where it breaks lines."""

from __future__ import annotations

import pytest

from lockstep.simt import bool_, float32, int32, uint32
from lockstep.simt.cuda_cpp.spelling import number
from lockstep.simt.cuda_cpp.writer import Writer
from lockstep.simt.types import round_to_float32


def test_a_long_statement_without_commas_breaks_behind_an_operator():
    writer = Writer([])
    with writer.indented():
        writer.put("total += first_operand_with_a_long_name" + " * another_long_name" * 5 + ";")
        writer.put("x" * 120)
    assert [line.strip() for line in writer.lines] == [
        "total += first_operand_with_a_long_name * another_long_name * another_long_name *",
        "another_long_name * another_long_name * another_long_name;",
        "x" * 120,
    ]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0.1, float32, "0.1f"),
        (100.0, float32, "100.0f"),
        (1e30, float32, "1e+30f"),
        (16777217.0, float32, "16777216.0f"),
        (3.4028234663852886e38, float32, "3.4028235e+38f"),
        (-(2**31), int32, "(-2147483647 - 1)"),
        (0xFFFFFFFF, uint32, "0xffffffffu"),
        (True, bool_, "true"),
    ],
)
def test_numbers(value, dtype, expected):
    exact = round_to_float32(value) if dtype == float32 else value
    assert number(exact, dtype) == expected
