"""One attention call as numba sees it: addresses, strides, lengths, options.

All layouts meet here. A sequence ``b`` owns ``q_len[b]`` queries from token ``q_first[b]``
and ``kv_len[b]`` keys from ``kv_first[b]``; dense tensors step by a batch stride, packed ones
by their first token, paged ones through a page table. The query rows that share a KV head are
numbered ``row = g · q_len + q_idx``, g being the head's place in its group.

Kernels that take a call exist twice (``variants``). In a constant-time build the values of tensors
reach no branch and no address. What may be secret there is a float, or an integer that is loaded
with 32 bits; what steers a kernel, addresses and numbers of rows and keys, has 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lockstep.kernels.cpu.call.arguments import record_at
from lockstep.kernels.cpu.compiler.compile import Kernel, compiled
from lockstep.kernels.cpu.compiler.matrix import EMULATED
from lockstep.kernels.cpu.compiler.scalar import (
    larger,
    load,
    load_int,
    load_word,
    smaller,
    store_word,
)

STRIDED = np.dtype([(name, np.int64) for name in ("address", "batch", "head", "row")])
"""A tensor's address and strides in bytes; ``batch`` is the page stride of a page pool."""

_FIELDS: list[tuple[str, Any]] = [
    ("kind", np.int64),  # storage type of q, k, v, out: see simd.F32
    ("B", np.int64),
    ("G", np.int64),  # query heads per KV head
    ("Hkv", np.int64),
    ("D", np.int64),
    ("Dv", np.int64),
    ("q", STRIDED),
    ("k", STRIDED),
    ("v", STRIDED),
    ("out", STRIDED),
    ("lse", STRIDED),
    ("statistics", STRIDED),  # (m, l) of each row; address 0: not wanted
    ("bias", STRIDED),  # address 0: none
    ("bias_col", np.int64),
    ("bias_kind", np.int64),
    ("sinks", np.int64),  # address of [Hq] fp32; 0: none
    ("alibi_slopes", np.int64),  # address of [B, Hq] fp32; 0: none
    ("q_first", np.int64),  # addresses of [B] int64, and so the next four
    ("q_len", np.int64),
    ("kv_first", np.int64),
    ("kv_len", np.int64),  # keys that are loaded
    ("kv_count", np.int64),  # keys that count: fewer where lengths are secret
    ("secret_lengths", np.int64),  # 1: which keys are loaded does not depend on kv_count
    ("capped", np.int64),  # 1: there is a softcap
    ("page_table", np.int64),  # address of [B, pages] int64
    ("page_size", np.int64),  # 0: not paged
    ("pages", np.int64),
    ("left", np.int64),
    ("right", np.int64),
    ("scale", np.float64),
    ("softcap", np.float64),  # 0: none
    ("q_factor", np.float64),  # of queries, before the product
    ("score_factor", np.float64),  # of products: scores, or arguments of the softcap
]
CALL = np.dtype([*_FIELDS, ("ordinary", np.int64)])
"""Everything a kernel needs to know about a call; kernels receive it by reference."""
call_at = record_at(CALL)
# The same but for the name of the last word, which is not used: numba makes other versions of all
# functions for another type.
_CONSTANT_TIME = np.dtype([*_FIELDS, ("constant_time", np.int64)])
_WITH_TILES = np.dtype([*_FIELDS, ("tiles", np.int64)])


def variants(make: Callable[[Any], Callable[[int], None]]) -> tuple[Kernel, Kernel]:
    """The ordinary kernel and the constant-time one of a function `make(call_at)`."""
    name = make.__name__
    return (
        Kernel(make(call_at), name),
        Kernel(make(record_at(_CONSTANT_TIME)), f"{name}_constant_time", flush=True),
    )


def with_tiles(make: Callable[[Any], Callable[[int], None]]) -> Kernel:
    """The kernel of such a function that multiplies bfloat16 with matrix units."""
    name = f"{make.__name__}_{'emulated' if EMULATED else 'tiles'}"
    return Kernel(make(record_at(_WITH_TILES)), name, tiles=not EMULATED)


def _flag_of_build(name: str) -> Any:
    """A function that says whether the build at hand is that of records with such a last word: a
    constant in its code."""

    @intrinsic
    def is_build(context, call):  # type: ignore[no-untyped-def]
        flag = ir.Constant(ir.IntType(1), int(name in call.fields))

        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return flag

        return types.boolean(call), codegen

    return is_build


is_constant_time = _flag_of_build("constant_time")
has_tiles = _flag_of_build("tiles")


@compiled
def of_sequence(table, b):
    """Entry b of a per-sequence table such as ``call.q_len``."""
    return load_word(table + 8 * b)


@compiled
def row_address(tensor, first, b, head, token):
    return tensor.address + b * tensor.batch + head * tensor.head + (first + token) * tensor.row


@compiled
def bias_address(call, b, head, q_idx, first):
    """The bias of one query and key ``first`` of its sequence."""
    column = of_sequence(call.kv_first, b) + first
    return row_address(call.bias, 0, b, head, q_idx) + column * call.bias_col


@compiled
def _fill_rows(row, step, n, rows):
    for i in range(n):
        store_word(row, rows + 8 * i)
        row += step


@compiled
def fill_kv_rows(call, tensor, b, h, first, n, padded, zero_row, rows):
    """Addresses of keys first … first + n, then of a row of zeros up to ``padded``."""
    step = tensor.row
    if call.page_size > 0:
        table = call.page_table + 8 * b * call.pages
        token, done = of_sequence(call.kv_first, b) + first, 0
        while done < n:
            page, place = load_word(table + 8 * (token // call.page_size)), token % call.page_size
            here = min(n - done, call.page_size - place)
            _fill_rows(row_address(tensor, 0, page, h, place), step, here, rows + 8 * done)
            token, done = token + here, done + here
    else:
        row = row_address(tensor, of_sequence(call.kv_first, b), b, h, first)
        _fill_rows(row, step, n, rows)
    for i in range(n, padded):
        store_word(zero_row, rows + 8 * i)


@compiled
def split_row(call, b, row):
    """(g, q_idx) of a row of sequence b."""
    length = of_sequence(call.q_len, b)
    return row // length, row % length


@compiled
def next_row(call, b, g, q_idx):
    """(g, q_idx) of the row behind that one, without the division of `split_row`."""
    if q_idx + 1 < of_sequence(call.q_len, b):
        return g, q_idx + 1
    return g + 1, 0


@compiled
def visible(call, b, q_idx):
    """The keys [lo, hi) that query q_idx of sequence b sees; lo == hi if none."""
    return _reach(call, b, q_idx, np.int64(load_int(call.kv_count + 8 * b)))


@compiled
def key_range(call, b, q_idx):
    """The keys [lo, hi) that query q_idx of sequence b loops over: those it sees, or all."""
    length = of_sequence(call.kv_len, b)
    if call.secret_lengths:
        return 0, length
    return _reach(call, b, q_idx, length)


@compiled
def diagonal_of(call, b, q_idx):
    """The key on the diagonal position of query q_idx."""
    return q_idx + np.int64(load_int(call.kv_count + 8 * b)) - of_sequence(call.q_len, b)


@compiled
def slope_of(call, b, head):
    return load(call.alibi_slopes + 4 * (b * call.Hkv * call.G + head))


@compiled
def _reach(call, b, q_idx, length):
    diagonal = q_idx + length - of_sequence(call.q_len, b)
    # The length may be secret.
    lo = smaller(larger(diagonal - call.left, 0), length)
    hi = larger(lo, smaller(length, diagonal + call.right + 1))
    return lo, hi
