"""CUDA C++ to machine code with NVRTC. Needs no GPU, only the packages of the extra `gpu`."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from .cuda_cpp import CudaSource
from .errors import SimtError

HEADERS = ("cudart", "nvcc", "cccl")  # cuda_fp16.h and mma.h, crt/mma.h, nv/target
_DIAGNOSTIC = re.compile(r"^\S+?\((\d+)\): (?:error|catastrophic error|warning)")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(SimtError):
    """NVRTC refused the emitted code. The message holds its log with the Python lines beside."""


@dataclass(frozen=True)
class Resources:
    """The registers and memory of one thread, or one block, of a compiled kernel."""

    registers: int  # per thread
    stack: int  # bytes per thread
    spill_stores: int  # bytes per thread
    spill_loads: int
    static_shared: int  # bytes per block


@dataclass(frozen=True)
class Compiled:
    """A kernel in machine code for one architecture."""

    source: CudaSource
    arch: str
    cubin: bytes
    log: str

    @cached_property
    def resources(self) -> Resources:
        """Registers, spills and shared memory, as the assembler reported them."""
        registers, spills = _REGISTERS.search(self.log), _SPILLS.search(self.log)
        if registers is None or spills is None:
            raise SimtError(f"no resource report in the compiler's log:\n{self.log}")
        shared = _SHARED.search(self.log)
        stack, stores, loads = (int(n) for n in spills.groups())
        return Resources(int(registers[1]), stack, stores, loads, int(shared[1]) if shared else 0)


def compile_source(source: CudaSource, arch: str = "sm_90", contract: bool = True) -> Compiled:
    """Compile emitted CUDA C++ for `arch`, with line information.

    `contract` lets the compiler fuse `a * b + c` into one rounding; without it the result has the
    machine's bits. What was compiled once stays in memory and in the user's cache directory.

    >>> compile_source(emit(transpose.typed(TILE=32)), "sm_80").resources  # doctest: +SKIP

    Raises `CompileError` with the compiler's log, ValueError for an unknown architecture, and
    ImportError where the extra `gpu` is not installed.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch is {arch!r}, takes a name such as 'sm_80' or 'sm_90'")
    return _compile(source, arch, contract)


@lru_cache(maxsize=512)
def _compile(source: CudaSource, arch: str, contract: bool) -> Compiled:
    key = hashlib.sha256(
        "\0".join((source.text, arch, str(contract), nvrtc_version())).encode()
    ).hexdigest()
    stored = cache_directory() / f"{key}.cubin"
    log_file = stored.with_suffix(".log")
    try:
        return Compiled(source, arch, stored.read_bytes(), log_file.read_text())
    except OSError:
        pass
    compiled = _run_nvrtc(source, arch, contract)
    _store(log_file, compiled.log.encode())
    _store(stored, compiled.cubin)
    return compiled


def _run_nvrtc(source: CudaSource, arch: str, contract: bool) -> Compiled:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{source.name}.cu",
        arch=arch,
        std="c++17",
        fma=contract,
        lineinfo=True,
        ptxas_options="-v",
        include_path=list(header_directories()),
        no_cache=True,  # NVRTC's own cache gives no resource report back
    )
    log = io.StringIO()
    try:
        cubin = Program(source.text, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        if "NVRTC" not in type(error).__name__:
            raise
        raise CompileError(explain(source, str(error))) from None
    return Compiled(source, arch, bytes(cubin), log.getvalue().rstrip("\0\n "))


def explain(source: CudaSource, log: str) -> str:
    """The compiler's log, with the Python line behind every diagnostic."""
    explained = [f"NVRTC cannot compile kernel '{source.name}':"]
    for line in log.splitlines():
        explained.append(line)
        found = _DIAGNOSTIC.match(line)
        at = int(found[1]) - 1 if found else -1
        loc = source.lines[at] if 0 <= at < len(source.lines) else None
        if loc is not None:
            explained.append(f"  from {loc.file}:{loc.line}: {loc.text.strip()}")
    return "\n".join(explained)


@lru_cache(maxsize=1)
def header_directories() -> tuple[str, ...]:
    """Where CUDA's headers lie: in the pip packages, or in a toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(name) for name in HEADERS]
    return tuple(dict.fromkeys(path for path in found if path))


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Major and minor version of the compiler."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def cache_directory() -> Path:
    """Where machine code is kept: `$LOCKSTEP_CACHE`, or lockstep/ in the user's cache."""
    chosen = os.environ.get("LOCKSTEP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def _store(path: Path, data: bytes) -> None:
    """Write in one step, so that no other process sees half a file. A cache that cannot be
    written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return
