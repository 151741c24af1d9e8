"""A trace of a module as it runs: the results of its parts, and of their operators.

Two runs of one model are compared part by part. A run over a batch has larger tensors than one over
a sequence alone, so `Place` says which part of them belongs to the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

WHOLE = "the model"


class Place(NamedTuple):
    """Where the tokens of one run are in the tensors of another, larger one."""

    B: int  # sequences in the larger run
    b: int  # the one in question
    S: int  # tokens of each there
    start: int  # the first of those in question
    n: int  # how many they are
    end: int  # tokens from the sequence's first to the last one in question
    first: int = 0  # the sequence's first token

    def find(self, large: Tensor, small: Tensor) -> Tensor | None:
        """The part of `large` that `small` should be; None if shapes do not say it."""
        if large.dim() != small.dim():
            return None
        for dim, (have, want) in enumerate(zip(large.shape, small.shape, strict=True)):
            if have == want:
                continue
            if have == self.B and want == 1:
                large = large.narrow(dim, self.b, 1)
            elif have == self.S and want == self.n:
                large = large.narrow(dim, self.start, self.n)
            elif have == self.S and want == self.end:
                large = large.narrow(dim, self.first, self.end)
            elif have == self.B * self.S and want == self.n:
                large = large.narrow(dim, self.b * self.S + self.start, self.n)
            else:
                return None
        return large


class Step(NamedTuple):
    """One result: of a module, by its path, or of an operator inside one."""

    path: str
    name: str
    tensors: dict[str, Tensor]  # by where they are in what was given or returned


class Difference(NamedTuple):
    """The first step in which two runs differ."""

    path: str
    name: str
    elements: int
    of: int
    largest: float

    def as_json(self) -> dict[str, Any]:
        return self._asdict()


def compare(large: list[Step], small: list[Step], place: Place) -> Difference | None:
    """The first step of `small` that differs from its part of `large`, bit by bit.

    Steps are taken in order; those of which the shapes do not say where they belong, and whatever
    one run alone has, are left out.
    """
    names = [(step.path, step.name) for step in large]
    at = 0
    for mine in small:
        if (mine.path, mine.name) not in names[at:]:
            continue
        at = names.index((mine.path, mine.name), at) + 1
        theirs = large[at - 1]
        for key, b in mine.tensors.items():
            part = place.find(theirs.tensors[key], b) if key in theirs.tensors else None
            if part is None or not b.is_floating_point():
                continue
            differs = ~((part == b) | (part.isnan() & b.isnan()))
            if bool(differs.any()):
                largest = float((part.double() - b.double()).abs()[differs].max())
                return Difference(mine.path, mine.name, int(differs.sum()), b.numel(), largest)
    return None


def modules_of(model: nn.Module, run: Callable[[], Any]) -> list[Step]:
    """The inputs and results of every module, in order: parts before the whole.

    What a module is given is a result of the module around it.
    """
    steps: list[Step] = []
    names = {module: name or WHOLE for name, module in model.named_modules()}
    kinds = {name: type(module).__name__ for module, name in names.items()}

    def around(name: str) -> str:
        outer = name.rpartition(".")[0] or WHOLE
        # A list of modules computes nothing.
        return around(outer) if kinds[outer] in ("ModuleList", "ModuleDict") else outer

    def take(module: nn.Module, args: Any, kwargs: Any) -> None:
        if names[module] != WHOLE:
            outer = around(names[module])
            steps.append(Step(outer, kinds[outer], _tensors((args, kwargs))))

    def give(module: nn.Module, _: Any, output: Any) -> None:
        steps.append(Step(names[module], kinds[names[module]], _tensors(output)))

    handles = [module.register_forward_pre_hook(take, with_kwargs=True) for module in names]
    handles += [module.register_forward_hook(give) for module in names]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return steps


def operators_of(model: nn.Module, path: str, run: Callable[[], Any]) -> list[Step]:
    """The results of the operators inside the module at `path`."""
    module = model if path == WHOLE else model.get_submodule(path)
    mode = _Operators(path)

    def enter(*_: Any) -> None:
        mode.depth += 1

    def leave(*_: Any) -> None:
        mode.depth -= 1

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with torch.no_grad(), mode:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return mode.steps


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path, self.depth = path, 0
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.depth > 0 and not func.is_view:
            self.steps.append(Step(self.path, str(func), _tensors(result)))
        return result


def _tensors(output: Any) -> dict[str, Tensor]:
    """Copies, since what follows may write to them."""
    leaves, _ = tree_flatten_with_path(output)
    return {keystr(path): x.detach().clone() for path, x in leaves if isinstance(x, Tensor)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back in the one it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
