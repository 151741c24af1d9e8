from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test modules are imported one by one; this lets them share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def unassembled(monkeypatch, tmp_path):
    """Triton stops before machine code, in a cache of its own: such builds are of no other use."""
    from triton.backends.nvidia.compiler import CUDABackend

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
