"""Groups at the entry of a kernel, taken apart for Triton."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest

from lockstep.kernels.spread import spread


class Pointers(NamedTuple):
    x_ptr: Any
    y_ptr: Any


class Strides(NamedTuple):
    b: Any
    s: Any


def grouped(pointers: Pointers, stride_x: Strides, stride_y: Strides, n, N: constexpr):  # noqa: F821
    """Returns what it was given."""
    # The first line.
    return pointers, stride_x, stride_y, n, N


def undocumented(stride_x: Strides):
    return stride_x.b - stride_x.s


def twice(pointers: Pointers, x_ptr):
    return pointers, x_ptr


def plain(n, N: constexpr):  # noqa: F821
    return n, N


def test_the_fields_of_groups_are_parameters():
    function = spread(grouped)
    parameters = inspect.signature(function).parameters
    strides = ["stride_xb", "stride_xs", "stride_yb", "stride_ys"]
    assert list(parameters) == ["x_ptr", "y_ptr", *strides, "n", "N"]
    # Triton looks for constants in the text of annotations.
    assert parameters["N"].annotation == "constexpr"
    assert function(*range(8)) == (Pointers(0, 1), Strides(2, 3), Strides(4, 5), 6, 7)
    assert spread(undocumented)(5, 2) == 3


def test_it_is_the_same_function_otherwise():
    function = spread(grouped)
    assert function.__doc__ == grouped.__doc__
    assert (function.__module__, function.__name__) == (grouped.__module__, grouped.__name__)
    # Triton reads it.
    text = inspect.getsource(function)
    assert "stride_y = Strides(stride_yb, stride_ys)\n    # The first line.\n" in text


def test_a_function_without_groups_stays_as_it_is():
    assert spread(plain) is plain


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(TypeError, match="two parameters of twice have one name"):
        spread(twice)
