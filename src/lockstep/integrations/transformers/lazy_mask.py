"""The mask that layers get from transformers: a tensor that is built only if it is looked at.

transformers hands whatever our mask function returns to every layer, unchanged if it has four dims.
Most masks are simple: causal or not, a window or not, keys from a first to a last one of each
sequence. Lockstep's attention needs no [Sq, Skv] tensor for those. So a `LazyMask` has the size
and the dtype of the mask that eager attention would get, but holds a `Plan`, which `attend` reads.
In any other operation the mask itself takes part: some models compute with it, and some have no
attention but their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Plan(NamedTuple):
    """A mask as options of a call; at most one of the tensors is there."""

    causal: bool
    window: tuple[int, int] | None = None
    # [] int32: how many keys of a static cache are in use.
    end: Tensor | None = None
    # [B, 3] int32, `start`, `end` and `late`: keys from start to end count, and so many positions
    # lie after them up to the last query's, whose rows are padding.
    ranges: Tensor | None = None
    # [n + 1] int32, where packed sequences begin, the tokens of all batch rows in one line.
    offsets: Tensor | None = None
    # [B or 1, 1, Sq, Skv] bool, True for what counts: any other mask. It says all there is.
    seen: Tensor | None = None


class Kind(NamedTuple):
    """A plan without its tensor."""

    holds: str | None  # the field that has it
    causal: bool
    window: tuple[int, int] | None


class LazyMask(Tensor):
    """A mask [B, 1, Sq, Skv]: 0 for what counts, the lowest number of its dtype for what does not.

    Compilers take it apart into its numbers and what else it was made with.
    """

    _numbers: Tensor
    _kind: Kind

    @staticmethod
    def __new__(
        cls, numbers: Tensor, kind: Kind, size: tuple[int, ...], dtype: torch.dtype
    ) -> LazyMask:
        made: LazyMask = Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=numbers.device
        )
        return made

    def __init__(self, numbers: Tensor, kind: Kind, *_: Any) -> None:
        self._numbers, self._kind = numbers, kind

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_numbers"], (*self._kind, self.dtype)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], rest: Any, size: Any, _: Any) -> LazyMask:
        *kind, dtype = rest
        return LazyMask(tensors["_numbers"], Kind(*kind), tuple(size), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            where = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
            _, rest = args[0].__tensor_flatten__()
            moved = {"_numbers": args[0]._numbers.to(**where)}
            return LazyMask.__tensor_unflatten__(moved, rest, args[0].shape, None)
        args, kwargs = pytree.tree_map_only(LazyMask, build, (args, kwargs))
        return operator(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyMask({plan_of(self)}, size={tuple(self.shape)}, dtype={self.dtype})"


def make(plan: Plan, size: tuple[int, ...], dtype: torch.dtype, device: Any) -> LazyMask:
    """The mask [B, 1, Sq, Skv] of a plan."""
    numbers, holds = torch.empty(0, dtype=torch.int32, device=device), None
    for name, given in plan._asdict().items():
        if isinstance(given, Tensor):
            numbers, holds = given, name
    return LazyMask(numbers.to(device), Kind(holds, plan.causal, plan.window), size, dtype)


def plan_of(mask: LazyMask) -> Plan:
    holds, causal, window = mask._kind
    held: dict[str, Any] = {} if holds is None else {holds: mask._numbers}
    return Plan(causal, window, **held)


def build(mask: LazyMask) -> Tensor:
    """The mask as a plain tensor."""
    seen = seen_by(plan_of(mask), mask.shape[2], mask.shape[3], mask._numbers.device)
    zero = torch.zeros((), dtype=mask.dtype, device=seen.device)
    return torch.where(seen, zero, torch.finfo(mask.dtype).min).expand(mask.shape)


def seen_by(plan: Plan, Sq: int, Skv: int, device: torch.device) -> Tensor:
    """The boolean mask [B or 1, 1, Sq, Skv] of a plan, True for what counts."""
    if plan.seen is not None:
        return plan.seen
    k = torch.arange(Skv, device=device)
    end = torch.tensor(Skv, device=device) if plan.end is None else plan.end
    seen = (k < end)[None, None, None, :]
    if plan.offsets is not None:
        number = _numbers(plan.offsets, Skv)  # [B, Skv]
        seen = (number[:, None, :] == number[:, :, None])[:, None]
    if plan.ranges is not None:
        start, end, late = plan.ranges.unbind(1)
        seen = ((k >= start[:, None]) & (k < end[:, None]))[:, None, None, :]
        end = end + late
    q = (torch.arange(Sq, device=device) - Sq + end[..., None]).view(-1, 1, Sq, 1)
    if plan.causal:
        seen = seen & (k <= q)
    if plan.window is not None:
        seen = seen & (k >= q - plan.window[0])
        if not plan.causal:
            seen = seen & (k <= q + plan.window[1])
    return seen


def _numbers(offsets: Tensor, S: int) -> Tensor:
    """[B, S]: which packed sequence a token belongs to."""
    lengths = offsets.diff()
    return torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths).view(-1, S)
