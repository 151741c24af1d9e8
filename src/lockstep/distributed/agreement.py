"""Ranks tell each other what they are about to do, before they do it.

Every call begins with one small all-gather: a row of integers per rank, for shapes, dtypes, options
and whether the arguments of that rank are in order. All ranks see the same table, so they all go on
or all raise, with one message. It also tells every rank how long the whole sequence is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lockstep.distributed.collectives import all_gather
from lockstep.distributed.layout import Sharding

# For a value that a rank does not have: no size, flag or number of a choice is negative.
NOTHING = -(1 << 62)
Words = Mapping[str, int]


class Disagreement(ValueError):
    """Ranks were called with arguments that do not fit together."""


def word(value: Any) -> int:
    """An option as an integer, the same in every process; of a name, the first 8 letters count."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return int(struct.unpack("q", struct.pack("d", value))[0])
    if isinstance(value, (str, torch.dtype)):
        return int.from_bytes(str(value).removeprefix("torch.").encode()[:8], "little")
    return int(value)


def agree(
    words: Words, group: ProcessGroup, device: torch.device, error: Exception | None = None
) -> list[list[int]]:
    """The words of every rank, [ranks][words]. All ranks pass words of the same names.

    Where a rank passes an error, it raises that, and the others raise a `Disagreement` which says
    so. `check_equal` and `sharding_of` compare what comes back.
    """
    row = torch.tensor([int(error is not None), *words.values()], device=device)
    table: list[list[int]] = all_gather(row, group).tolist()
    failed = [rank for rank, (flag, *_) in enumerate(table) if flag]
    if failed:
        said: list[Any] = [None] * len(table)
        dist.all_gather_object(said, None if error is None else str(error), group=group)
        if error is not None:
            raise error
        first = failed[0]
        raise Disagreement(f"{_ranks(failed)} cannot make this call: {said[first]}")
    return [row for _, *row in table]


def check_equal(words: Words, table: list[list[int]], but: frozenset[str] = frozenset()) -> None:
    """Raises a `Disagreement`, on every rank the same, for the first word that is not everywhere
    the same."""
    for i, name in enumerate(words):
        values = [row[i] for row in table]
        if name not in but and len(set(values)) > 1:
            groups = {value: [r for r, x in enumerate(values) if x == value] for value in values}
            shown = "; ".join(f"{_ranks(ranks)}: {_show(name, v)}" for v, ranks in groups.items())
            raise Disagreement(f"{name} takes the same on every rank, got {shown}")


def sharding_of(name: str, sizes: list[int], balanced: bool) -> Sharding:
    """How the tokens are divided, given how many each rank holds.

    Raises a `Disagreement` if no sharding has these sizes.
    """
    sharding = Sharding(sum(sizes), len(sizes), balanced)
    expected = [sharding.size(rank) for rank in range(len(sizes))]
    if sizes != expected:
        kind = "balanced" if balanced else "contiguous"
        raise Disagreement(
            f"{name} takes {kind} shards of {sharding.length} tokens, {expected} on the ranks in "
            f"order, got {sizes}"
        )
    return sharding


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_TEXTS = ("dtype", "device", "method", "kernel")
_NUMBERS = ("scale", "softcap")
_FLAGS = (
    "causal",
    "query_invariant",
    "allow_tf32",
    "constant_time",
    "secret_lengths",
    "balanced",
    "return_lse",
    "requires_grad",
)


def _show(name: str, value: int) -> str:
    if value == NOTHING:
        return "None"
    if name.startswith(_TEXTS):
        return value.to_bytes(8, "little").rstrip(b"\0").decode()
    if name in _NUMBERS:
        return str(struct.unpack("d", struct.pack("q", value))[0])
    return str(bool(value) if name.startswith(_FLAGS) else value)
