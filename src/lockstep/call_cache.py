"""Calls like earlier ones: from tensors and options straight to what runs them.

A call is like another if its options are equal, and its tensors in type, shape, strides, dtype,
device and address modulo 16 bytes, and if queries and keys share their cu_seqlens as they did
there. Then it would pass the same checks, pose the same problem and run the same kernel with the
same arguments, addresses aside: none of this is done again. Gradients are calls, too; theirs take
more tensors, behind those of the call they derive.

Two ways lead there. A dictionary knows thousands of calls, but a key takes each tensor apart, and
that takes longer than everything after it. So the last call with given options is tried first, by
the guards that torch.compile has for tensors; they compare in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.eager import PLAIN_TYPES
from lockstep.kernels.kernel import Given
from lockstep.problem import Tensors

Run = Callable[..., Any]
"""`Prepared` or `PreparedBackward`"""

_CU_SEQLENS_Q, _CU_SEQLENS_K = map(Tensors._fields.index, ("cu_seqlens_q", "cu_seqlens_k"))


class Seen(NamedTuple):
    """What a look at the tensors of a call shows."""

    kinds: list[Any]
    """All that a prepared call depends on."""
    addresses: list[int]
    require_grad: bool


def look_at(tensors: Given) -> Seen | None:
    """None if one is not a plain tensor: the dispatcher then has to see it, or a check."""
    try:
        return _look_at(tensors)
    except RuntimeError:
        # Asking first would take longer: sparse tensors have no address, nested ones no shape.
        return None


def _look_at(tensors: Given) -> Seen | None:
    kinds: list[Any] = []
    addresses: list[int] = []
    require_grad = False
    for x in tensors:
        if x is None:
            kinds.append(None)
            addresses.append(0)
        elif type(x) in PLAIN_TYPES and not x.is_neg():
            address = x.data_ptr()
            # A tensor of zeros that has none in memory.
            if address == 0 and x._is_zerotensor():
                return None
            addresses.append(address)
            kinds += (x.shape, x.stride(), x.dtype, x.device, address & 15)
            require_grad = require_grad or x.requires_grad
        else:
            return None
    kinds.append(_shares_offsets(addresses))
    return Seen(kinds, addresses, require_grad)


def _shares_offsets(addresses: list[int]) -> bool:
    return addresses[_CU_SEQLENS_Q] == addresses[_CU_SEQLENS_K]


# What runs a call, the addresses of its tensors, and whether one of them requires a gradient.
Found = tuple[Run, list[int], bool]


class _Likeness:
    """Recognizes tensors like those of one call. Nothing of it changes: threads share it."""

    __slots__ = ("_absent", "_guards", "_nones", "_shares_offsets", "require_grad")

    def __init__(self, tensors: Given, seen: Seen) -> None:
        self.require_grad = seen.require_grad
        self._shares_offsets = _shares_offsets(seen.addresses)
        absent = [i for i, x in enumerate(tensors) if x is None]
        # There is always one, and the getter of one does not return a tuple.
        self._absent, self._nones = itemgetter(*absent, absent[0]), (None,) * (len(absent) + 1)
        self._guards = [
            (i, _guard(x), seen.addresses[i] & 15) for i, x in enumerate(tensors) if x is not None
        ]

    def addresses_of(self, tensors: Given) -> list[int] | None:
        """None for tensors that are not like them."""
        if self._absent(tensors) != self._nones:
            return None
        addresses = [0] * len(tensors)
        for i, is_like, offset in self._guards:
            x: Any = tensors[i]
            # A guard that is given a nested tensor ends the process.
            if type(x) not in PLAIN_TYPES or x.is_nested or not is_like(x):
                return None
            address = addresses[i] = x.data_ptr()
            if address & 15 != offset:
                return None
        return addresses if _shares_offsets(addresses) is self._shares_offsets else None


class _Entry:
    """A call that was prepared, and how to recognize another one like it."""

    __slots__ = ("kernels", "likeness", "run")

    def __init__(self, run: Run) -> None:
        self.run, self.kernels = run, dispatch.KERNELS
        self.likeness: _Likeness | None = None

    def recognize(self, tensors: Given) -> Found | None:
        likeness = self.likeness
        if likeness is None or self.kernels is not dispatch.KERNELS:
            return None
        addresses = likeness.addresses_of(tensors)
        return None if addresses is None else (self.run, addresses, likeness.require_grad)


def _guard(x: Tensor) -> Callable[[Tensor | None], bool]:
    sizes, strides = [list(x.shape)], [list(x.stride())]
    guards = torch._C._dynamo.guards
    return guards.TensorGuards(x, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _guards_work() -> bool:
    """They are torch's own, and may change one day. Then the dictionary does."""
    x = torch.empty(2, 3)
    try:
        is_like = _guard(x)
        return is_like(torch.empty(2, 3)) and not is_like(torch.empty(3, 2))
    except (AttributeError, TypeError):
        return False


_HAS_GUARDS = _guards_work()


# By all that a call depends on, and by its options alone.
_ENTRIES: Cache[tuple[Any, ...], _Entry] = Cache(limit=4096)
_LAST: Cache[tuple[Any, ...], _Entry] = Cache(limit=256)


def find(tensors: Given, *options: Any) -> Found | None:
    """What runs a call like an earlier one; None for the first of its kind, and for tensors that
    are not plain."""
    entry = _LAST.get(options)
    if entry is not None:
        found = entry.recognize(tensors)
        if found is not None:
            return found
    seen = look_at(tensors)
    if seen is None:
        return None
    entry = _ENTRIES.get(_key(seen, options))
    if entry is None:
        return None
    if _HAS_GUARDS and entry.recognize(tensors) is None:
        entry.likeness = _Likeness(tensors, seen)
    _LAST[options] = entry
    return entry.run, seen.addresses, seen.require_grad


def find_or_keep(prepare: Callable[..., Run], tensors: Given, *options: Any) -> Found:
    """What runs a call of plain tensors, prepared if there was none like it."""
    seen = look_at(tensors)
    assert seen is not None
    key = _key(seen, options)
    entry = _ENTRIES.get(key)
    if entry is None:
        entry = _ENTRIES[key] = _Entry(prepare(tensors, *options))
    return entry.run, seen.addresses, seen.require_grad


def _key(seen: Seen, options: tuple[Any, ...]) -> tuple[Any, ...]:
    return (options, dispatch.KERNELS, *seen.kinds)
