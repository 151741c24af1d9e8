"""Context-parallel attention on paper: memory, bytes and time per method and number of GPUs.

Bytes and memory are those of `traffic`, which tests hold to counted ones. Compute goes at a rate of
the kernels that was measured on one GPU. Links are given: GB/s per GPU and direction, within a node
of NODE GPUs and between nodes. Nothing here has been measured on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from lockstep.distributed import heads
from lockstep.distributed.traffic import Shape, held, received

NODE = 8
METHODS = ("heads", "gather", "ring")
# The kernels of a ring, as results name them.
RING = {"forward": "triton, query-invariant", "backward": "triton"}
# Products of a backward over those of a forward, and with dq and dk, dv in passes of their own.
BACKWARD, TWO_PASSES = 2.5, 3.5


class Links(NamedTuple):
    """GB/s that a GPU receives, within its node and from other nodes."""

    inside: float
    between: float


class Rates(NamedTuple):
    """FLOP/s of one GPU; a backward counts as 2.5 forwards."""

    forward: float
    backward: float


class Kernels(NamedTuple):
    """The rates of the kernels that run a call, and of those that run the blocks of a ring."""

    chosen: Rates
    ring: Rates


@dataclass(frozen=True)
class Row:
    """One method on one number of GPUs; times in seconds, of a forward and its backward."""

    gpus: int
    method: str
    refusal: str | None = None
    memory: int = 0
    received: int = 0
    compute: float = 0.0
    exposed: float = 0.0
    efficiency: float = 0.0
    recommended: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(shape: Shape, causal: bool, kernels: Kernels, links: Links) -> list[Row]:
    """A row per method; the recommended one is the most efficient."""
    rows = [_row(method, shape, causal, kernels, links) for method in METHODS]
    best = max(rows, key=lambda row: row.efficiency)
    return [replace(row, recommended=row is best) for row in rows]


def _row(method: str, shape: Shape, causal: bool, kernels: Kernels, links: Links) -> Row:
    if method == "heads":
        refusal = heads.refusal(shape.Hq, shape.Hkv, shape.ranks)
        if refusal is not None:
            return Row(shape.ranks, method, refusal)
    ideal_total = sum(_compute(shape, causal, kernels.chosen))
    bytes_in = max(received(method, shape, rank) for rank in (0, shape.ranks - 1))
    wire = [_wire_time(n, method, shape.ranks, links) for n in bytes_in]
    waits = _imbalance(method, shape, causal)
    # dq and dk, dv are passes of their own, unless a rank has whole heads. The kernels of a ring
    # make two anyway: their rate has it.
    shared = method == "gather" or (method == "heads" and shape.Hkv < shape.ranks)
    two = TWO_PASSES / BACKWARD if shared else 1.0
    alone = _compute(shape, causal, kernels.ring if method == "ring" else kernels.chosen)
    compute = (alone.forward * waits, alone.backward * waits * two)
    if method == "ring":
        # The first block of each loop arrives before anything is computed; later ones meanwhile.
        exposed = sum(_beyond(w, c, shape.ranks) for w, c in zip(wire, compute, strict=True))
    else:
        exposed = sum(wire)
    return Row(
        gpus=shape.ranks,
        method=method,
        memory=max(held(method, shape)),
        received=sum(bytes_in),
        compute=sum(compute),
        exposed=exposed,
        efficiency=ideal_total / (sum(compute) + exposed),
    )


class Seconds(NamedTuple):
    forward: float
    backward: float


def _compute(shape: Shape, causal: bool, rates: Rates) -> Seconds:
    """The time of one rank with an equal share of the work."""
    pairs = shape.B * shape.Hq * shape.S**2 / (2 if causal else 1) / shape.ranks
    forward = 2 * pairs * (shape.D + shape.Dv)
    return Seconds(forward / rates.forward, BACKWARD * forward / rates.backward)


def _imbalance(method: str, shape: Shape, causal: bool) -> float:
    """The work of the rank that all wait for, over an equal share."""
    P = shape.ranks
    if method == "heads":
        parts = heads.divide(shape.Hq, shape.Hkv, P, shape.S)
        return max(len(part.q_heads) for part in parts) * P / shape.Hq
    if not causal:
        return 1.0
    # In chunks of S / 2P tokens: a chunk sees those before it, and half of itself.
    held_by = [(2 * r, 2 * r + 1) for r in range(P)]
    if shape.balanced:
        held_by = [(r, 2 * P - 1 - r) for r in range(P)]
    equal = sum(i + 0.5 for pair in held_by for i in pair) / P
    if method == "gather":
        return max(sum(i + 0.5 for i in pair) for pair in held_by) / equal
    # All ranks fold block t, of two chunks, before block t + 1.
    steps = (
        max(sum(min(max(i + 0.5 - 2 * t, 0.0), 2.0) for i in pair) for pair in held_by)
        for t in range(P)
    )
    return sum(steps) / equal


def _wire_time(n: int, method: str, ranks: int, links: Links) -> float:
    """Seconds to receive n bytes."""
    if ranks <= NODE:
        return n / (links.inside * 1e9)
    outside = 1 - NODE / ranks
    # Gathered and broadcast bytes enter a node once, over the links of all its GPUs; those of an
    # all-to-all enter for one GPU each.
    share = outside if method == "heads" else outside / NODE
    return max(n * share / (links.between * 1e9), n / (links.inside * 1e9))


def _beyond(wire: float, compute: float, blocks: int) -> float:
    """The time of the exchange that does not overlap with computation, where each block but the
    first arrives during the computation of another."""
    first, rest = wire / blocks, wire * (blocks - 1) / blocks
    return first + max(0.0, rest - compute * (blocks - 1) / blocks)


def rates_of(runs: list[dict[str, Any]], D: int, causal: bool) -> Kernels | None:
    """Rates on the longest sequences, by the newest of `lockstep bench gpu` runs that has them;
    None without."""
    chosen = _rates(runs, D, causal, lambda row: str(row["chosen"]))
    ring = _rates(runs, D, causal, lambda row: RING[row["table"]])
    return None if chosen is None or ring is None else Kernels(chosen, ring)


def _rates(
    runs: list[dict[str, Any]], D: int, causal: bool, kernel: Callable[[dict[str, Any]], str]
) -> Rates | None:
    found = {}
    for run in runs:
        for row in sorted(run["rows"], key=lambda row: row.get("S", 0)):
            is_wanted = row["table"] in Rates._fields and (row["D"], row["causal"]) == (D, causal)
            if is_wanted and kernel(row) in row["rate"]:
                found[row["table"]] = row["rate"][kernel(row)] * 1e12
    return Rates(**found) if len(found) == len(Rates._fields) else None
