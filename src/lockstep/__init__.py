"""Exact attention for PyTorch: fast, bitwise reproducible, see-through."""

from importlib import import_module
from typing import Any

from lockstep import reference
from lockstep.api import attention, attention_paged, attention_varlen, explain, merge
from lockstep.builds import warm_up

__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "explain",
    "merge",
    "reference",
    "warm_up",
]

# `import lockstep` is enough for these; each is imported when it is first named.
_PACKAGES = ("audit", "distributed", "flash_attn", "integrations", "simt")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PACKAGES])
