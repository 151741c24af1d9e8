"""Kernels as machine code, and the leaks in it: as the audit has them."""

from __future__ import annotations

from lockstep.audit.timing.triton_code import PUBLIC, compile_bound, leaks_of, parameters_of

__all__ = ["PUBLIC", "compile_bound", "leaks_of", "parameters_of"]
