"""Windows in launches: no side overflows the 32 bits of the numbers that kernels add it to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import unwritten

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton_builds import DEVICES

from lockstep.kernels.hopper.decode.launch import decode_launches
from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.kernels.triton import launch as triton
from lockstep.kernels.triton.plan import plan_of
from lockstep.kernels.window import NO_LIMIT
from lockstep.problem import Options, Tensors, describe

PROCESSORS = 132
FORWARD = {
    "kept_keys_kernel": {"S": 62, "Hq": 8, "Hkv": 8, "D": 192, "Dv": 128},
    "one_block_kernel": {"S": 128, "B": 64, "Hq": 12, "Hkv": 12},
    "forward_kernel": {"S": 1000},
}


def pages() -> Tensors:
    q, k, v = torch.empty(2, 4, 1, 64), torch.empty(8, 16, 2, 64), torch.empty(8, 16, 2, 64)
    table, lens = torch.empty(2, 4, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    return Tensors(*(x.bfloat16() for x in (q, k, v)), kv_lens=lens, page_table=table)


def sides_of(call: Any, kernel: str) -> list[int]:
    (arguments,) = [x._arguments for x in call.launches if x.name == kernel]
    return [arguments[side] for side in ("left", "right") if side in arguments]


@pytest.mark.parametrize("side", [NO_LIMIT + 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1])
class TestLargestWindows:
    @pytest.mark.parametrize("kernel", FORWARD)
    def test_hopper(self, kernel, side):
        sizes = dict(FORWARD[kernel])
        S = sizes.pop("S")
        tensors = unwritten(S, S, **sizes)
        problem = describe(tensors, Options(window_right=side))
        assert sides_of(forward_launches(problem, tensors, PROCESSORS), kernel)[-1] == NO_LIMIT

    def test_hopper_on_both_sides(self, side):
        tensors = unwritten(1000, 1000)
        problem = describe(tensors, Options(window_left=side, window_right=side))
        call = forward_launches(problem, tensors, PROCESSORS)
        assert max(sides_of(call, "forward_kernel")) == NO_LIMIT

    def test_hopper_decode(self, side):
        tensors = pages()
        problem = describe(tensors, Options(window_left=side, window_right=side))
        call = decode_launches(problem, tensors, PROCESSORS)
        assert sides_of(call, "decode_kernel") == [NO_LIMIT] * 2

    def test_triton(self, side):
        tensors = unwritten(1000, 1000)
        problem = describe(tensors, Options(window_left=side, window_right=side))
        plan = plan_of(problem, DEVICES[80])
        call = triton.forward_launches(problem, tensors, plan, DEVICES[80])
        assert sides_of(call, call.launches[0].name) == [NO_LIMIT] * 2
