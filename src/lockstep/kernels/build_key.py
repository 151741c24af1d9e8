"""What a compiled kernel depends on: its arguments, and the key under which Triton keeps it on disk
in every process.

The key covers the constants that a kernel and the functions it calls take from their modules.
Triton 3.6 asks a called function for its constants before it has looked for them, so it misses
them unless another kernel has called the same function before: the key of a kernel depends on what
ran earlier in the process, and a process may compile what another one has left on disk. Here the
called functions are looked at first.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from torch import Tensor
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


def kind_of(argument: Any, any_address: bool) -> Any:
    """The properties of an argument that a compiled kernel depends on: the type of a number and
    whether 32 bits hold it, and for a tensor the dtype and whether its address is a multiple of 16
    bytes, unless it may be any."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype, any_address or argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, *argument.block_shape
    return type(argument), -(1 << 31) <= argument < 1 << 31
