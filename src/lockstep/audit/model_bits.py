"""Is a model reproducible? The same question alone and in a batch, padded, whole and in chunks.

A model is run twice over the same tokens under different circumstances, and every part of it is
compared bit by bit. The first part that differs is run again with its operators watched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.audit.model_trace import (
    Difference,
    Place,
    compare,
    evaluating,
    modules_of,
    operators_of,
)

# What operators are known for, by a part of their name. The first that fits counts.
REMEDIES = (
    ("attention", 'attention that is batch-invariant: attn_implementation="lockstep"'),
    ("softmax", 'attention in one operator, batch-invariant: attn_implementation="lockstep"'),
    ("bmm", 'attention in one operator, batch-invariant: attn_implementation="lockstep"'),
    ("grouped_mm", "experts whose products do not depend on how many tokens come to them"),
    ("mm", "a matrix product whose order of summation does not depend on the number of rows"),
    ("linear", "a matrix product whose order of summation does not depend on the number of rows"),
    ("convolution", "a convolution whose algorithm does not depend on the batch"),
    ("sum", "a sum whose order does not depend on the shape"),
    ("mean", "a mean whose order does not depend on the shape"),
    ("norm", "a normalisation that sums each row in one order"),
)


class Finding(NamedTuple):
    """One circumstance, and where the model first depends on it."""

    circumstance: str
    module: Difference | None
    operator: Difference | None = None

    @property
    def same(self) -> bool:
        return self.module is None

    @property
    def remedy(self) -> str | None:
        """A change that would make that part the same; None if it is not known."""
        if self.operator is None:
            return None
        return next((text for key, text in REMEDIES if key in self.operator.name), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "circumstance": self.circumstance,
            "same": self.same,
            "module": None if self.module is None else self.module.as_json(),
            "operator": None if self.operator is None else self.operator.as_json(),
            "remedy": self.remedy,
        }


def model(module: nn.Module, inputs: dict[str, Tensor] | Tensor) -> list[Finding]:
    """Where a model's bits depend on what stands around a sequence.

    Runs the model over the whole batch and over each of its first and last sequence alone. If it is
    given `input_ids` and takes an `attention_mask`, also over that sequence padded on the left and
    on the right, and if it has a cache (`past_key_values`) and no encoder, in chunks.

    Args:
        module: A model; it is put into evaluation mode for the audit.
        inputs: What it is called with: a dict of tensors by name, or one tensor. Tensors whose
            first size is that of the first one are batches. Give sizes that differ from one another
            and from those of the model (a batch of 5 with 37 tokens), because parts are found by
            their sizes.

    Returns:
        One `Finding` for each circumstance: `same`, or the first module and operator that differ,
        by how much, and what would help.

    Raises:
        ValueError: The batch has fewer than two sequences, or inputs has no tensor.

    Example:
        >>> layer = torch.nn.Linear(8, 8).double()
        >>> [finding.same for finding in model(layer, torch.zeros(3, 8).double())]
        [True, True]
    """
    given = {"input": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    sizes = [x.shape[0] for x in given.values() if isinstance(x, Tensor) and x.dim()]
    if not sizes:
        raise ValueError("inputs has no tensor with a batch")
    B = sizes[0]
    if B < 2:
        raise ValueError(f"inputs needs a batch of two sequences or more, got {B}")

    def call(**inputs: Any) -> Any:
        return module(*inputs.values()) if list(inputs) == ["input"] else module(**inputs)

    with evaluating(module):
        return [
            _judge(module, name, large, small, place)
            for name, large, small, place in _circumstances(call, given, B, _arguments(module))
        ]


Case = tuple[str, Callable[[], Any], Callable[[], Any], Place]


def _arguments(module: nn.Module) -> Callable[[str], bool]:
    """Whether a module can be called with an argument of some name."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    return lambda name: takes_any or name in parameters


def _circumstances(
    call: Callable[..., Any], given: dict[str, Any], B: int, takes: Callable[[str], bool]
) -> Iterator[Case]:
    """A name, the larger run, the smaller run, and where that is in the larger one."""

    def alone(b: int) -> dict[str, Any]:
        return {
            name: x[b : b + 1] if isinstance(x, Tensor) and x.dim() and x.shape[0] == B else x
            for name, x in given.items()
        }

    ids = given.get("input_ids")
    first = ids if ids is not None else next(x for x in given.values() if isinstance(x, Tensor))
    S = first.shape[1] if first.dim() > 1 else 1
    for b in (0, B - 1):
        place = Place(B, b, S, 0, S, S)
        name = f"sequence {b} alone and in a batch of {B}"
        yield name, partial(call, **given), partial(call, **alone(b)), place
    if ids is None or S < 4:
        return
    n = S - S // 3
    short = {**alone(0), "input_ids": ids[:1, :n]}
    short.pop("attention_mask", None)
    for side, start in (("left", S - n), ("right", 0)) if takes("attention_mask") else ():
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[0] = 0
        padded[0, start : start + n] = ids[0, :n]
        mask[0] = 0
        mask[0, start : start + n] = 1
        # Positions are those of the sequence alone, as `generate` has it.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        more = {**given, "input_ids": padded, "attention_mask": mask}
        if takes("position_ids"):
            more["position_ids"] = positions
        place = Place(B, 0, S, start, n, n, start)
        name = f"sequence 0 alone and padded on the {side}"
        yield name, partial(call, **more), partial(call, **short), place
    # The tokens of an encoder see those after them: it takes no chunks.
    if "decoder_input_ids" not in given:
        yield from _chunks(call, alone(0), S)


def _chunks(call: Callable[..., Any], given: dict[str, Any], S: int) -> Iterator[Case]:
    given = {name: x for name, x in given.items() if name != "attention_mask"}
    ids, half = given["input_ids"], S // 2 + 1
    try:
        with torch.no_grad():
            cache = call(**{**given, "input_ids": ids[:, :half], "use_cache": True}).past_key_values
    except (TypeError, AttributeError, ValueError):
        return
    if cache is None:
        return
    rest = {**given, "input_ids": ids[:, half:], "past_key_values": cache, "use_cache": True}
    place = Place(1, 0, S, half, S - half, S)
    whole = {**given, "use_cache": True}
    name = "prefill in two chunks and as a whole"
    yield name, partial(call, **whole), partial(call, **rest), place


def _judge(
    module: nn.Module,
    name: str,
    large: Callable[[], Any],
    small: Callable[[], Any],
    place: Place,
) -> Finding:
    smaller = modules_of(module, small)
    found = compare(modules_of(module, large), smaller, place)
    if found is None:
        return Finding(name, None)
    if "chunks" in name:
        # A cache that has taken up the second chunk cannot take it up again.
        return Finding(name, found)
    inside = compare(
        operators_of(module, found.path, large), operators_of(module, found.path, small), place
    )
    return Finding(name, found, inside)
