"""Occupancy against published figures, and against the driver where there is one."""

from __future__ import annotations

import pytest
import torch

from lockstep.simt.occupancy import GPUS, fit, occupancy
from lockstep.simt.samples import kernels


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        # full occupancy on Hopper and Ampere: 2048 threads at 32 registers
        ("H200", 256, 32, 0, 8, ("threads", "registers")),
        ("H100", 1024, 32, 0, 2, ("threads", "registers")),
        ("A100", 256, 33, 0, 6, ("registers",)),  # 33 registers are given out as 40
        ("A100", 128, 168, 0, 3, ("registers",)),
        # FlashAttention-like blocks: one of 227 KB, two of 100 KB
        ("H200", 384, 168, 227 * 1024, 1, ("registers", "shared")),
        ("H200", 128, 64, 100 * 1024, 2, ("shared",)),
        ("A100", 128, 64, 100 * 1024, 1, ("shared",)),
        # small blocks run into the limit on blocks
        ("H200", 32, 16, 0, 32, ("blocks",)),
        ("RTX 4090", 32, 16, 0, 24, ("blocks",)),
        ("T4", 32, 16, 0, 16, ("blocks",)),
        # Ada holds 1536 threads, Turing 1024
        ("L4", 256, 40, 0, 6, ("threads", "registers")),
        ("L40S", 1024, 32, 0, 1, ("threads",)),
        ("T4", 256, 64, 0, 4, ("threads", "registers")),
        ("T4", 128, 32, 32 * 1024, 2, ("shared",)),
        ("B200", 256, 255, 0, 1, ("registers",)),
    ],
)
def test_known_cases(gpu, threads, registers, shared, blocks, limited_by):
    found = fit(gpu, threads, registers, shared)
    assert found.blocks == blocks
    assert found.limited_by == limited_by


def test_reserved_kilobyte_counts():
    # 228 KB hold four blocks of 56 KB only if the 1 KB the system keeps for each still fits
    assert fit("H200", 128, 32, 56 * 1024).limits["shared"] == 4
    assert fit("H200", 128, 32, 56 * 1024 + 1).limits["shared"] == 3


def test_warps_and_share():
    found = fit("H200", 96, 128, 0)
    assert found.blocks == 5  # 16 warps by registers, three to a block
    assert found.warps == 15
    assert found.share == 15 / 64


def test_a_block_too_large_for_the_registers_fits_nowhere():
    assert fit("H200", 1024, 128, 0).blocks == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 32, 0), "threads is 0"),
        ((1025, 32, 0), "threads is 1025"),
        ((128, 256, 0), "registers is 256"),
        ((128, 32, 228 * 1024), "takes 233,472 bytes"),
    ],
)
def test_what_no_gpu_can_run(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit("H200", *arguments)


def test_unknown_gpu():
    with pytest.raises(ValueError, match="gpu is 'V100', takes one of T4, A100"):
        occupancy(kernels.vector_copy, "V100", 256)


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _needs_nvrtc(self):
        pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")

    @pytest.mark.parametrize("gpu", GPUS)
    def test_registers_come_from_the_compiled_kernel(self, gpu):
        found = occupancy(kernels.transpose, gpu, (32, 8), PAD=1)
        assert found.threads == 256
        assert found.shared == 32 * 33 * 4
        assert 8 < found.registers < 64
        assert found.limited_by == ("threads",)
        assert found.share == 1.0

    def test_dynamic_shared_memory_counts(self):
        assert occupancy(kernels.reverse_dynamic, "H200", 128).blocks == 16
        assert occupancy(kernels.reverse_dynamic, "H200", 128, 100 * 1024).blocks == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_against_the_driver():
    from lockstep.simt import gpu
    from lockstep.simt.cuda_cpp import emit
    from lockstep.simt.nvrtc import compile_source

    name = next((n for n in GPUS if n in torch.cuda.get_device_name()), None)
    if name is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the table")
    arch = GPUS[name].capability.arch
    for threads in (32, 96, 128, 256, 384, 1024):
        for dynamic in (0, 1000, 17 * 1024, 56 * 1024, 90 * 1024):
            typed = kernels.reverse_dynamic.typed()
            compiled = compile_source(emit(typed, threads=threads), arch)
            if dynamic > GPUS[name].capability.shared_per_block:
                continue
            function = gpu.load(compiled, torch.cuda.current_device(), dynamic)
            driver = function.occupancy.max_active_blocks_per_multiprocessor(threads, dynamic)
            ours = fit(name, threads, compiled.resources.registers, dynamic)
            assert ours.blocks == driver, (threads, dynamic, ours)
