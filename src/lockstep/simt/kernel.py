"""`@simt.kernel`: from a function to something that can be specialised and launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .function import KernelFunction
from .launch import Launch
from .scope import Device


class Kernel(KernelFunction):
    """A SIMT kernel. Made by `@simt.kernel`.

    Subscript with the launch configuration and call, as in numba::

        trace = add[grid, block](x, y, out, n)

    `grid` and `block` are integers or tuples of up to three; a third entry gives the bytes of
    dynamic shared memory. Arguments in host memory run on the machine and return a `Trace`.
    """

    def __getitem__(self, configuration: Any) -> Any:
        return Launch(self, configuration)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"give a launch configuration: {self.__name__}[grid, block](...)")


def kernel(function: Callable) -> Kernel:
    """Mark a function as a SIMT kernel.

    Parameters are annotated with types of the language (`x: float32[:]`, `n: int32`), with
    `simt.Constant` for values known at compile time, or not at all: then the argument decides.

    >>> @simt.kernel                                         # doctest: +SKIP
    ... def double(x: float32[:], n: int32):
    ...     i = cuda.grid(1)
    ...     if i < n:
    ...         x[i] = 2.0 * x[i]
    >>> trace = double[4, 128](array, 512)                   # doctest: +SKIP
    """
    return Kernel(function)


def device(function: Callable) -> Device:
    """Mark a function that kernels may call; it is inlined at each call.

    It may take arrays and fragments, and returns a value at its end or from the arms of an `if`.
    """
    return Device(function)
