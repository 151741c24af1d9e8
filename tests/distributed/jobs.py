"""What ranks do in tests. `python -m jobs JOB ARGS FOLDER RANKS RANK` is one rank."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep.audit.bits import first_difference
from lockstep.distributed import context_parallel_attention, shard, unshard

TOKENS = 2


def bits(cases: list[dict[str, Any]]) -> list[str]:
    """For each case, the first difference between ranks and one process, or an empty string."""
    return [compare(**case) for case in cases]


def compare(
    method: str | None,
    S: int,
    heads: tuple[int, int] = (4, 2),
    dtype: str = "float32",
    balanced: bool = False,
    sinks: bool = False,
    D: int = 32,
    **options: Any,
) -> str:
    Hq, Hkv = heads
    torch.manual_seed(S)
    kind = getattr(torch, dtype)
    sizes = {"q": (Hq, D), "k": (Hkv, D), "v": (Hkv, D), "dout": (Hq, D)}
    whole = {name: torch.randn(2, H, S, d).to(kind) for name, (H, d) in sizes.items()}
    whole["dlse"] = torch.randn(2, Hq, S)
    parts = {name: shard(x, group(), TOKENS, balanced=balanced) for name, x in whole.items()}
    if sinks:
        whole["sinks"] = parts["sinks"] = torch.randn(Hq)
    expected = run(whole, lockstep.attention, **options)
    expected = {
        name: x if name == "dsinks" else shard(x, group(), TOKENS, balanced=balanced)
        for name, x in expected.items()
    }
    got = run(
        parts,
        context_parallel_attention,
        mesh=group(),
        method=method,
        balanced=balanced,
        **options,
    )
    if sinks:
        dist.all_reduce(got["dsinks"])
    found = first_difference(expected, got)
    return "" if found is None else f"{method} S={S} {heads} {dtype} {options}: {found}"


def run(given: dict[str, Tensor], attention: Any, **options: Any) -> dict[str, Tensor]:
    """out, lse and every gradient of a call."""
    leaves = {n: given[n].clone().requires_grad_() for n in ("q", "k", "v", "sinks") if n in given}
    q, k, v = (leaves[name] for name in "qkv")
    window = options.pop("window", None)
    options |= {"window": None if window is None else tuple(window)}
    out, lse = attention(
        q, k, v, sinks=leaves.get("sinks"), return_lse=True, query_invariant=True, **options
    )
    torch.autograd.backward((out, lse), (given["dout"], given["dlse"]))
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def round_trips(sizes: list[int]) -> bool:
    """Whether `unshard` undoes `shard`, its gradient included."""
    good = True
    for S in sizes:
        for balanced in (False, True):
            x = torch.randn(2, S, 3, generator=torch.Generator().manual_seed(S))
            part = shard(x, group(), 1, balanced=balanced).requires_grad_()
            whole = unshard(part, group(), 1, balanced=balanced)
            whole.backward(x)
            good &= torch.equal(whole, x) and torch.equal(part.grad, part)
            labels = torch.arange(S)
            mine = shard(labels, group(), 0, balanced=balanced)
            good &= torch.equal(unshard(mine, group(), 0, balanced=balanced), labels)
    return good


def refuse(wrong: dict[str, dict[str, Any]]) -> list[str]:
    """What each rank is told, one call after the other, where one rank passes something else.

    `wrong` has by name of the argument what the last rank passes: `{"causal": true}` and so on.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    said = []
    for changes in wrong:
        given: dict[str, Any] = {"shape": [1, 4, 8, 16], "dtype": "float32", "causal": False}
        given |= changes if last else {}
        x = torch.randn(given.pop("shape")).to(getattr(torch, given.pop("dtype")))
        try:
            context_parallel_attention(x, x, x, mesh=group(), **given)
            said.append("")
        except (ValueError, TypeError, NotImplementedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def lose_a_rank(lost: int) -> str:
    """What is said on the ranks that are left."""
    x = torch.randn(1, 4, 8, 16)
    context_parallel_attention(x, x, x, mesh=group())
    if dist.get_rank() == lost:
        os._exit(3)
    try:
        context_parallel_attention(x, x, x, mesh=group())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def main(job: str, args: str, folder: str, ranks: str, rank: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=100),
    )
    result = globals()[job](*json.loads(args))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    # Without a barrier: another rank may be gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
