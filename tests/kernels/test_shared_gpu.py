"""A GPU that another process uses as well switches between them in the middle of a kernel. Results
must not show it.

The builds of the Hopper backward once had mbarriers of no use in the memory of tiles. Switching
wrote them back: every long call had NaN in dQ.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Kernels of a millisecond each, for a minute at most.
OTHER = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
y = x @ x
torch.cuda.synchronize()
print("running", flush=True)
for _ in range(4000):
    for _ in range(5):
        torch.matmul(x, x, out=y)
    torch.cuda.synchronize()
"""
S, CALLS = 16384, 5
DV = {192: 128}  # that of values, where it is another


@pytest.fixture(scope="module")
def another_process() -> Iterator[None]:
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "running\n"
            yield
        finally:
            other.kill()


def call_of(D: int, causal: bool, gradients: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Results of one call that takes longer than a process has the GPU."""
    torch.manual_seed(0)
    shape, of_values = (1, 2048 // D, S, D), (1, 2048 // D, S, DV.get(D, D))
    q, k, v, dout = (
        torch.randn(x, device="cuda", dtype=torch.bfloat16)
        for x in (shape, shape, of_values, of_values)
    )
    if not gradients:
        return lambda: (lockstep.attention(q, k, v, causal=causal),)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = lockstep.attention(*leaves, causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


@pytest.mark.usefixtures("another_process")
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("D", "causal"), [(64, False), (128, False), (128, True), (192, True), (256, False)]
)
def test_every_call_has_the_same_bits(D, causal, gradients):
    call = call_of(D, causal, gradients)
    first = [x.clone() for x in call()]
    assert not any(x.isnan().any() for x in first)
    for _ in range(CALLS):
        assert all(map(torch.equal, call(), first))
