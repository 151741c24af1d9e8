from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Test modules are imported one by one; this lets them share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
