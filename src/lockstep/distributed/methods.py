"""The methods by name, which of them a call runs, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lockstep.distributed import heads
from lockstep.distributed.call import ShardedCall
from lockstep.distributed.gather import GatherAttention
from lockstep.distributed.heads import HeadsAttention
from lockstep.distributed.ring import RingAttention

Run = Callable[[ShardedCall, Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


class Sizes(NamedTuple):
    """The sizes that decide the choice of a method."""

    Hq: int
    Hkv: int
    ranks: int
    kernel: str  # runs a plain call with these shards
    carrying: str | None  # takes keys in blocks; None where no kernel does that may run
    query_invariant: bool  # whether the bits of a plain call are asked for


@dataclass(frozen=True, eq=False)
class Method:
    """One way to share attention among ranks."""

    name: str
    run: Run
    refuses: Callable[[Sizes], str | None]


def _heads_refuses(sizes: Sizes) -> str | None:
    return heads.refusal(sizes.Hq, sizes.Hkv, sizes.ranks)


def _ring_refuses(sizes: Sizes) -> str | None:
    if sizes.carrying is None:
        return f"needs a kernel that takes keys in blocks, which {sizes.kernel} does not"
    if sizes.query_invariant and sizes.carrying != sizes.kernel:
        return (
            f"would be computed by {sizes.carrying}, without the bits of a plain call, which "
            f"{sizes.kernel} computes here: with query_invariant, pass kernel={sizes.carrying!r} "
            "to both"
        )
    return None


METHODS = (
    Method("heads", HeadsAttention.apply, _heads_refuses),
    Method("gather", GatherAttention.apply, lambda sizes: None),
    Method("ring", RingAttention.apply, _ring_refuses),
)


@dataclass(frozen=True)
class Explanation:
    """The result of `lockstep.distributed.explain`; print it to read it."""

    sizes: Sizes
    method: str
    """The method that would run."""
    reasons: dict[str, str]
    """Why it runs, and why each other method does not."""

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [
            f"{self.sizes.Hq} query heads, {self.sizes.Hkv} key heads, {self.sizes.ranks} ranks"
        ]
        for name, reason in self.reasons.items():
            verdict = "runs" if name == self.method else "does not run"
            lines.append(f"  {name:<{width}}  {verdict}: {reason}")
        return "\n".join(lines)


def find(name: str | None, sizes: Sizes) -> Method:
    """The method called `name`, or the one that `choose` finds.

    Raises ValueError for an unknown name, NotImplementedError where the method refuses.
    """
    method = by_name(choose(sizes).method if name is None else name)
    refusal = method.refuses(sizes)
    if refusal is not None:
        raise NotImplementedError(f"method {method.name!r} {refusal}")
    return method


def by_name(name: str) -> Method:
    for method in METHODS:
        if method.name == name:
            return method
    names = ", ".join(method.name for method in METHODS)
    raise ValueError(f"method takes one of {names}, or None to choose, got {name!r}")


def choose(sizes: Sizes) -> Explanation:
    """The rule: `heads` where every rank gets equally many key heads, else `gather`.

    `ring` runs where it is asked for: it is the one whose memory never grows with the sequence,
    and no rule that all ranks follow knows how much memory each of them has left.
    """
    even = sizes.Hkv % sizes.ranks == 0
    reasons = {
        "heads": "key heads divide evenly: fewest bytes, and nothing is computed twice"
        if even
        else _heads_refuses(sizes)
        or f"{sizes.Hkv} key heads do not divide evenly among {sizes.ranks} ranks: some would wait",
        "gather": "would send more bytes, and hold all keys on each rank"
        if even
        else "divides tokens, whatever the heads are",
        "ring": _ring_refuses(sizes) or "has to be asked for: least memory, most exchanges",
    }
    return Explanation(sizes, "heads" if even else "gather", reasons)
