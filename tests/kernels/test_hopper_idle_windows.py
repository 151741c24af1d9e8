"""Windows that hide no key: which of them are none."""

from __future__ import annotations

import pytest
import torch
from problems import unwritten

from lockstep.problem import Options, Tensors, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.forward.idle_windows import without_idle_window
from lockstep.kernels.hopper.forward.scheduling.part_rule import most_parts

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


@pytest.mark.parametrize(("window", "is_idle"), [(4095, True), (4096, False), (20_000, False)])
def test_a_cache_no_longer_than_a_window_has_as_many_parts_as_a_longer_one(window, is_idle):
    """Without a window, keys in pages may have parts, and it stays where they could."""
    q, lens = unwritten(100, 16).q, torch.empty(1, dtype=torch.int32)
    pages = torch.empty(1, 16, 2, q.shape[-1], dtype=q.dtype)
    table = torch.empty(1, window // 16, dtype=torch.int32)
    tensors = Tensors(q, pages, pages, page_table=table, kv_lens=lens)
    problem = describe(tensors, Options(window_left=window - 1, window_right=0))
    rest = without_idle_window(problem)
    assert rest.window == ((None, 0) if is_idle else (window - 1, 0))
    assert not (is_idle and most_parts(rest) > 1)
