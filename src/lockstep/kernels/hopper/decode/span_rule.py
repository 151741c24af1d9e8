"""How long a span of keys is: on the host, and on the device where the queries are packed.

Both call the same functions, the host by their `fn`, with numbers in place of scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401, the interpreter looks for it beside each function


@triton.jit
def spans_of(tiles, wanted):
    """Into how many spans the keys of a head are cut, if they are many enough; `tiles` are those of
    query rows over all KV heads of a sequence."""
    return max(wanted // tiles, 1)


@triton.jit
def least_of(rows, keys_per_row, least, most):
    """The least keys of a span, a multiple of every tile; `rows` are those of the tallest tile."""
    return min(max((keys_per_row * rows + least - 1) // least * least, least), most)
