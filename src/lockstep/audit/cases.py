"""Attention calls as data: the tensors and options of one, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.error_rule import DIFFERENTIABLE
from lockstep.problem import AttentionProblem, Layout, Tensors, describe, make_options, pad_bias

Douts = tuple[Tensor, Tensor]
"""dout and dlse: the gradients of out and lse that a backward starts from."""

# The call of each layout and the tensors it takes by position.
CALLS: dict[Layout, tuple[str, tuple[str, ...]]] = {
    "dense": ("attention", ("q", "k", "v")),
    "varlen": ("attention_varlen", ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    "paged": ("attention_paged", ("q", "k", "v", "page_table", "kv_lens")),
    "varlen_paged": ("attention_varlen", ("q", "k", "v", "cu_seqlens_q")),
}


@dataclass(frozen=True)
class Case:
    """One call: its tensors, named as in `lockstep.problem.Tensors`, and its options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return Tensors(**self.tensors).layout

    def replaced(self, **changes: Any) -> Case:
        """The same call with other tensors or options; None takes one away."""
        tensors, options = dict(self.tensors), dict(self.options)
        for name, value in changes.items():
            target = tensors if name in Tensors._fields else options
            target[name] = value
            if value is None:
                del target[name]
        return Case(tensors, options)

    def call(self, module: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) from the call of this layout in `module`."""
        name, positional = CALLS[self.layout]
        tensors = dict(self.tensors)
        first = [tensors.pop(argument) for argument in positional]
        found: tuple[Tensor, Tensor] = getattr(module, name)(
            *first, **tensors, **self.options, return_lse=True, **more
        )
        return found

    def pose(self) -> tuple[AttentionProblem, Tensors]:
        """The problem and the tensors that a kernel is given."""
        tensors = Tensors(**self.tensors)
        tensors = tensors._replace(bias=pad_bias(tensors.bias))
        options = {"causal": False, "window": None, "scale": None, "softcap": None, **self.options}
        return describe(tensors, make_options(**options)), tensors


@dataclass(frozen=True)
class Result:
    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> dict[str, Tensor]:
        """Every tensor by name: out, lse, dq, …"""
        return {"out": self.out, "lse": self.lse} | {f"d{n}": g for n, g in self.grads.items()}


def run(case: Case, module: Any = lockstep, douts: Douts | None = None, **more: Any) -> Result:
    """One call; with `douts` also the gradients of all that has one."""
    if douts is None:
        with torch.no_grad():
            return Result(*case.call(module, **more))
    leaves = {
        n: t.detach().requires_grad_() for n, t in case.tensors.items() if n in DIFFERENTIABLE
    }
    out, lse = case.replaced(**leaves).call(module, **more)
    douts = douts[0].to(out.dtype), douts[1].to(lse.dtype)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), douts, materialize_grads=True)
    return Result(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))
