"""The lockstep machine: a whole grid at a time, in NumPy, with every check and counter on."""

from .grid import run
from .hazards import Hazard
from .records.trace import Trace

__all__ = ["Hazard", "Trace", "run"]
