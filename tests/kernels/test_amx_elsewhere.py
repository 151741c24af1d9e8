"""The kernel `amx` on machines without AMX: emulated, refused, and compiled for others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lockstep
from lockstep.kernels.cpu import forward
from lockstep.kernels.cpu.compiler import machine, matrix
from lockstep.kernels.cpu.compiler.vectors import WIDTH

ROOT = Path(__file__).parents[2]
XEON = machine.Target("x86_64-unknown-linux-gnu", "sapphirerapids")
ALL = dict.fromkeys(matrix.FEATURES, True)
REFUSALS = {
    "no matrix units": ("Linux", {"amx-tile": True}, "needs a processor with AMX, and Linux"),
    "not Linux": ("Darwin", ALL, "needs a processor with AMX, and Linux"),
    "not allowed": ("Linux", ALL, "the system does not let this process use AMX"),
}

wide = pytest.mark.skipif(WIDTH != 16, reason="needs a processor with AVX-512")
not_emulated = pytest.mark.skipif(matrix.EMULATED, reason="this process emulates AMX")


@pytest.mark.slow
@wide
@not_emulated
@pytest.mark.skipif(matrix.refusal() is None, reason="its tests run as they are")
def test_its_tests_pass_by_emulation():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/kernels/test_amx.py")],
        env={**os.environ, "LOCKSTEP_EMULATE_AMX": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture
def refused(monkeypatch):
    """`refused(system, features)`: such a machine, which lets no process use tiles."""

    def pretend(system: str, features: dict[str, bool]) -> None:
        library = SimpleNamespace(syscall=lambda *_: -1)
        for module, functions in {
            "llvm": {"get_host_cpu_features": lambda: features},
            "platform": {"system": lambda: system},
            "ctypes": {"CDLL": lambda _: library},
        }.items():
            monkeypatch.setattr(matrix, module, SimpleNamespace(**functions))
        monkeypatch.setattr(matrix, "EMULATED", False)
        matrix.refusal.cache_clear()

    yield pretend
    matrix.refusal.cache_clear()


@pytest.mark.parametrize("name", REFUSALS)
def test_why_it_refuses(name, refused):
    *pretended, reason = REFUSALS[name]
    refused(*pretended)
    q = torch.randn(1, 2, 3, 8).bfloat16()
    explanation = lockstep.explain(q, q, q)
    assert explanation.refusals["amx"] == reason
    assert explanation.kernel == "cpu"
    with pytest.raises(NotImplementedError, match=f"amx: {reason}"):
        lockstep.attention(q, q, q, kernel="amx")


@wide
@not_emulated
@pytest.mark.parametrize("kinds", [(True, False), (False, True)], ids=["wide", "narrow"])
def test_code_for_a_processor_with_amx(kinds):
    """Tiles are divided and restored around each kernel; a narrow one multiplies without them."""
    kernel = forward.RUNNERS_WITH_TILES[kinds]
    text = machine.generate_text(kernel.module(XEON.triple), kernel.name, XEON)
    assert text.count("sttilecfg") == 1
    assert text.count("ldtilecfg") == 2
    assert ("tdpbf16ps" in text) == kinds[0]
