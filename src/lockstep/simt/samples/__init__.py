"""Small kernels with their launches, for the tests and the comparison with hardware.

Arguments are torch tensors in host memory, so that one set serves the machine and, copied, a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.simt.kernel import Kernel

from . import kernels as k

if TYPE_CHECKING:
    import torch

N = 8192
COLS = 320


@dataclass(frozen=True)
class Sample:
    """A kernel with a launch. `make` draws its arguments; `outputs` are the arrays to compare, bit
    for bit where there is no tolerance."""

    name: str
    kernel: Kernel
    grid: Any
    block: Any
    outputs: tuple[str, ...]
    make: Callable[[torch.Generator], dict[str, Any]] = field(repr=False)
    dynamic_bytes: int = 0
    tolerance: float = 0.0  # relative to the largest value
    why: str = ""  # there is a tolerance
    differs: str = ""  # why a GPU's counters are known to differ from the machine's

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Fresh arguments by name."""
        import torch

        return self.make(torch.Generator().manual_seed(seed))


def _normal(g: torch.Generator, *shape: int, dtype: str = "float32") -> torch.Tensor:
    import torch

    return torch.randn(*shape, generator=g).to(getattr(torch, dtype))


def _integers(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    import torch

    return torch.randint(low, high, shape, generator=g).to(torch.int32)


def _quarters(g: torch.Generator, *shape: int, dtype: str) -> torch.Tensor:
    """Multiples of 1/4 up to 2: their products add up without rounding, in any order."""
    import torch

    return (torch.randint(-8, 9, shape, generator=g) / 4).to(getattr(torch, dtype))


def _poison(*shape: int, dtype: str = "float32") -> torch.Tensor:
    """An output to be: NaN, or a number that no kernel here writes."""
    import torch

    kind = getattr(torch, dtype)
    return torch.full(shape, float("nan") if kind.is_floating_point else 123456789, dtype=kind)


def _zeros(*shape: int) -> torch.Tensor:
    import torch

    return torch.zeros(shape, dtype=torch.int32)


def _copy(stride: int) -> Sample:
    return Sample(
        f"copy, stride {stride}",
        k.strided_copy,
        N // 256,
        256,
        ("y",),
        lambda g: {"x": _normal(g, N * stride), "y": _poison(N), "n": N - 5, "STRIDE": stride},
    )


def _transpose(pad: int) -> Sample:
    return Sample(
        f"transpose, {'padded' if pad else 'not padded'}",
        k.transpose,
        (3, 4),
        (k.TILE, k.ROWS),
        ("y",),
        lambda g: {"x": _normal(g, 128, 96), "y": _poison(96, 128), "PAD": pad},
    )


def _tree(neighbours: bool) -> Sample:
    return Sample(
        f"tree sum, {'neighbours' if neighbours else 'halves'}",
        k.tree_sum,
        N // k.THREADS,
        k.THREADS,
        ("partial",),
        lambda g: {
            "x": _normal(g, N),
            "partial": _poison(N // k.THREADS),
            "NEIGHBOURS": neighbours,
        },
    )


def _matmul(name: str, dtype: str, draw: Callable, tolerance: float = 0.0, why: str = "") -> Sample:
    import lockstep.simt.types as types

    return Sample(
        name,
        k.matmul,
        (2, 3),
        128,
        ("c",),
        lambda g: {
            "a": draw(g, 96, 64, dtype=dtype),
            "b": draw(g, 64, 64, dtype=dtype),
            "c": _poison(96, 64),
            "K": 64,
            "DTYPE": getattr(types, dtype),
        },
        tolerance=tolerance,
        why=why,
    )


def _async_copy(width: int, stride: int) -> Sample:
    return Sample(
        f"async copy, {4 * width} bytes" + (f", every {4 * stride}" if stride != width else ""),
        k.async_copy,
        2,
        k.THREADS,
        ("y",),
        lambda g: {
            "x": _normal(g, 2 * k.THREADS * width),
            "y": _poison(2 * k.THREADS * width),
            "WIDTH": width,
            "STRIDE": stride,
        },
        differs="a sector is fetched once for each half that goes to another place"
        if stride != width
        else "",
    )


SAMPLES: tuple[Sample, ...] = (
    _copy(1),
    _copy(2),
    _copy(9),
    Sample(
        "copy, shifted",
        k.shifted_copy,
        N // 256,
        256,
        ("y",),
        lambda g: {"x": _normal(g, N + 3), "y": _poison(N), "n": N, "SHIFT": 3},
    ),
    Sample(
        "vector copy",
        k.vector_copy,
        N // 1024,
        256,
        ("y",),
        lambda g: {"x": _normal(g, N), "y": _poison(N), "n": N},
    ),
    Sample(
        "half vectors",
        k.half_vector_scale,
        N // 1024,
        128,
        ("y",),
        lambda g: {
            "x": _normal(g, N, dtype="float16"),
            "y": _poison(N, dtype="float16"),
            "factor": 1.7,
        },
    ),
    Sample(
        "transpose, naive",
        k.transpose_naive,
        (3, 4),
        (k.TILE, k.ROWS),
        ("y",),
        lambda g: {"x": _normal(g, 128, 96), "y": _poison(96, 128)},
    ),
    _transpose(0),
    _transpose(1),
    _tree(True),
    _tree(False),
    Sample(
        "shuffles",
        k.shuffle_sum,
        16,
        128,
        ("sums", "scan"),
        lambda g: {"x": _normal(g, 2048), "sums": _poison(64), "scan": _poison(2048)},
    ),
    Sample(
        "votes",
        k.votes,
        16,
        128,
        ("out", "counts"),
        lambda g: {
            "x": _integers(g, 0, 1000, 2048),
            "out": _poison(2048, dtype="uint32"),
            "counts": _poison(2048, dtype="int32"),
        },
    ),
    Sample(
        "divergent loops",
        k.collatz,
        8,
        128,
        ("steps",),
        lambda g: {"start": _integers(g, 1, 3000, 1024), "steps": _poison(1024, dtype="int32")},
    ),
    Sample(
        "histogram",
        k.histogram,
        4,
        128,
        ("bins",),
        lambda g: {"x": _integers(g, 0, 10000, N), "bins": _zeros(64), "n": N, "BINS": 64},
    ),
    Sample(
        "arithmetic",
        k.arithmetic,
        8,
        128,
        ("out", "bits"),
        lambda g: {
            "x": _normal(g, 1024),
            "k": _integers(g, -1000, 1000, 1024),
            "out": _poison(1024),
            "bits": _poison(1024, dtype="int32"),
        },
    ),
    Sample(
        "oblivious maximum",
        k.oblivious_max,
        4,
        64,
        ("out", "where"),
        lambda g: {
            "x": _normal(g, 256, 40),
            "out": _poison(256),
            "where": _poison(256, dtype="int32"),
        },
    ),
    Sample(
        "sort in registers",
        k.local_sort,
        8,
        64,
        ("y",),
        lambda g: {"x": _integers(g, -99, 99, 2048), "y": _poison(2048, dtype="int32")},
    ),
    _matmul("matmul, fp16", "float16", _quarters),
    _matmul("matmul, bf16", "bfloat16", _quarters),
    _matmul(
        "matmul, fp16, rounding",
        "float16",
        _normal,
        2e-6,
        "tensor cores add 16 products in an order and precision of their own",
    ),
    _async_copy(1, 1),
    _async_copy(2, 2),
    _async_copy(4, 4),
    _async_copy(4, 8),
    Sample(
        "async pipeline",
        k.pipeline_sum,
        2,
        k.THREADS,
        ("out",),
        lambda g: {"x": _normal(g, 9, 2048), "out": _poison(512), "n": 9},
    ),
    Sample(
        "softmax",
        k.softmax,
        24,
        32,
        ("y",),
        lambda g: {"x": _normal(g, 24, COLS), "y": _poison(24, COLS), "COLS": COLS},
        tolerance=1e-6,
        why="CUDA's expf and NumPy's differ in the last bit",
    ),
    Sample(
        "all shared memory",
        k.reverse_dynamic,
        2,
        512,
        ("y",),
        lambda g: {
            "x": _integers(g, -(2**30), 2**30, 2 * 50000),
            "y": _poison(2 * 50000, dtype="int32"),
            "n": 50000,
        },
        dynamic_bytes=200000,
    ),
)
