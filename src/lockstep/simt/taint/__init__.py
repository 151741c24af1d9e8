"""Secrets in machine code: which instructions they may reach."""

from .analysis import Leak, find_leaks

__all__ = ["Leak", "find_leaks"]
