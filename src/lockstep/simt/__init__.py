"""SIMT kernels in plain Python: one source, checked once, run on a laptop or a GPU.

>>> from lockstep import simt
>>> from lockstep.simt import cuda, float32, int32
"""

from .errors import HazardError, SecretLeak, SimtError, UnsupportedConstruct
from .kernel import Kernel, device, kernel
from .language import Constant, Secret, ct, cuda, phase, wmma
from .occupancy import occupancy
from .types import bfloat16, bool_, float16, float32, int32, uint32

__all__ = [
    "Constant",
    "HazardError",
    "Kernel",
    "Secret",
    "SecretLeak",
    "SimtError",
    "UnsupportedConstruct",
    "bfloat16",
    "bool_",
    "ct",
    "cuda",
    "device",
    "float16",
    "float32",
    "int32",
    "kernel",
    "occupancy",
    "phase",
    "uint32",
    "wmma",
]


def __getattr__(name: str) -> object:
    # the machine brings NumPy along; kernels can be written and checked without it
    if name in ("Trace", "Hazard"):
        from . import machine

        return getattr(machine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
