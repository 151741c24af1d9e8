"""Attention on several ranks, bit by bit beside one process.

Every rank draws the same whole tensors, computes with `lockstep.attention` what one process gets,
and compares its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import lockstep
from lockstep import dispatch
from lockstep.audit.bits import Difference, first_difference
from lockstep.distributed import context_parallel_attention, shard
from lockstep.options import make_options
from lockstep.problem import AttentionProblem, Tensors, describe

TOKENS = 2
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "behind": {"window": (90, None)},
    "both": {"window": (50, 30)},
}


@dataclass(frozen=True)
class Case:
    """One call, and how it is shared."""

    method: str
    balanced: bool
    S: int
    Hq: int = 4
    Hkv: int = 2
    D: int = 32
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    mask: str = "causal"
    sinks: bool = False
    softcap: float | None = None
    kernel: str | None = None
    query_invariant: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {
            **MASKS[self.mask],
            "softcap": self.softcap,
            "kernel": self.kernel,
            "query_invariant": self.query_invariant,
        }

    def __str__(self) -> str:
        shards = "balanced" if self.balanced else "contiguous"
        return f"{self.method}, {shards} shards, {self.mask}"


def cases(methods: tuple[str, ...], masks: tuple[str, ...], **sizes: Any) -> Iterator[Case]:
    """Each mask with each method and kind of shards."""
    for mask, method, balanced in product(masks, methods, (False, True)):
        yield Case(method, balanced, mask=mask, sinks=mask != "full", **sizes)


def compare(case: Case, group: ProcessGroup) -> Difference | None:
    """The first bit of this rank's results and gradients that one process has otherwise."""
    case = replace(case, kernel=_kernel(case))
    whole, expected = _one_process(replace(case, method="", balanced=False))
    parts = {name: _shard(name, x, case, group) for name, x in whole.items()}
    sharing = {"mesh": group, "method": case.method, "balanced": case.balanced}
    got = run_with_gradients(parts, context_parallel_attention, **sharing, **case.options)
    if case.sinks:
        dist.all_reduce(got["dsinks"], group=group)
    mine = {name: _shard(name, x, case, group) for name, x in expected.items()}
    return first_difference(mine, got)


def _kernel(case: Case) -> str | None:
    """The kernel that both calls name; a ring does not take the default on every GPU."""
    if case.kernel is not None or case.method != "ring":
        return case.kernel
    found = dispatch.select_carry(_problem(case))
    return None if found is None else found.name


def without_invariance(case: Case) -> bool:
    """Whether the kernel that a case names makes no promise of query-invariance, or not for it."""
    kernel = dispatch.candidates(case.kernel)[0]
    strict, plain = (
        dispatch.refusal(kernel, _problem(replace(case, query_invariant=asked)), backward=True)
        for asked in (True, False)
    )
    return not kernel.query_invariant or (strict is not None and plain is None)


def _problem(case: Case) -> AttentionProblem:
    """The problem of one process with the whole sequence, without sinks."""
    mask, heads = MASKS[case.mask], (case.Hq, case.Hkv, case.Hkv)
    q, k, v = (
        torch.empty(2, H, case.S, case.D, dtype=case.dtype, device=case.device) for H in heads
    )
    options = make_options(
        mask.get("causal", False), mask.get("window"), None, case.softcap, case.query_invariant
    )
    return describe(Tensors(q, k, v), options)


@lru_cache(maxsize=2)
def _one_process(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole tensors, and what one process makes of them: it knows no method and no shards."""
    whole = _draw(case)
    return whole, run_with_gradients(whole, lockstep.attention, **case.options)


def _shard(name: str, x: Tensor, case: Case, group: ProcessGroup) -> Tensor:
    """A rank's shard of x; every rank has parameters, and their gradients, whole."""
    return x if name.endswith("sinks") else shard(x, group, TOKENS, balanced=case.balanced)


def _draw(case: Case) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(case.S)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random).to(case.device)

    heads = {"q": case.Hq, "k": case.Hkv, "v": case.Hkv, "dout": case.Hq}
    drawn = {name: draw(2, H, case.S, case.D).to(case.dtype) for name, H in heads.items()}
    drawn["dlse"] = draw(2, case.Hq, case.S)
    if case.sinks:
        drawn["sinks"] = draw(case.Hq)
    return drawn


def run_with_gradients(
    given: Mapping[str, Tensor], attention: Callable[..., Any], **options: Any
) -> dict[str, Tensor]:
    """out, lse and every gradient of a call."""
    leaves = {n: given[n].clone().requires_grad_() for n in ("q", "k", "v", "sinks") if n in given}
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = attention(q, k, v, sinks=leaves.get("sinks"), return_lse=True, **options)
    torch.autograd.backward((out, lse), (given["dout"], given["dlse"]))
    found = {"out": out.detach(), "lse": lse.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad
    return found
