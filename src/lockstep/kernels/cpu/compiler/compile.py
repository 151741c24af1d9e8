"""How this package is compiled: native entry points, built on first use, kept on disk."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import llvmlite.binding as llvm
from numba.core.compiler_lock import global_compiler_lock

from lockstep.kernels.compiled import note
from lockstep.kernels.cpu.compiler import machine, processes, store
from lockstep.kernels.cpu.compiler.entry import entry_of
from lockstep.kernels.cpu.compiler.lowering import Part, lower

compiled = Part
"""Decorates a part of a kernel, which is compiled with the kernel that calls it."""
inlined = partial(Part, forceinline=True)
"""Decorates a part that was measured to be faster inside its caller; LLVM would leave it out."""

# Compiling for longer than this many seconds prints a message.
PATIENCE = 2.0

_compiling = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child would wait for ever for a lock that a thread of its parent held.
    os.register_at_fork(
        before=_compiling.acquire,
        after_in_child=_compiling.release,
        after_in_parent=_compiling.release,
    )

_told = False


def _tell() -> None:
    global _told
    if not _told and sys.stderr is not None:
        _told = True
        print(
            "lockstep: compiling the CPU kernels for this machine, a matter of seconds",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _patiently() -> Iterator[None]:
    """Tell the user, once, if this takes long; a forked child leaves that to its parent."""
    timer = threading.Timer(PATIENCE, _tell)
    timer.daemon = True
    if not (_told or processes.forked):
        timer.start()
    # Types and instructions by the hundred thousand, all of them alive: nothing to collect.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        timer.cancel()
        if collecting:
            gc.enable()


class Kernel:
    """A native function ``void(int64 arguments)`` that any thread may run, without Python."""

    def __init__(
        self, function: Callable[[int], None], name: str | None = None, *, flush: bool = False
    ) -> None:
        """With ``flush``, the function treats subnormal numbers as zero."""
        self._function, self._flush = function, flush
        self.name = f"{function.__module__.rpartition('.')[2]}.{name or function.__name__}"
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Where the machine code lies; compiled or loaded from disk when first asked for."""
        with _compiling, global_compiler_lock:
            code = store.read(self.name) or self._compile_once()
            note(self.name)
            return machine.load(code, self.name)

    def _compile_once(self) -> bytes:
        """The code, compiled here unless another process does so first."""
        with store.one_process_at_a_time(), _patiently():
            code = store.read(self.name)
            if code is None:
                code = self._compile()
                store.write(self.name, code)
            return code

    def _compile(self) -> bytes:
        return machine.generate(self.module(machine.triple()), self.name)

    def module(self, triple: str) -> llvm.ModuleRef:
        """The LLVM module for a kind of machine as LLVM names it; not optimised yet."""
        module, function = lower(self._function)
        module.link_in(llvm.parse_assembly(entry_of(self.name, function, triple, self._flush)))
        return module

    @cached_property
    def _call(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def __call__(self, arguments: int) -> None:
        """Run it here, with the interpreter lock released."""
        self._call(arguments)


def kernel(function: Callable[[int], None]) -> Any:
    """Make a :class:`Kernel` of a function of one address."""
    return Kernel(function)
