"""The key under which Triton keeps a compiled kernel on disk, the same in every process.

The key covers the constants that a kernel and the functions it calls take from their modules.
Triton 3.6 asks a called function for its constants before it has looked for them, so it misses
them unless another kernel has called the same function before: the key of a kernel depends on what
ran earlier in the process, and a process may compile what another one has left on disk. Here the
called functions are looked at first.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from triton.runtime.jit import DependenciesFinder

_LOCK = Lock()
_update_hash = DependenciesFinder._update_hash


def fix_key(kernel: Any) -> None:
    """Works out the key of a kernel, unless it has been worked out before."""
    if kernel.hash is not None:
        return
    with _LOCK:
        # Only for now: the keys of other libraries stay as they are.
        DependenciesFinder._update_hash = _callee_first
        try:
            _ = kernel.cache_key
        finally:
            DependenciesFinder._update_hash = _update_hash


def _callee_first(self: DependenciesFinder, function: Any) -> None:
    _ = function.cache_key
    _update_hash(self, function)
