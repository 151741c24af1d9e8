"""Exact attention for PyTorch: fast, bitwise reproducible, see-through."""

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
