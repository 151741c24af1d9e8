"""How many blocks of a kernel fit on one multiprocessor, and what stops the next one.

The closed form of CUDA's own occupancy calculation: threads, blocks, registers (given to whole
warps in units, from four separate register files) and shared memory (per block, in units, with what
the system keeps for itself) each allow so many blocks, and the smallest number counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cuda_cpp import emit
from .kernel import Kernel
from .launch import extent
from .nvrtc import compile_source
from .types import WARP_SIZE

KB = 1024
REGISTER_UNIT = 256  # registers a warp's share is rounded up to
REGISTER_FILES = 4  # per multiprocessor, one per scheduler
MAX_REGISTERS = 255  # per thread


@dataclass(frozen=True)
class Capability:
    """Limits of one multiprocessor: "Technical Specifications per Compute Capability" in NVIDIA's
    CUDA programming guide; the units are those of cuda_occupancy.h in the CUDA toolkit."""

    arch: str
    threads: int
    blocks: int
    shared: int  # bytes
    shared_per_block: int  # bytes one block may have
    shared_unit: int  # bytes a block's share is rounded up to
    shared_reserved: int  # bytes per block that the system keeps
    registers: int = 64 * KB

    @property
    def warps(self) -> int:
        return self.threads // WARP_SIZE


@dataclass(frozen=True)
class Gpu:
    """A product: its capability and how many multiprocessors are enabled (datasheets)."""

    name: str
    capability: Capability
    multiprocessors: int


TURING = Capability("sm_75", 1024, 16, 64 * KB, 64 * KB, 256, 0)
AMPERE = Capability("sm_80", 2048, 32, 164 * KB, 163 * KB, 128, KB)
ADA = Capability("sm_89", 1536, 24, 100 * KB, 99 * KB, 128, KB)
HOPPER = Capability("sm_90", 2048, 32, 228 * KB, 227 * KB, 128, KB)
BLACKWELL = Capability("sm_100", 2048, 32, 228 * KB, 227 * KB, 128, KB)

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", TURING, 40),
        Gpu("A100", AMPERE, 108),
        Gpu("RTX 4090", ADA, 128),
        Gpu("L4", ADA, 58),
        Gpu("L40S", ADA, 142),
        Gpu("H100", HOPPER, 132),
        Gpu("H200", HOPPER, 132),
        Gpu("B200", BLACKWELL, 148),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps of one kernel that live on a multiprocessor at the same time."""

    gpu: str
    threads: int  # per block
    registers: int  # per thread
    shared: int  # bytes per block, static and dynamic
    limits: dict[
        str, int
    ]  # blocks each resource allows: "threads", "blocks", "registers", "shared"
    max_warps: int  # of the multiprocessor

    @property
    def blocks(self) -> int:
        """Blocks per multiprocessor."""
        return min(self.limits.values())

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that leave no room for one block more."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)

    @property
    def warps(self) -> int:
        return self.blocks * -(-self.threads // WARP_SIZE)

    @property
    def share(self) -> float:
        """Warps present, of the warps a multiprocessor can hold."""
        return self.warps / self.max_warps

    def __str__(self) -> str:
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return (
            f"{self.gpu}: {blocks} of {self.threads} threads per multiprocessor, "
            f"{self.warps} of {self.max_warps} warps ({self.share:.0%}), limited by "
            f"{' and '.join(self.limited_by)} ({self.registers} registers per thread, "
            f"{self.shared} bytes of shared memory per block)"
        )


def occupancy(
    kernel: Kernel,
    gpu: str,
    block: int | tuple[int, ...],
    dynamic_bytes: int = 0,
    **arguments: Any,
) -> Occupancy:
    """Occupancy of `kernel` in blocks of shape `block`, registers taken from the compiled code.

    `gpu` is a key of `GPUS`; `arguments` are those of `Kernel.typed`: constants, and types where
    the kernel does not declare them. Needs no GPU.

    >>> print(occupancy(transpose, "H200", (32, 8), PAD=1))  # doctest: +SKIP

    Raises ValueError for an unknown GPU or a block it cannot run, and what compiling raises.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}, takes one of {', '.join(GPUS)}")
    x, y, z = extent(block, "block")
    threads = x * y * z
    source = emit(kernel.typed(**arguments), threads=threads)
    compiled = compile_source(source, GPUS[gpu].capability.arch)
    resources = compiled.resources
    shared = resources.static_shared + source.hidden_shared + dynamic_bytes
    return fit(gpu, threads, resources.registers, shared)


def fit(gpu: str, threads: int, registers: int, shared: int) -> Occupancy:
    """Occupancy from the figures of a kernel: threads and bytes per block, registers per thread.

    >>> fit("H200", threads=256, registers=64, shared=0).blocks
    4

    Raises ValueError where one block is more than the GPU can run.
    """
    has = GPUS[gpu].capability
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads}; a block has 1 to 1024")
    if not 0 <= registers <= MAX_REGISTERS:
        raise ValueError(f"registers is {registers}; a thread has at most {MAX_REGISTERS}")
    if not 0 <= shared <= has.shared_per_block:
        raise ValueError(
            f"a block takes {shared:,} bytes of shared memory; {gpu} has {has.shared_per_block:,} "
            "for a block"
        )
    warps = -(-threads // WARP_SIZE)
    limits = {"threads": has.warps // warps, "blocks": has.blocks}
    if registers:
        limits["registers"] = _by_registers(has, warps, registers)
    if shared:
        limits["shared"] = _by_shared(has, shared)
    return Occupancy(gpu, threads, registers, shared, limits, has.warps)


def _by_registers(has: Capability, warps: int, registers: int) -> int:
    per_warp = _round_up(registers * WARP_SIZE, REGISTER_UNIT)
    # the launch check takes the warps to be spread evenly over the register files
    if per_warp * _round_up(warps, REGISTER_FILES) > has.registers:
        return 0
    return has.registers // REGISTER_FILES // per_warp * REGISTER_FILES // warps


def _by_shared(has: Capability, shared: int) -> int:
    taken = _round_up(shared + has.shared_reserved, has.shared_unit)
    return has.shared // taken


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
