"""From the results of the launches of a backward to the gradients that it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

from torch import Tensor

from lockstep.kernels.kernel import Gradients, Needs


def gradients_from(made: Collection[str], needs: Needs) -> Callable[..., Gradients]:
    """A `Launches.finish` that returns the wanted gradients of those that are `made`: dq, dk, …"""
    places = {name: i for i, name in enumerate(made)}
    wanted = (f"d{name}" if getattr(needs, name) else "" for name in Gradients._fields)
    # -1 is the None after them.
    take = itemgetter(*(places.get(name, -1) for name in wanted))

    def finish(tensors: Any, results: list[Tensor], workspace: Tensor | None) -> Gradients:
        return Gradients._make(take((*results, None)))

    return finish
