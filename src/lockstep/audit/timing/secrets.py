"""Values of secret tensors that an attacker might tell apart, and the calls they go into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import lockstep


def _huge(x: Tensor) -> Tensor:
    """Numbers whose products are finite in float32, and far apart."""
    factor: float = torch.finfo(x.dtype).max ** 0.5 / 16
    return x * factor


def _subnormal(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.finfo(x.dtype).tiny / 4)


CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "zeros": torch.zeros_like,
    "huge": _huge,
    "subnormal": _subnormal,
    "nan": lambda x: torch.full_like(x, float("nan")),
    "infinite": lambda x: torch.full_like(x, float("inf")),
    "equal": torch.ones_like,
    "one-hot": lambda x: torch.zeros_like(x).index_fill_(-1, torch.tensor(0, device=x.device), 1),
}
"""What becomes of random numbers in each class."""
LENGTH_CLASSES = ("short lengths", "long lengths")
"""Where lengths are secret: random numbers with no key, and with all of them."""


def fixed(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Secrets of the class called `name`; lengths are 0 in it, except for long ones."""
    change = CLASSES["random" if name in LENGTH_CLASSES else name]
    length = tensors["k"].shape[-2] if name == "long lengths" else 0
    return {
        key: change(x) if x.is_floating_point() else torch.full_like(x, length)
        for key, x in tensors.items()
    }


@dataclass(frozen=True)
class Case:
    """A kind of call, small enough to be run a hundred thousand times."""

    name: str
    Sq: int
    Skv: int
    options: dict[str, Any]
    secret_lengths: bool = False
    backward: bool = False
    D: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that random secrets are held against."""
        names = tuple(name for name in CLASSES if name != "random")
        return names + LENGTH_CLASSES * self.secret_lengths

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Random secrets: q, k, v, and lengths where they are secret."""

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        tensors = {"q": rand(1, 2, self.Sq, self.D)}
        tensors |= {name: rand(1, 1, self.Skv, self.D) for name in ("k", "v")}
        if self.secret_lengths:
            tensors["kv_lens"] = torch.randint(0, self.Skv + 1, (1,), generator=generator)
        return tensors

    def run(self, tensors: dict[str, Tensor], **more: Any) -> Tensor:
        """The output, or dq where the case has a backward."""
        attention: Any = lockstep.attention
        asked = {"constant_time": True, "secret_lengths": self.secret_lengths}
        asked |= {**self.options, **more}
        out: Tensor
        if not self.backward:
            out = attention(**tensors, **asked)
            return out
        leaves = {
            name: x.detach().requires_grad_() if x.is_floating_point() else x
            for name, x in tensors.items()
        }
        out = attention(**leaves, **asked)
        dq: Tensor = torch.autograd.grad(
            out, [leaves[name] for name in "qkv"], leaves["q"].detach()
        )[0]
        return dq


CASES = (
    Case("decode", 1, 70, {}),
    Case("decode, secret lengths", 1, 70, {}, secret_lengths=True),
    Case("prefill, causal", 24, 40, {"causal": True}),
    Case("prefill, softcap", 24, 40, {"softcap": 5.0}),
    Case("prefill, secret lengths", 24, 40, {"causal": True}, secret_lengths=True),
    Case("backward", 24, 40, {"causal": True}, backward=True),
)

GPU_CASES = tuple(
    # Tensor cores take 16-bit numbers.
    replace(case, D=64, dtype=torch.bfloat16)
    for case in (
        # Several blocks of keys, and of queries in the backward: loops go round.
        Case("forward", 128, 384, {"causal": True}),
        Case("forward, secret lengths", 128, 384, {"causal": True}, secret_lengths=True),
        Case("decode", 1, 512, {}),
        Case("decode, secret lengths", 1, 512, {}, secret_lengths=True),
        Case("backward", 192, 384, {"causal": True}, backward=True),
    )
)
