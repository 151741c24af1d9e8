"""The environment of a measurement: hardware, versions and the commit of this checkout."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent
PACKAGES = ("lockstep-attention", "torch", "triton", "numba", "llvmlite", "numpy", "cuda-core")

# Vector extensions by LLVM's names, best first.
SIMD = {
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse2": "SSE2",
    "sve2": "SVE2",
    "sve": "SVE",
    "neon": "NEON",
}


@dataclass(frozen=True)
class Hardware:
    """The machine, as far as it matters to a timing."""

    cpu: str
    arch: str
    cores: int
    simd: str
    memory_gb: float
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Commit:
    """The commit of the checkout, and whether tracked files differ from it."""

    hash: str
    dirty: bool


def describe() -> dict[str, Any]:
    """Hardware, versions, threads and commit, ready for JSON."""
    import torch

    commit = current_commit()
    return {
        "hardware": asdict(hardware()),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {name: version for name, version in versions().items() if version},
        "threads": torch.get_num_threads(),
        "commit": asdict(commit) if commit else None,
    }


def hardware() -> Hardware:
    """This machine."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Hardware(
        cpu=_cpu_name(),
        arch=platform.machine(),
        cores=usable_cores(),
        simd=_simd(),
        memory_gb=round(_memory_bytes() / 2**30, 1),
        gpus=tuple(gpus),
    )


def versions() -> dict[str, str | None]:
    """Installed versions by package name, None for what is not installed; Python's among them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def current_commit() -> Commit | None:
    """The commit this package runs from, or None outside a git checkout.

    A copy of a checkout may have come without its history, or with an older one: where
    LOCKSTEP_COMMIT is set, it says what the copy is of, with `-dirty` after it if the tree was
    changed (`git describe --always --abbrev=40 --exclude='*' --dirty` prints just that).
    """
    copied = os.environ.get("LOCKSTEP_COMMIT")
    if copied:
        return Commit(copied.removesuffix("-dirty"), dirty=copied.endswith("-dirty"))
    head = _output("git", "-C", str(SOURCE), "rev-parse", "HEAD")
    if not head:
        return None
    changed = _output("git", "-C", str(SOURCE), "status", "--porcelain", "--untracked-files=no")
    return Commit(head, dirty=bool(changed))


def _cpu_name() -> str:
    """The processor's marketing name: /proc on x86, lscpu on Arm, sysctl on macOS."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    for line in _output("lscpu").splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()


def _simd() -> str:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return next((label for name, label in SIMD.items() if features.get(name)), "none known")


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _output(*command: str) -> str:
    """The output of a command, "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
