"""Back end 2: a typed kernel as the CUDA C++ a person would have written.

>>> from lockstep.simt.cuda_cpp import emit
>>> print(emit(kernel.typed(TILE=32)).text)                  # doctest: +SKIP
"""

from .emit import CLOCKS, Argument, CudaSource, Layout, emit, phases

__all__ = ["CLOCKS", "Argument", "CudaSource", "Layout", "emit", "phases"]
