"""How this package is compiled: native entry points, built on first use, kept on disk."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import llvmlite.binding as llvm
from numba.core.compiler_lock import global_compiler_lock

from lockstep import forks
from lockstep.kernels.compiled import note
from lockstep.kernels.cpu.compiler import machine, store
from lockstep.kernels.cpu.compiler.entry import entry_of
from lockstep.kernels.cpu.compiler.lowering import Lowered, Part, lower

compiled = Part
"""Decorates a part of a kernel, which is compiled with the kernel that calls it."""
inlined = partial(Part, forceinline=True)
"""Decorates a part that was measured to be faster inside its caller; LLVM would leave it out."""

# Compiling for longer than this many seconds prints a message.
PATIENCE = 2.0
# Beside the one in which numba works.
LLVM_THREADS = 2

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
    if not (_told or forks.forked):
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
        self,
        function: Callable[[int], None],
        name: str | None = None,
        *,
        flush: bool = False,
        tiles: bool = False,
    ) -> None:
        """With ``flush``, the function treats subnormal numbers as zero; with ``tiles``, it has the
        tile registers of AMX."""
        self._function, self._flush, self._tiles = function, flush, tiles
        self._address: int | None = None
        self.name = f"{function.__module__.rpartition('.')[2]}.{name or function.__name__}"
        self.__doc__ = function.__doc__

    @property
    def address(self) -> int:
        """Where the machine code lies; compiled or loaded from disk when first asked for."""
        if self._address is None:
            self._find()
        assert self._address is not None
        return self._address

    def _find(self) -> None:
        with _compiling, global_compiler_lock:
            if self._address is None:
                code = store.read(self.name)
                self.load(_compile_once([self])[0] if code is None else code)

    @property
    def is_ready(self) -> bool:
        """Whether it is in memory."""
        return self._address is not None

    def load(self, code: bytes) -> None:
        """Take machine code for its own."""
        note(self.name)
        self._address = machine.load(code, self.name)

    def lowered(self) -> Lowered:
        """What LLVM gets of it, but for the entry."""
        return lower(self._function)

    def module(self, triple: str, lowered: Lowered | None = None) -> llvm.ModuleRef:
        """The LLVM module for a kind of machine as LLVM names it, in a context of its own; not
        optimised yet."""
        lowered, context = lowered or self.lowered(), llvm.create_context()
        module = lowered.module(context)
        entry = entry_of(self.name, lowered.name, triple, self._flush, self._tiles)
        module.link_in(llvm.parse_assembly(entry, context))
        return module

    def generate(self, lowered: Lowered) -> bytes:
        """Its machine code: LLVM's part of the work, which any thread may do."""
        return machine.generate(self.module(machine.triple(), lowered), self.name)

    @cached_property
    def _call(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def __call__(self, arguments: int) -> None:
        """Run it here, with the interpreter lock released."""
        self._call(arguments)


def have_ready(kernels: Sequence[Kernel]) -> None:
    """Compile kernels that are neither in memory nor on disk, in less time than one by one: while
    LLVM is at work on some, numba lowers others. Those that LLVM has most to do for come first."""
    if all(kernel.is_ready for kernel in kernels):
        return
    with _compiling, global_compiler_lock:
        missing = [x for x in kernels if not x.is_ready and store.read(x.name) is None]
        for kernel, code in zip(missing, _compile_once(missing), strict=True):
            kernel.load(code)


def _compile_once(kernels: Sequence[Kernel]) -> list[bytes]:
    """The code of kernels, compiled here unless another process does so first."""
    if not kernels:
        return []
    with store.one_process_at_a_time(), _patiently(), ThreadPoolExecutor(LLVM_THREADS) as pool:
        codes = []
        for kernel in kernels:
            code = store.read(kernel.name)
            codes.append(code or _begin(pool, kernel))
        return [_finish(*pair) for pair in zip(kernels, codes, strict=True)]


def _begin(pool: ThreadPoolExecutor, kernel: Kernel) -> Future[bytes]:
    """Its code, from one of the threads, or from this one where there are none: at exit."""
    lowered = kernel.lowered()
    try:
        return pool.submit(kernel.generate, lowered)
    except RuntimeError:
        done: Future[bytes] = Future()
        done.set_result(kernel.generate(lowered))
        return done


def _finish(kernel: Kernel, code: bytes | Future[bytes]) -> bytes:
    if isinstance(code, Future):
        code = code.result()
        store.write(kernel.name, code)
    return code


def kernel(function: Callable[[int], None]) -> Any:
    """Make a :class:`Kernel` of a function of one address."""
    return Kernel(function)
