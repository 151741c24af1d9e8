"""Attention calls as data: draw one, run it three ways, compare.

A `Case` runs through a kernel, through the float64 oracle and through `plain`, PyTorch's operators
in the precision of the inputs. `assert_exact` is the correctness rule of Lockstep: the largest
error against the oracle is at most twice PyTorch's, three times for gradients, plus a few roundings
of the largest element.
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
from lockstep.problem import AttentionProblem, Tensors, describe, make_options, pad_bias

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Times PyTorch's error, plus fp32 roundings of the largest element: PyTorch may happen to be nearly
# exact. With one query row, say, it derives a softmax it has saved; ours comes from the lse.
FORWARD_LIMIT, GRADIENT_LIMIT = (2.0, 4), (3.0, 32)
# What roundings on the way may leave, of a largest element of about 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
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


def draw(
    Sq: int,
    Skv: int,
    *,
    B: int = 1,
    Hq: int = 2,
    Hkv: int = 2,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Case:
    """A dense case of random numbers; `more` are further tensors and options."""
    q, k = torch.randn(B, Hq, Sq, D).to(dtype), torch.randn(B, Hkv, Skv, D).to(dtype)
    v = torch.randn(B, Hkv, Skv, D if Dv is None else Dv).to(dtype)
    return Case({"q": q, "k": k, "v": v}).replaced(**more)


def draw_varlen(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    Hq: int = 4,
    Hkv: int = 2,
    D: int = 64,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Case:
    """Packed sequences of the lengths given."""
    q = torch.randn(sum(q_lens), Hq, D).to(dtype)
    k, v = torch.randn(2, sum(kv_lens), Hkv, D).to(dtype)
    tensors = {"q": q, "k": k, "v": v}
    for name, lens in (("cu_seqlens_q", q_lens), ("cu_seqlens_k", kv_lens)):
        tensors[name] = torch.tensor([0, *lens]).cumsum(0)
    return Case(tensors).replaced(**more)


def paginate(case: Case, page_size: int, *, garbage: float = 0.0) -> Case:
    """A dense case with its keys in shuffled pages; what no sequence uses is `garbage`."""
    k, v = case.tensors["k"], case.tensors["v"]
    B, _, Skv, _ = k.shape
    lens = case.tensors.get("kv_lens", torch.full((B,), Skv))
    per_sequence = -(-Skv // page_size)
    n_pages = B * per_sequence + 3
    page_table = torch.randperm(n_pages)[: B * per_sequence].view(B, per_sequence)
    pools = []
    for x in (k, v):
        pool = x.new_full((n_pages, page_size, x.shape[1], x.shape[3]), garbage)
        for b in range(B):
            for i in range(int(lens[b])):
                pool[page_table[b, i // page_size], i % page_size] = x[b, :, i]
        pools.append(pool)
    return case.replaced(k=pools[0], v=pools[1], page_table=page_table, kv_lens=lens)


def strided_biases(B: int, Hq: int, Sq: int, Skv: int) -> dict[str, Tensor]:
    """Biases of one shape, none of them contiguous."""
    whole = (B, Hq, Sq, Skv)
    return {
        "one for all keys": torch.randn(B, Hq, Sq, 1).expand(whole),
        "one for all queries": torch.randn(B, Hq, 1, Skv).expand(whole),
        "one for all heads": torch.randn(B, 1, Sq, Skv).expand(whole),
        "one for all sequences": torch.randn(Hq, Sq, Skv).expand(whole),
        "a row for all": torch.randn(Skv).expand(whole),
        "a column for all": torch.randn(Sq, 1).expand(whole),
        "a number for all": torch.randn(()).expand(whole),
        "keys before queries": torch.randn(B, Hq, Skv, Sq).mT,
        "every third key": torch.randn(B, Hq, Sq, 3 * Skv)[..., 1::3],
        "heads last": torch.randn(B, Sq, Skv, Hq).permute(0, 3, 1, 2),
        "within rows that are longer": torch.randn(B, Hq, Sq, Skv + 5)[..., 3:-2],
    }


def pose(case: Case) -> tuple[AttentionProblem, Tensors]:
    """What a kernel is asked to run, and the tensors it gets."""
    tensors = Tensors(**case.tensors)
    tensors = tensors._replace(bias=pad_bias(tensors.bias))
    options = {"causal": False, "window": None, "scale": None, "softcap": None, **case.options}
    return describe(tensors, make_options(**options)), tensors


def supporting(case: Case, *, backward: bool = False) -> list[Kernel]:
    """The kernels that say they run this case, the oracle aside."""
    problem, _ = pose(case)
    return [
        kernel
        for kernel in dispatch.KERNELS
        if kernel.name != "oracle"
        and kernel.supports(problem) is None
        and not (backward and _refuses_backward(kernel, problem))
    ]


def statistics_of(problem: AttentionProblem, lse: torch.Tensor) -> torch.Tensor:
    """What a GPU kernel would have saved, had it no more than the lse: m = lse and l = 1."""
    natural = problem.scale if problem.has_raw_scores else 1.0
    m = (lse.double() / natural).masked_fill(lse == -torch.inf, torch.inf).float()
    return torch.stack((m, torch.ones_like(m)), -1)


def _refuses_backward(kernel: Kernel, problem: AttentionProblem) -> bool:
    if kernel.backward is None or kernel.supports_backward is None:
        return kernel.backward is None
    return kernel.supports_backward(problem) is not None


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


def _largest(x: Tensor) -> float:
    return float(x.masked_fill(x.isinf(), 0.0).abs().max()) if x.numel() else 0.0


def assert_exact(case: Case, *, gradients: bool = False, kernel: str | None = None) -> None:
    """The correctness rule for every kernel that runs the case, or for the one named."""
    seeds = draw_seeds(case) if gradients else None
    exact = run(case, reference, seeds).items()
    theirs = run(case, plain, seeds).items()
    names = [kernel] if kernel else [k.name for k in supporting(case, backward=gradients)]
    for name in names:
        for what, ours in run(case, lockstep, seeds, kernel=name).items().items():
            factor, roundings = FORWARD_LIMIT if what in ("out", "lse") else GRADIENT_LIMIT
            floor = roundings * torch.finfo(torch.float32).eps
            if ours.dtype != torch.float32:
                floor += torch.finfo(ours.dtype).eps
            allowed = factor * error(theirs[what], exact[what]) + floor * _largest(exact[what])
            mine = error(ours, exact[what])
            assert mine <= allowed, f"{name}: {what} is off by {mine:.3g}, allowed {allowed:.3g}"


def assert_near(case: Case) -> None:
    """Every kernel that runs the case is near the oracle, with its gradients where it has them.

    For problems that are so small or so odd that PyTorch may be exact by chance.
    """
    limit = TOLERANCE[case.tensors["q"].dtype]
    seeds = None if case.layout == "paged" else draw_seeds(case)
    exact = run(case, reference, seeds).items()
    derivable = [] if seeds is None else supporting(case, backward=True)
    for kernel in supporting(case):
        result = run(case, seeds=seeds if kernel in derivable else None, kernel=kernel.name)
        for what, ours in result.items().items():
            allowed = limit * (1 + _largest(exact[what]))
            mine = error(ours, exact[what])
            assert mine <= allowed, f"{kernel.name}: {what} is off by {mine:.3g} of {allowed:.3g}"


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
