"""What the kernels of a prepared call are launched with, without launching them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.launch import Launch, Launches


class Bound(NamedTuple):
    launch: Launch
    arguments: tuple[Any, ...]


def bind(call: Launches, tensors: Sequence[Tensor | None]) -> dict[str, Bound]:
    """Each launch of a call with these inputs, by the name of its kernel."""
    results = [new() for new in call._new_results]
    named = call.named(tensors, results, torch.empty(call.workspace_bytes, dtype=torch.uint8))
    return {launch.name: Bound(launch, launch.bind(named)) for launch in call.launches}
