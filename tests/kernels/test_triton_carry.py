"""Blocks of keys, or of queries, one after the other give the bits of one Triton call.

So do shards of queries and of keys that begin anywhere, each in a call of its own.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from triton_device import DEVICE, GPU, forget_calls, needs_triton, use_small_tiles

from lockstep.distributed import local
from lockstep.distributed.local import RowGradients, Rows, Settings
from lockstep.kernels import triton as triton_kernels
from lockstep.kernels.kernel import Needs
from lockstep.kernels.triton import backward, plan
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_triton
# What is seen; heads; dtype. On a GPU, sequences have several spans of the real size.
CASES = {
    "causal": ({"causal": True}, (2, 1), torch.float16),
    "window": ({"window_left": 30, "window_right": 20, "softcap": 3.0}, (1, 1), torch.float32),
}
if GPU:
    # The interpreter rounds to bfloat16 in a way of its own.
    CASES |= {
        "full": ({}, (4, 2), torch.bfloat16),
        "behind": ({"window_left": 300, "softcap": 3.0}, (4, 1), torch.bfloat16),
        "band": ({"causal": True, "window_left": 600}, (6, 2), torch.float16),
        "single": ({"causal": True}, (4, 2), torch.float32),
    }
B, D, S = (2, 64, 1100) if GPU else (1, 16, 70)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    if GPU:
        return
    use_small_tiles(monkeypatch)
    cuts = (plan.Tiles(16, 16, 1, 1), plan.Tiles(16, 16, 1, 1))
    for name in ("_HALF_HOPPER", "_SINGLE", "_BF16X6"):
        monkeypatch.setattr(backward, name, dict.fromkeys((64, 128, 256, 512), cuts))
    forget_calls(monkeypatch)


class Whole:
    """One call over a whole sequence, its results and its gradients."""

    def __init__(self, case: str) -> None:
        options, (Hq, Hkv), dtype = CASES[case]
        random = torch.Generator().manual_seed(len(case))

        def drawn(H: int, *sizes: int) -> torch.Tensor:
            return torch.randn(B, H, S, *sizes, generator=random).to(DEVICE)

        self.q, self.dout = (drawn(Hq, D).to(dtype) for _ in range(2))
        self.k, self.v = (drawn(Hkv, D).to(dtype) for _ in range(2))
        self.dlse, self.sinks = drawn(Hq), torch.randn(Hq, generator=random).to(DEVICE)
        given = Options(**options, query_invariant=True)
        self.settings = Settings(*given, "triton")
        tensors = Tensors(self.q, self.k, self.v, None, self.sinks)
        self.problem = describe(tensors, given)
        self.rows = local.attend(self.q, self.k, self.v, self.sinks, range(S), self.settings)
        self.grads = RowGradients(self.dout, self.dlse)
        needs = Needs(q=True, k=True, v=True, bias=False, sinks=True)
        found = local.gradients_of(
            self.grads, self.rows, self.q, self.k, self.v, self.sinks, self.settings, needs
        )
        self.dq, self.dk, self.dv, _, self.dsinks = found


def test_sinks_have_their_gradient_without_their_keys():
    """As a rank computes it that has the rows of a head, and none of its keys."""
    whole = Whole("causal")
    found = local.gradient_of_sinks(whole.grads, whole.rows, whole.q, whole.sinks, whole.settings)
    assert torch.equal(found, whole.dsinks)


@pytest.mark.parametrize("case", CASES)
def test_blocks_give_the_bits_of_one_call(case):
    whole, carry = Whole(case), triton_kernels.KERNEL.carry()
    own = slice(S // 3, S // 3 * 2 + 5)
    problem, blocks = whole.problem, range(0, S, 2 * carry.span)

    def block(x: torch.Tensor, first: int) -> torch.Tensor:
        return x[:, :, first : first + 2 * carry.span]

    forward = carry.forward(problem, whole.q[:, :, own], whole.sinks, own.start)
    for first in blocks:
        forward.fold(block(whole.k, first), block(whole.v, first), first)
    for name, got, expected in zip(Rows._fields, forward.close(), whole.rows, strict=True):
        assert torch.equal(got, expected[:, :, own]), name

    out, _, statistics = whole.rows
    rows = carry.rows(problem, whole.q, out, statistics, whole.dout, whole.dlse)
    own_rows = (x[:, :, own] for x in (whole.q, rows, whole.dout))
    queries = carry.queries(problem, *own_rows, own.start)
    for first in blocks:
        queries.fold(block(whole.k, first), block(whole.v, first), first)
    assert torch.equal(queries.close(), whole.dq[:, :, own])

    keys = carry.keys(problem, whole.k[:, :, own], whole.v[:, :, own], own.start)
    for first in blocks:
        keys.fold(*(block(x, first) for x in (whole.q, whole.dout, rows)), first)
    for got, expected in zip(keys.close(), (whole.dk, whole.dv), strict=True):
        assert torch.equal(got, expected[:, :, own])
    assert torch.equal(carry.sinks(problem, whole.sinks, rows), whole.dsinks)


@pytest.mark.parametrize("case", CASES)
def test_shards_give_the_bits_of_one_call(case):
    """What the methods heads and gather run on a rank."""
    whole = Whole(case)
    q, k, v, sinks, settings = whole.q, whole.k, whole.v, whole.sinks, whole.settings
    for at in (range(21, S),) if not GPU else (range(37), range(37, S)):
        own = slice(at.start, at.stop)
        rows = local.attend(q[:, :, own], k, v, sinks, at, settings)
        for name, got, expected in zip(Rows._fields, rows, whole.rows, strict=True):
            assert torch.equal(got, expected[:, :, own]), name
        grads = RowGradients(*(x[:, :, own] for x in whole.grads))
        dq = local.gradient_of_queries(grads, rows, q[:, :, own], k, v, sinks, at, settings)
        assert torch.equal(dq, whole.dq[:, :, own])
        found = local.gradients_of_keys(whole.grads, whole.rows, q, k, v, sinks, at, settings)
        assert torch.equal(found.dk, whole.dk[:, :, own])
        assert torch.equal(found.dv, whole.dv[:, :, own])
