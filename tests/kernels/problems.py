"""Attention calls as data: draw one, run it, hold it against the oracle.

`assert_exact` is the correctness rule of Lockstep, `lockstep.error_rule`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep import dispatch
from lockstep.audit import values
from lockstep.audit.cases import Case, Douts, Result, run
from lockstep.error_rule import error, expect
from lockstep.kernels.kernel import Kernel
from lockstep.problem import AttentionProblem, Tensors

__all__ = ["Case", "Result", "run"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VALUES = {x.name: x for x in values.VALUES}


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
    numbers: str = "normal",
    **more: Any,
) -> Case:
    """A dense case of random numbers, by the name of their distribution; `more` are further tensors
    and options."""
    kind = VALUES[numbers]
    shapes = {"q": (B, Hq, Sq, D), "k": (B, Hkv, Skv, D), "v": (B, Hkv, Skv, Dv or D)}
    tensors = {name: values.draw(getattr(kind, name), s, dtype) for name, s in shapes.items()}
    return Case(tensors, dict(kind.options)).replaced(**more)


def unwritten(
    Sq: int,
    Skv: int,
    *,
    B: int = 1,
    Hq: int = 2,
    Hkv: int = 2,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **more: Tensor,
) -> Tensors:
    """Tensors of a dense call that is compiled and not run: no number in them is ever written."""
    shapes = (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv or D)
    return Tensors(*(torch.empty(shape, dtype=dtype) for shape in shapes), **more)


def draw_varlen(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    Hq: int = 4,
    Hkv: int = 2,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Case:
    """Packed sequences of the lengths given."""
    q = torch.randn(sum(q_lens), Hq, D).to(dtype)
    k, v = torch.randn(2, sum(kv_lens), Hkv, D).to(dtype)
    v = v if Dv is None else v[..., :Dv].contiguous()
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
            i = torch.arange(int(lens[b]))
            pool[page_table[b, i // page_size], i % page_size] = x[b, :, i].transpose(0, 1)
        pools.append(pool)
    return case.replaced(k=pools[0], v=pools[1], page_table=page_table, kv_lens=lens)


def ragged(case: Case, q_lens: list[int]) -> Case:
    """A case in pages whose sequences have as many queries as said, the last ones of each."""
    q = case.tensors["q"]
    rows = [x[:, x.shape[1] - n :].transpose(0, 1) for x, n in zip(q, q_lens, strict=True)]
    return case.replaced(q=torch.cat(rows), cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0))


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
    return case.pose()


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
    if kernel.prepare_backward is None or kernel.supports_backward is None:
        return kernel.prepare_backward is None
    return kernel.supports_backward(problem) is not None


def draw_douts(case: Case) -> Douts:
    """Random (dout, dlse) for a case; both fit its dtype."""
    q, v = case.tensors["q"], case.tensors["v"]
    return torch.randn(*q.shape[:-1], v.shape[-1]).to(q.dtype), torch.randn(q.shape[:-1])


def assert_exact(case: Case, *, gradients: bool = False, kernel: str | None = None) -> None:
    """The error rule for every kernel that runs the case, or for the one named."""
    douts = draw_douts(case) if gradients else None
    names = [kernel] if kernel else [k.name for k in supporting(case, backward=gradients)]
    for name in names:
        assert_allowed(case, run(case, lockstep, douts, kernel=name).items(), douts, name)


def assert_all_exact(case: Case) -> None:
    """The error rule for every kernel that runs the case, with its gradients where it has them."""
    douts = None if case.layout == "paged" else draw_douts(case)
    derivable = [] if douts is None else supporting(case, backward=True)
    for kernel in supporting(case):
        wanted = douts if kernel in derivable else None
        assert_allowed(case, run(case, douts=wanted, kernel=kernel.name).items(), wanted)


def assert_allowed(
    case: Case, results: dict[str, Tensor], douts: Douts | None = None, kernel: str = ""
) -> None:
    """The error rule for results by name, out, lse, dq, …, of whatever made them."""
    problem, tensors = case.pose()
    expected = expect(problem, tensors, *(douts or ()))
    for name, result in results.items():
        exact = expected[name].exact
        mine, allowed = error(result.reshape(exact.shape), exact), expected[name].allowed
        assert mine <= allowed, f"{kernel} {name} is off by {mine:.3g}, allowed {allowed:.3g}"


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
