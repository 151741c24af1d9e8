"""The block of int64 words that a kernel receives, shared by all threads that run it.

[0] tickets taken   [1] threads that came in   [2] scratch   [3] scratch bytes per thread
[4…] the kernel's own arguments
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.scalar import fetch_add_one, load_word

HEADER = 4


def record_at(dtype: np.dtype) -> Any:
    """A function from an address to the record that lies there."""
    record = from_dtype(dtype)

    @intrinsic
    def at(context, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return builder.inttoptr(values[0], context.get_value_type(record))

        return record(types.int64), codegen

    return at


@compiled
def take_ticket(arguments):
    """The next piece of work: 0, 1, 2, … over all threads."""
    return fetch_add_one(arguments)


@compiled
def enter(arguments):
    """This thread's scratch memory; call once per thread."""
    thread = fetch_add_one(arguments + 8)
    return load_word(arguments + 16) + thread * load_word(arguments + 24)


@compiled
def argument(arguments, i):
    return load_word(arguments + 8 * (HEADER + i))
