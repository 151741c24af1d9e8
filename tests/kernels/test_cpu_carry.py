"""Blocks of keys, or of rows, one after the other give the bits of one call over all of them."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.cpu.arithmetic.block import ROWS, SPAN
from lockstep.kernels.cpu.carry import CarriedForward
from lockstep.kernels.cpu.carry_backward import CarriedKeys, CarriedQueries, rows_of, sums_of_sinks
from lockstep.kernels.kernel import Needs
from lockstep.problem import Options, Tensors, describe

# Whole, causal and with a window; a sequence of more spans than are folded together.
CASES = {
    "full": (700, (4, 2), {}, torch.float32),
    "causal": (700, (4, 1), {"causal": True}, torch.bfloat16),
    "window": (900, (2, 2), {"window_left": 100, "window_right": 30}, torch.float32),
    "cap": (333, (6, 2), {"causal": True, "window_left": 64, "softcap": 3.0}, torch.float16),
    "groups": (SPAN * 64 + 300, (2, 1), {}, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_give_the_bits_of_one_call(case):
    S, (Hq, Hkv), options, dtype = CASES[case]
    D, at = (16, range(S - 40, S)) if case == "groups" else (32, range(S // 3, S // 3 * 2))
    q, dout = (torch.randn(2, Hq, S, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, Hkv, S, D).to(dtype) for _ in range(2))
    sinks, dlse = torch.randn(Hq), torch.randn(2, Hq, S)
    if case == "groups":
        # All rows would take minutes.
        q, dout, dlse = (x[:, :, at.start :] for x in (q, dout, dlse))
        S_q, own = len(at), slice(None)
    else:
        S_q, own = S, slice(at.start, at.stop)
    arguments = (*Options(**options), "cpu")
    tensors = Tensors(q, k, v, None, sinks)
    out, lse, statistics = torch.ops.lockstep.attention(*tensors[:6], None, None, *arguments)
    problem = describe(tensors, Options(**options))
    start = own.start or 0 if S_q == S else at.start

    forward = CarriedForward(problem, q[:, :, own], sinks, start)
    for first in range(0, S, 2 * SPAN):
        forward.fold(k[:, :, first : first + 2 * SPAN], v[:, :, first : first + 2 * SPAN], first)
    for got, expected in zip(forward.close(), (out, lse, statistics), strict=True):
        assert torch.equal(got, expected[:, :, own])

    needs = Needs(q=True, k=True, v=True, bias=False, sinks=True)
    dq, dk, dv, dsinks = torch.ops.lockstep.attention_backward(
        dout, dlse, out, statistics, *tensors[:6], None, None, *arguments, list(needs)
    )
    rows = rows_of(problem, q, out, statistics, dout, dlse)
    queries = CarriedQueries(problem, *(x[:, :, own] for x in (q, rows, dout)), start)
    for first in range(0, S, SPAN):
        queries.fold(k[:, :, first : first + SPAN], v[:, :, first : first + SPAN], first)
    assert torch.equal(queries.close(), dq[:, :, own])
    assert torch.equal(sums_of_sinks(problem, sinks, rows), dsinks)

    if S_q == S:
        keys = CarriedKeys(problem, k[:, :, own], v[:, :, own], own.start)
        flat = [x.reshape(2, Hkv, -1, *x.shape[3:]) for x in (q, dout, rows)]
        for first in range(0, Hq // Hkv * S, ROWS):
            keys.fold(*(x[:, :, first : first + ROWS] for x in flat), first)
        for got, expected in zip(keys.close(), (dk, dv), strict=True):
            assert torch.equal(got, expected[:, :, own])
