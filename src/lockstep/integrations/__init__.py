"""Lockstep inside other libraries: one module each. Importing one changes nothing yet."""

from importlib import import_module
from typing import Any

# Each is imported when it is first named: some import the library that they are for.
_MODULES = ("hub", "sdpa", "sglang", "torchtitan", "transformers", "vllm")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
