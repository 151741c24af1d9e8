from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# Test modules are imported one by one; this lets them share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def keep_builds_in(monkeypatch):
    """`keep_builds_in(name)`: Triton keeps builds below its cache, in a folder of their own: what
    they are made of does not say that they are no whole ones."""
    import triton

    cache = Path(triton.knobs.cache.dir)
    return lambda name: monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / name))


@pytest.fixture
def unassembled(monkeypatch, keep_builds_in):
    """Triton stops at LLVM's code, which says how much shared memory a build takes."""
    from triton.backends.nvidia.compiler import CUDABackend

    def make_ptx(self: object, src: object, metadata: dict[str, object], *_: object) -> str:
        metadata["name"] = "unassembled"
        return ""

    keep_builds_in("unassembled")
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    monkeypatch.setattr(CUDABackend, "make_ptx", make_ptx)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"")


@pytest.fixture
def unlowered(monkeypatch, unassembled, keep_builds_in):
    """Triton stops before LLVM's code, where shared memory has been allocated."""
    from triton.backends.nvidia import compiler

    class Allocated(Exception):
        pass

    def stop(passes: object, *_: object) -> None:
        raise Allocated(passes)

    make_llir = compiler.CUDABackend.make_llir

    def allocate(self: object, src: Any, metadata: dict[str, object], *rest: object) -> str:
        with pytest.raises(Allocated) as stopped:
            make_llir(self, src, metadata, *rest)
        (passes,) = stopped.value.args
        passes.run(src, "allocate")
        metadata["shared"] = src.get_int_attr("ttg.shared")
        return ""

    keep_builds_in("unlowered")
    monkeypatch.setattr(compiler.nvidia.passes.ttgpuir, "add_to_llvmir", stop)
    monkeypatch.setattr(compiler.CUDABackend, "make_llir", allocate)
