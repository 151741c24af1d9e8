"""Attention over long sequences takes memory for its inputs and outputs, and little more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from problems import assert_exact, draw

LIMIT_MB = 200
S = 12_288

# VmHWM is the largest resident size so far; the first call is there for compiled code and threads.
SCRIPT = """
import re, torch, lockstep

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def derive(S, make_bias, **mask):
    q, k, v = (torch.randn(1, 1, S, 16, requires_grad=True) for _ in range(3))
    out = lockstep.attention(q, k, v, bias=make_bias(S), kernel="cpu", **mask)
    out.backward(torch.ones_like(out))
    return sum(t.nbytes for t in (q, k, v, q.grad, k.grad, v.grad, out, out))

for call in (
    lambda S: derive(S, lambda S: None, causal=True),
    lambda S: derive(S, lambda S: torch.randn(S, 1).expand(1, 1, S, S), window=(64, 0)),
    lambda S: derive(S, lambda S: torch.randn(S).expand(1, 1, S, S), window=(64, 0)),
):
    call(512)
    before = peak()
    tensors = call(%d)
    print((peak() - before - tensors) / 1e6)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_linear_in_the_sequence():
    """Without a bias, and with one that was expanded from a column or from a row."""
    command = [sys.executable, "-c", SCRIPT % S]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # One matrix of scores alone, or of a bias, would take 600 MB.
    taken = [float(line) for line in done.stdout.split()]
    assert len(taken) == 3
    assert max(taken) < LIMIT_MB


@pytest.mark.parametrize("D", [513, 1000])
def test_any_head_dim(D):
    """Rows of zeros, which fill up the last tile of keys, are as long as a head dim is."""
    from lockstep.kernels.cpu.arithmetic.block import carve_block
    from lockstep.kernels.cpu.arithmetic.narrow import carve_narrow

    assert carve_block(0, D, 8).q_rows >= 4 * D
    assert carve_narrow(0, 8, D).k_rows >= 4 * D
    assert_exact(draw(37, 41, D=D, Dv=D + 1), gradients=True, kernel="cpu")
    assert_exact(draw(1, 41, D=D, Dv=8), kernel="cpu")
