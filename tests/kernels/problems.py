"""Attention calls as data: draw one, run it three ways, compare.

A `Case` runs through a kernel, through the float64 oracle and through `plain`, PyTorch's operators
in the precision of the inputs. `assert_exact` is the correctness rule of Lockstep: the largest
error against the oracle is at most twice PyTorch's, three times for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import plain
import torch
from torch import Tensor

import lockstep
from lockstep import dispatch, reference
from lockstep.kernels.kernel import Kernel
from lockstep.problem import Tensors, describe, make_options, pad_bias

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORWARD_LIMIT, GRADIENT_LIMIT = 2.0, 3.0
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")

# The call of each layout and the tensors it takes by position.
_CALLS = {
    "dense": ("attention", ("q", "k", "v")),
    "varlen": ("attention_varlen", ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    "paged": ("attention_paged", ("q", "k", "v", "page_table", "kv_lens")),
}


@dataclass(frozen=True)
class Case:
    """One call: its tensors, named as in `lockstep.problem.Tensors`, and its options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> str:
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
        name, positional = _CALLS[self.layout]
        tensors = dict(self.tensors)
        first = [tensors.pop(argument) for argument in positional]
        return getattr(module, name)(*first, **tensors, **self.options, return_lse=True, **more)


@dataclass(frozen=True)
class Result:
    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> dict[str, Tensor]:
        """Every tensor by name: out, lse, dq, …"""
        return {"out": self.out, "lse": self.lse} | {f"d{n}": g for n, g in self.grads.items()}


def supporting(case: Case, *, backward: bool = False) -> list[Kernel]:
    """The kernels that say they run this case, the oracle aside."""
    names = ("causal", "window", "scale", "softcap")
    defaults = {"causal": False}
    options = make_options(*({**defaults, **case.options}.get(name) for name in names))
    tensors = Tensors(**case.tensors)
    problem = describe(tensors._replace(bias=pad_bias(tensors.bias)), options)
    return [
        kernel
        for kernel in dispatch.KERNELS
        if kernel.name != "oracle"
        and kernel.supports(problem) is None
        and (kernel.backward is not None or not backward)
    ]


def run(
    case: Case, module: Any = lockstep, seeds: tuple[Tensor, Tensor] | None = None, **more: Any
) -> Result:
    """One call; with `seeds` = (dout, dlse) also the gradients of all that has one."""
    if seeds is None:
        with torch.no_grad():
            return Result(*case.call(module, **more))
    leaves = {
        n: t.detach().requires_grad_() for n, t in case.tensors.items() if n in DIFFERENTIABLE
    }
    out, lse = case.replaced(**leaves).call(module, **more)
    seeds = seeds[0].to(out.dtype), seeds[1].to(lse.dtype)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), seeds, materialize_grads=True)
    return Result(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def draw_seeds(case: Case) -> tuple[Tensor, Tensor]:
    """Random (dout, dlse) for a case; both fit its dtype."""
    q, v = case.tensors["q"], case.tensors["v"]
    return torch.randn(*q.shape[:-1], v.shape[-1]).to(q.dtype), torch.randn(q.shape[:-1])


def error(result: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; infinities have to be the same ones."""
    result, exact = result.double(), exact.double()
    if not result.numel():
        return 0.0
    same = result == exact
    return float((result - exact).masked_fill(same, 0.0).abs().max())


def assert_exact(case: Case, *, gradients: bool = False, kernel: str | None = None) -> None:
    """The correctness rule for every kernel that runs the case, or for the one named."""
    seeds = draw_seeds(case) if gradients else None
    exact = run(case, reference, seeds).items()
    theirs = run(case, plain, seeds).items()
    names = [kernel] if kernel else [k.name for k in supporting(case, backward=gradients)]
    for name in names:
        for what, ours in run(case, lockstep, seeds, kernel=name).items().items():
            # Where PyTorch happens to be exact, one rounding of the largest element is fair.
            finite = exact[what].masked_fill(exact[what].isinf(), 0.0)
            eps = torch.finfo(ours.dtype).eps
            floor = eps * float(finite.abs().max()) if finite.numel() else 0.0
            limit = FORWARD_LIMIT if what in ("out", "lse") else GRADIENT_LIMIT
            allowed = limit * error(theirs[what], exact[what]) + floor
            mine = error(ours, exact[what])
            assert mine <= allowed, f"{name}: {what} is off by {mine:.3g}, allowed {allowed:.3g}"


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor as integers."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; one NaN is as good as another."""
    return a.shape == b.shape and a.dtype == b.dtype and not differing(a, b)


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in a bit, two NaNs aside."""
    return int(((bits(a) != bits(b)) & ~(a.isnan() & b.isnan())).sum())


def assert_same_bits(a: Result, b: Result) -> None:
    mine, other = a.items(), b.items()
    assert mine.keys() == other.keys()
    for what in mine:
        x, y = mine[what], other[what]
        assert x.shape == y.shape, f"{what}: {list(x.shape)} against {list(y.shape)}"
        assert same_bits(x, y), f"{what}: {differing(x, y)} of {x.numel()} elements differ"
