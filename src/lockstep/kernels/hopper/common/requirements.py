"""Requirements of every kernel of the Hopper path: the GPU, Gluon, and 16-bit tensors."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from lockstep.kernels.hopper.common.sizes import columns
from lockstep.problem import AttentionProblem

# Head dims are multiples of what the copy engine takes.
HEAD_DIM_STEP, MAX_HEAD_DIM = 8, 256
# The tanh of the kernels is off by a rounding of 1, and so a capped score by that times the cap.
MAX_SOFTCAP = 1024.0
# The copy engine loads so many rows of a page at least.
PAGE_ROWS = 16
# Rows are coordinates of tensor maps, which reach to 2^31, half of it for the length.
MAX_ROWS = 1 << 29
# A dense call has so many keys at least that kernels whose programs share them have an advantage.
LONG = 4096


def has_too_many_rows(problem: AttentionProblem) -> bool:
    """Whether rows of a call are more than tensor maps reach. Keys in pages have places within
    these, however many they are."""
    if problem.is_paged:
        sequences = 1 if problem.is_packed else problem.B
        return sequences * problem.Hq * problem.Sq > MAX_ROWS
    return problem.B * problem.Hq * max(problem.Sq, problem.Skv) > MAX_ROWS


def has_tiles_in_pages(problem: AttentionProblem) -> bool:
    """Whether the forward has tiles of keys out of pages for such heads."""
    return columns(problem.D) == problem.D


@lru_cache(maxsize=1)
def _has_gluon() -> bool:
    if find_spec("triton") is None:
        return False
    return find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def refusal_of_device(problem: AttentionProblem) -> str | None:
    """Why no kernel of the Hopper path runs a problem here; None if some may."""
    if problem.device_type != "cuda":
        return f"runs on CUDA devices, got tensors on {problem.device_type}"
    major, minor = _capability(torch.cuda.current_device())
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0, this device has {major}.{minor}"
    if not _has_gluon():
        return "needs triton 3.6 or newer, with Gluon"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
    return None
