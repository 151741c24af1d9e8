"""The CPU path gives the same bits on every machine that has fused multiply-add.

Nothing in a row's chain of operations depends on the vector width, so one digest serves
AVX-512, AVX2 and NEON. A change of these digests is a change of every user's results.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

import lockstep

CASES = {
    "causal": (
        {"Hq": 2, "Hkv": 1, "Sq": 300, "Skv": 300, "D": 64, "Dv": 64, "causal": True},
        "89fb1c219911ac71",
    ),
    "decode": (
        {"Hq": 4, "Hkv": 2, "Sq": 1, "Skv": 700, "D": 33, "Dv": 47},
        "8693dfaeed24b3eb",
    ),
    "softcap": (
        {"Hq": 2, "Hkv": 2, "Sq": 111, "Skv": 257, "D": 80, "Dv": 80, "softcap": 5.0},
        "2cea7e1bdf4973a9",
    ),
    "window": (
        {"Hq": 8, "Hkv": 2, "Sq": 2, "Skv": 1000, "D": 128, "Dv": 128, "window": (100, 3)},
        "bcf9377a079e4b56",
    ),
}


def _values(*shape: int, seed: int) -> torch.Tensor:
    """Numbers in [-1, 1) that are exact in float32, from integer arithmetic alone."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((index + 7919 * seed) * 40503 % 65536).float() / 32768 - 1).reshape(shape)


def _digest(Hq, Hkv, Sq, Skv, D, Dv, **options) -> str:
    q = _values(1, Hq, Sq, D, seed=1).requires_grad_()
    k = _values(1, Hkv, Skv, D, seed=2).requires_grad_()
    v = _values(1, Hkv, Skv, Dv, seed=3).requires_grad_()
    out, lse = lockstep.attention(q, k, v, scale=1.0, return_lse=True, **options)
    dout, dlse = _values(*out.shape, seed=4), _values(*lse.shape, seed=5)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    digest = hashlib.sha256()
    for tensor in (out, lse, *gradients):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_published_ones(name):
    options, expected = CASES[name]
    assert _digest(**options) == expected
