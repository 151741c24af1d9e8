"""Numbers as text, the same way in every table."""

from __future__ import annotations

# Names of dtypes on a command line and in tables, with PyTorch's.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def number(value: float) -> str:
    """A number as text: up to 9999 as it is, then three digits with k, M or G.

    >>> number(736), number(9216), number(65536)
    ('736', '9216', '65.5k')
    """
    if value < 9999.5:
        return f"{value:.0f}"
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value:.3g}G"


def kilobytes(count: int) -> str:
    """Units of 1024 bytes, with one decimal.

    >>> kilobytes(154560)
    '150.9'
    """
    return f"{count / 1024:.1f}" if count else "–"


def megabytes(count: int) -> str:
    """Units of 1024² bytes, with two decimals up to ten, then three digits or more.

    >>> megabytes(3 * 2**20), megabytes(2505 * 2**20)
    ('3.00', '2505')
    """
    value = count / 1024**2
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Three digits, in µs, ms or s; a dash where there is no time.

    >>> duration(3.14159e-6), duration(0.0123), duration(2.5)
    ('3.14 µs', '12.3 ms', '2.5 s')
    """
    if seconds is None:
        return "–"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        value = seconds / size
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def dtype_name(dtype: object) -> str:
    """The short name of a torch dtype; PyTorch's own where it has none.

    >>> dtype_name("torch.bfloat16")
    'bf16'
    """
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in DTYPES.items() if full == name), name)
