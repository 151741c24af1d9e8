"""How numba compiles this package: native entry points, built on first use, kept on disk.

numba's own cache looks only at the file a kernel stands in; ours spread over several files, so
the cache is keyed by all of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

# No reference counting: kernels hold no Python or numba objects, only addresses.
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}

# Parts are never called from Python: without wrappers they compile in two thirds of the time.
compiled = njit(**OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For parts of a kernel: compiled with the kernel that calls them."""

_compiling = threading.Lock()


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Cache(FunctionCache):
    """numba's cache of machine code, with our stamp, and quicker to load from."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = _fingerprint()

    def load_overload(self, signature: Any, context: Any) -> Any:
        # numba would first set up all it needs to compile, which takes half a second;
        # finished machine code needs none of it.
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, context)


class Kernel:
    """A native function ``void(int64 arguments)`` that any thread may run, without Python."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Where the machine code lies; compiled or loaded from disk when first asked for."""
        with _compiling:
            native = CFunc(self._function, ((types.int64,), types.void), {}, OPTIONS)
            native._cache = _Cache(self._function)
            native.compile()
            # The code lives as long as this object does.
            self._native = native
            return native.address

    @cached_property
    def _call(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def __call__(self, arguments: int) -> None:
        """Run it here, with the interpreter lock released."""
        self._call(arguments)


def kernel(function: Callable[[int], None]) -> Any:
    """Make a :class:`Kernel` of a function of one address."""
    return Kernel(function)
