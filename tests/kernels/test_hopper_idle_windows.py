"""Windows that hide no key: which of them are none."""

from __future__ import annotations

import pytest
import torch
from problems import unwritten

from lockstep.problem import Options, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.forward.idle_windows import without_idle_window

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("S", "D", "dtype", "window", "options", "is_idle"),
    [
        (590, 64, BF16, 3472, {}, True),
        (3472, 128, BF16, 3472, {}, True),
        (3473, 128, BF16, 3472, {}, False),
        # Rows of narrower windows have running maxima, but for the widest heads, and in fp16 all.
        (590, 128, BF16, 1024, {}, False),
        (590, 256, BF16, 1024, {}, True),
        (590, 128, FP16, 1024, {}, True),
        # Blocks of 64 keys.
        (590, 128, FP16, 600, {}, False),
        (590, 64, BF16, 3472, {"constant_time": True}, False),
        (590, 64, BF16, 3472, {"query_invariant": True}, False),
    ],
)
def test_which_windows_are_none(S, D, dtype, window, options, is_idle):
    tensors = unwritten(S, S, D=D, dtype=dtype)
    problem = describe(tensors, Options(window_left=window - 1, window_right=0, **options))
    rest = without_idle_window(problem)
    assert rest.window == ((None, 0) if is_idle else (window - 1, 0))
