"""The CPU path as processors have it whose vectors hold fewer numbers than those of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.kernels.cpu.compiler.vectors import WIDTH

CALLS = """
import sys
import llvmlite.binding as llvm

host, missing = llvm.get_host_cpu_features, sys.argv[2].split()

def without():
    features = host()
    for name in features:
        features[name] = features[name] and not name.startswith(tuple(missing))
    return features

llvm.get_host_cpu_features = without

import torch, lockstep
from lockstep.kernels.cpu.compiler import vectors
from torch.nn.functional import scaled_dot_product_attention

assert vectors.WIDTH == int(sys.argv[1])
for Sq in (2, 63):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (torch.randn(1, 2, n, 40).to(dtype) for n in (Sq, 300, 300))
        expected = scaled_dot_product_attention(q.double(), k.double(), v.double()).to(dtype)
        torch.testing.assert_close(lockstep.attention(q, k, v), expected)
"""


@pytest.mark.slow
@pytest.mark.skipif(WIDTH != 16, reason="needs a processor with AVX-512")
@pytest.mark.parametrize(
    ("width", "missing"), [(8, "avx512"), (4, "avx512 avx2 fma f16c")], ids=str
)
def test_results(width, missing):
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    environment.pop("LOCKSTEP_EMULATE_AMX", None)
    command = [sys.executable, "-c", CALLS, str(width), missing + " amx"]
    subprocess.run(command, check=True, env=environment)
