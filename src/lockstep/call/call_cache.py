"""The call cache: from the tensors and options of a call straight to what runs it.

A call is like another if its options are equal, and its tensors in type, shape, strides, dtype,
device and address modulo 16 bytes, and if queries and keys share their cu_seqlens as they did
there. Then it would pass the same checks, pose the same problem and run the same kernel with the
same arguments, addresses aside: none of this is done again. Gradients are calls, too; theirs take
more tensors, after those of the call itself.

`find` looks a call up in two ways. First it compares the tensors with those of the latest call with
the same options, by the guards that torch.compile has for tensors: they compare in C++. Only if
they differ does it make a key of all that a call depends on, and look that up in a dictionary of
thousands of calls. Making the key takes longer than all the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch

from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.call.eager import PLAIN_TYPES
from lockstep.kernels.kernel import BackwardTensors, Given
from lockstep.problem import Layout, Tensors, Window, make_options

Run = Callable[..., Any]
"""`Prepared` or `PreparedBackward`"""

_CU_SEQLENS_Q, _CU_SEQLENS_K = map(Tensors._fields.index, ("cu_seqlens_q", "cu_seqlens_k"))


# What runs a call, the addresses of its tensors (0 where there is none), and whether one of them
# requires a gradient.
Found = tuple["_Entry", list[int], bool]
Guards = Callable[[Given], Found | None]
"""Takes tensors and returns what runs them if they are like those of one call, and None if not."""


class _Kinds(NamedTuple):
    """The properties of tensors that a prepared call depends on."""

    key: tuple[Any, ...]
    addresses: list[int]
    requires_grad: bool


def _kinds_of(tensors: Given) -> _Kinds | None:
    """The properties of tensors that a prepared call depends on; None if one of them is no plain
    tensor, which the dispatcher has to see, or a check."""
    try:
        return _kinds_of_strided(tensors)
    except RuntimeError:
        # Asking first would take longer: sparse tensors have no address, nested ones no shape.
        return None


def _kinds_of_strided(tensors: Given) -> _Kinds | None:
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


class _Entry:
    """A call that was prepared, and the guards that recognize another one like it."""

    __slots__ = ("_guards", "kernels", "run")

    def __init__(self, run: Run) -> None:
        # What was chosen among other kernels is of no use once they have changed.
        self.run, self.kernels = run, dispatch.KERNELS
        self._guards: dict[tuple[Any, ...], Guards] = {}

    def guards_of(self, tensors: Given, kinds: _Kinds) -> Guards:
        """The guards that recognize tensors like these, which the key has found."""
        seen = _seen_by_guards(tensors)
        guards = self._guards.get(seen)
        if guards is None:
            guards = self._guards[seen] = _write_guards(tensors, self, kinds)
        return guards


def _seen_by_guards(tensors: Given) -> tuple[Any, ...]:
    """The properties of tensors that guards compare and the key does not have."""
    present = [x for x in tensors if x is not None]
    first = {id(x): i for i, x in reversed(list(enumerate(present)))}
    of_each = ((type(x), x.requires_grad, x.is_inference(), first[id(x)]) for x in present)
    return torch.is_inference_mode_enabled(), *of_each


def _recognize_nothing(tensors: Given) -> Found | None:
    return None


def _write_guards(tensors: Given, entry: _Entry, kinds: _Kinds) -> Guards:
    """The guards of a prepared call with these tensors. They never change, so threads may share
    them.

    They are straight-line code for tensors of this kind: loops would take twice as long.
    """
    fields = BackwardTensors._fields[: len(tensors)]
    absent = [name for name, x in zip(fields, tensors, strict=True) if x is None]
    present = {name: x for name, x in zip(fields, tensors, strict=True) if x is not None}
    # One guard of all tensors takes less time than one for each, but takes none twice.
    first = {id(x): name for name, x in reversed(present.items())}
    same = {name: first[id(x)] for name, x in present.items()}
    distinct = [name for name in present if same[name] == name]
    scope: dict[str, Any] = {f"type_of_{name}": type(present[name]) for name in distinct}
    scope["are_like"] = _guard([present[name] for name in distinct])
    scope |= {"entry": entry, "requires_grad": kinds.requires_grad}
    scope |= {"dispatch": dispatch, "kernels": entry.kernels}
    alignment = {name: at & 15 for name, at in zip(fields, kinds.addresses, strict=True)}
    unlike = ["dispatch.KERNELS is not kernels", *(f"{name} is not None" for name in absent)]
    unlike += [f"{name} is not {other}" for name, other in same.items() if name != other]
    # A guard that is given a nested tensor ends the process.
    unlike += [f"type({name}) is not type_of_{name} or {name}.is_nested" for name in distinct]
    unlike += [f"({name}_at := {name}.data_ptr()) & 15 != {alignment[name]}" for name in distinct]
    at = dict.fromkeys(fields, "0") | {name: f"{other}_at" for name, other in same.items()}
    if "cu_seqlens_q" in present and "cu_seqlens_k" in present:
        is_other = "!=" if _shares_offsets(kinds.addresses) else "=="
        unlike.append(f"{at['cu_seqlens_q']} {is_other} {at['cu_seqlens_k']}")
    unlike.append(f"not are_like({', '.join(distinct)})")
    exec(_compiled(", ".join(fields), " or ".join(unlike), ", ".join(at.values())), scope)
    guards: Guards = scope["guards"]
    return guards


@lru_cache(maxsize=1024)
def _compiled(fields: str, unlike: str, addresses: str) -> CodeType:
    source = f"""
def guards(tensors):
    {fields}, = tensors
    try:
        if {unlike}:
            return None
    except RuntimeError:
        # A sparse tensor has no address.
        return None
    return entry, [{addresses}], requires_grad
"""
    return compile(source, "<guards>", "exec")


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


class Lookup:
    """Finds calls with the same options; keeps the guards of the latest call that it found."""

    __slots__ = ("latest", "options")

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options
        self.latest: Guards = _recognize_nothing

    def find(self, tensors: Given) -> Found | None:
        """The prepared call for tensors like those of an earlier one; None for the first of its
        kind, and for tensors that are not plain."""
        return self.latest(tensors) or self._find_by_key(tensors)

    def _find_by_key(self, tensors: Given) -> Found | None:
        kinds = _kinds_of(tensors)
        if kinds is None:
            return None
        entry = _CALLS.get((self.options, kinds.key))
        if entry is None or entry.kernels is not dispatch.KERNELS:
            return None
        if _HAS_GUARDS:
            self.latest = entry.guards_of(tensors, kinds)
        return entry, kinds.addresses, kinds.requires_grad


# By options and all that a call depends on; and by options alone.
_CALLS: Cache[tuple[Any, ...], _Entry] = Cache(limit=4096)
_LOOKUPS: Cache[tuple[Any, ...], Lookup] = Cache(limit=256)


def lookup_of_options(*options: Any) -> Lookup:
    """The lookup of calls with these options, the same each time for options that are equal."""
    return _LOOKUPS.get(options) or _LOOKUPS.setdefault(options, Lookup(options))


@lru_cache(maxsize=256, typed=True)
def lookup_of_arguments(
    layout: Layout,
    types_in_window: tuple[type, ...] | None,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    query_invariant: bool,
    allow_tf32: bool,
    return_lse: bool,
    kernel: str | None,
    constant_time: bool,
    secret_lengths: bool,
    max_seqlen_q: int | None = None,
) -> Lookup:
    """The lookup of calls of one layout with these arguments, the same each time for the same ones.

    A call whose lookup is found needs no `make_options`. Arguments that are equal but of another
    type are not the same: they may be wrong. Raises as `make_options` does.
    """
    options = make_options(
        *(causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel),
        *(constant_time, secret_lengths, max_seqlen_q),
    )
    return Lookup((options, kernel))


def find_or_prepare(prepare: Callable[..., Run], tensors: Given, *options: Any) -> Found:
    """The prepared call for plain tensors; `prepare(tensors, *options)` makes it if needed."""
    kinds = _kinds_of(tensors)
    assert kinds is not None
    key = (options, kinds.key)
    entry = _CALLS.get(key)
    if entry is None or entry.kernels is not dispatch.KERNELS:
        entry = _CALLS[key] = _Entry(prepare(tensors, *options))
    return entry, kinds.addresses, kinds.requires_grad
