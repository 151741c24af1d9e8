"""What the kernels of a prepared call are launched with, without launching them."""

from __future__ import annotations

from lockstep.audit.timing.triton_code import Bound, bind

__all__ = ["Bound", "bind"]
