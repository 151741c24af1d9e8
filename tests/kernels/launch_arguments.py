"""What the kernels of a prepared call are launched with, and what is compiled for that, without
launching them."""

from __future__ import annotations

from lockstep.audit.timing.triton_code import Bound, bind, source_of

__all__ = ["Bound", "bind", "source_of"]
