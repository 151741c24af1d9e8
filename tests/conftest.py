from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Test modules are imported one by one; this lets them share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))

# Files that take most of the time of a whole run: kernels in Triton's interpreter, kernels compiled
# for GPUs, problems drawn by the hundred.
SLOW = {
    "test_bad_metadata_interpreter.py",
    "test_cpu_constant_time.py",
    "test_cpu_hypothesis.py",
    "test_exact.py",
    "test_hopper_backward_build.py",
    "test_hopper_backward_loops.py",
    "test_hopper_backward_wide.py",
    "test_hopper_build.py",
    "test_hopper_versions.py",
    "test_metadata_builds.py",
    "test_spans_interpreter.py",
    "test_triton_backward_builds.py",
    "test_triton_forward_builds.py",
    "test_triton_forward_fits.py",
    "test_triton_interpreter.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
