"""The call cache: from the tensors and options of a call straight to what runs it.

A call is like another if its options are equal, and its tensors in type, shape, strides, dtype,
device and address modulo 16 bytes, and if queries and keys share their cu_seqlens as they did
there. Then it would pass the same checks, pose the same problem and run the same kernel with the
same arguments, addresses aside: none of this is done again. Gradients are calls, too; theirs take
more tensors, behind those of the call itself.

`find` looks a call up in two ways. First it compares the tensors with those of the latest call with
the same options, by the guards that torch.compile has for tensors: they compare in C++. Only if
they differ does it make a key of all that a call depends on, and look that up in a dictionary of
thousands of calls. Making the key takes longer than all the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.call.eager import PLAIN_TYPES
from lockstep.kernels.kernel import BackwardTensors
from lockstep.problem import Tensors

Run = Callable[..., Any]
"""`Prepared` or `PreparedBackward`"""

_CU_SEQLENS_Q, _CU_SEQLENS_K = map(Tensors._fields.index, ("cu_seqlens_q", "cu_seqlens_k"))


# What runs a call, the addresses of its tensors (0 where there is none), and whether one of them
# requires a gradient.
Found = tuple[Run, list[int], bool]


class _Kinds(NamedTuple):
    """What a prepared call depends on, read off its tensors."""

    key: tuple[Any, ...]
    addresses: list[int]
    requires_grad: bool


def _kinds_of(tensors: Tensors | BackwardTensors) -> _Kinds | None:
    """What a prepared call depends on of its tensors; None if one of them is no plain tensor, which
    the dispatcher has to see, or a check."""
    try:
        return _kinds_of_strided(tensors)
    except RuntimeError:
        # Asking first would take longer: sparse tensors have no address, nested ones no shape.
        return None


def _kinds_of_strided(tensors: Tensors | BackwardTensors) -> _Kinds | None:
    key: list[Any] = []
    addresses: list[int] = []
    requires_grad = False
    for x in tensors:
        if x is None:
            key.append(None)
            addresses.append(0)
        elif type(x) in PLAIN_TYPES and not x.is_neg():
            address = x.data_ptr()
            # A tensor of zeros that has none in memory.
            if address == 0 and x._is_zerotensor():
                return None
            addresses.append(address)
            key += (x.shape, x.stride(), x.dtype, x.device, address & 15)
            requires_grad = requires_grad or x.requires_grad
        else:
            return None
    key.append(_shares_offsets(addresses))
    return _Kinds(tuple(key), addresses, requires_grad)


def _shares_offsets(addresses: list[int]) -> bool:
    return addresses[_CU_SEQLENS_Q] == addresses[_CU_SEQLENS_K]


class _Guards:
    """Recognizes tensors like those of one call. It never changes, so threads may share it."""

    __slots__ = (
        "_absent",
        "_are_like",
        "_distinct",
        "_nones",
        "_of_tensors",
        "_repeated",
        "_shares_offsets",
        "requires_grad",
    )

    def __init__(self, tensors: Tensors | BackwardTensors, kinds: _Kinds) -> None:
        self.requires_grad = kinds.requires_grad
        self._shares_offsets = _shares_offsets(kinds.addresses)
        absent = [i for i, x in enumerate(tensors) if x is None]
        # There is always one, and the getter of one does not return a tuple.
        self._absent, self._nones = itemgetter(*absent, absent[0]), (None,) * (len(absent) + 1)
        present = [i for i, x in enumerate(tensors) if x is not None]
        self._of_tensors = [(i, kinds.addresses[i] & 15) for i in present]
        # One guard of all tensors takes less time than one for each, but takes none twice.
        first = {id(tensors[i]): i for i in reversed(present)}
        self._repeated = [(i, j) for i in present if (j := first[id(tensors[i])]) != i]
        self._distinct = list(first.values())
        self._are_like = _guard([tensors[i] for i in self._distinct])

    def addresses_of(self, tensors: Tensors | BackwardTensors) -> list[int] | None:
        """The addresses of tensors that are like those of the call; None for others."""
        if self._absent(tensors) != self._nones:
            return None
        addresses = [0] * len(tensors)
        try:
            for i, alignment in self._of_tensors:
                x: Any = tensors[i]
                # A guard that is given a nested tensor ends the process.
                if type(x) not in PLAIN_TYPES or x.is_nested:
                    return None
                address = addresses[i] = x.data_ptr()
                if address & 15 != alignment:
                    return None
        except RuntimeError:
            # A sparse tensor has no address.
            return None
        for i, j in self._repeated:
            if tensors[i] is not tensors[j]:
                return None
        if not self._are_like(*[tensors[i] for i in self._distinct]):
            return None
        return addresses if _shares_offsets(addresses) is self._shares_offsets else None


class _Entry:
    """A call that was prepared, and the guards that recognize another one like it."""

    __slots__ = ("guards", "kernels", "run")

    def __init__(self, run: Run) -> None:
        # What was chosen among other kernels is of no use once they have changed.
        self.run, self.kernels = run, dispatch.KERNELS
        self.guards: _Guards | None = None

    def recognize(self, tensors: Tensors | BackwardTensors) -> Found | None:
        guards = self.guards
        if guards is None or self.kernels is not dispatch.KERNELS:
            return None
        addresses = guards.addresses_of(tensors)
        return None if addresses is None else (self.run, addresses, guards.requires_grad)

    def recognize_next(self, tensors: Tensors | BackwardTensors, kinds: _Kinds) -> None:
        """Makes guards of the tensors of a call that the key has found."""
        # Guards look at requires_grad, the key does not.
        if self.guards is None or self.guards.requires_grad is not kinds.requires_grad:
            self.guards = _Guards(tensors, kinds)


def _guard(tensors: list[Any]) -> Callable[..., bool]:
    """Whether as many tensors are like these, each like its own."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards = torch._C._dynamo.guards
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check


def _guards_work() -> bool:
    """Whether torch has the guards, which are its own and may change, and they do what they did.
    Without them the dictionary finds every call."""
    x = torch.empty(2, 3)
    try:
        are_like = _guard([x, x + 1])
        y = torch.empty(2, 3)
        return are_like(y, x) and not are_like(y, torch.empty(3, 2))
    except (AttributeError, TypeError):
        return False


_HAS_GUARDS = _guards_work()


# By options and all that a call depends on; and the latest of them by its options alone.
_CALLS: Cache[tuple[Any, ...], _Entry] = Cache(limit=4096)
_LATEST: Cache[tuple[Any, ...], _Entry] = Cache(limit=256)


def find(tensors: Tensors | BackwardTensors, *options: Any) -> Found | None:
    """What runs a call like an earlier one; None for the first of its kind, and for tensors that
    are not plain."""
    entry = _LATEST.get(options)
    if entry is not None:
        found = entry.recognize(tensors)
        if found is not None:
            return found
    kinds = _kinds_of(tensors)
    if kinds is None:
        return None
    entry = _CALLS.get((options, kinds.key))
    if entry is None or entry.kernels is not dispatch.KERNELS:
        return None
    if _HAS_GUARDS:
        entry.recognize_next(tensors, kinds)
        _LATEST[options] = entry
    return entry.run, kinds.addresses, kinds.requires_grad


def find_or_prepare(
    prepare: Callable[..., Run], tensors: Tensors | BackwardTensors, *options: Any
) -> Found:
    """What runs a call of plain tensors; `prepare(tensors, *options)` if there was none like it."""
    kinds = _kinds_of(tensors)
    assert kinds is not None
    key = (options, kinds.key)
    entry = _CALLS.get(key)
    if entry is None or entry.kernels is not dispatch.KERNELS:
        entry = _CALLS[key] = _Entry(prepare(tensors, *options))
    return entry.run, kinds.addresses, kinds.requires_grad
