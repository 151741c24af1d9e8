"""The contenders of `lockstep bench gpu --suite models`, Lockstep among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import lockstep
from lockstep.bench.contender import Call
from lockstep.bench.models.inputs import Inputs
from lockstep.bench.models.packing import pack

NAME = "lockstep"


@dataclass(frozen=True)
class Contender:
    """One column of the table.

    prepare: Inputs -> a call that returns what `lockstep.attention` would, in its shape. It raises
        NotImplementedError for what the library does not do. What is done once for many calls is
        not timed.
    backward: Autograd differentiates such a call.
    version: The library's version, "" where it is that of torch.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    backward: bool = True
    kind: Literal["ours", "peer"] = "peer"
    version: str = ""


def ours(query_invariant: bool = False) -> list[Contender]:
    """Lockstep as it chooses its kernels itself; also with query invariance, if wanted."""
    found = [Contender(NAME, attention, kind="ours")]
    if query_invariant:
        invariant = partial(attention, query_invariant=True)
        found.append(Contender(f"{NAME}, query-invariant", invariant, kind="ours"))
    return found


def attention(inputs: Inputs, **options: Any) -> Call:
    """The public call of Lockstep for a case."""
    t, layer = inputs.tensors, inputs.case.shape
    options |= {
        "causal": layer.causal,
        "window": layer.window,
        "scale": layer.scale,
        "softcap": layer.softcap,
        "sinks": t.sinks,
    }
    if t.page_table is not None and t.cu_seqlens_q is not None:
        # What peers are told as well.
        longest = pack(inputs).max_seqlen_q
        options |= {"page_table": t.page_table, "kv_lens": t.kv_lens, "max_seqlen_q": longest}
        return partial(lockstep.attention_varlen, t.q, t.k, t.v, t.cu_seqlens_q, **options)
    if t.page_table is not None and t.kv_lens is not None:
        paged = (t.q, t.k, t.v, t.page_table, t.kv_lens)
        return partial(lockstep.attention_paged, *paged, **options)
    if t.cu_seqlens_q is not None and t.cu_seqlens_k is not None:
        packed = (t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k)
        return partial(lockstep.attention_varlen, *packed, **options)
    return partial(lockstep.attention, t.q, t.k, t.v, **options)


def call_of(contender: Contender, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The call that is timed: a forward, or for a backward case the backward alone.

    Raises NotImplementedError where the contender refuses the case.
    """
    if inputs.case.kind != "backward":
        forward = contender.prepare(inputs)
        return lambda: (forward(),)
    if not contender.backward:
        raise NotImplementedError("has no backward")
    leaves = [x.detach().requires_grad_() for x in inputs.leaves]
    with torch.enable_grad():
        out = contender.prepare(inputs.with_leaves(leaves))()
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
