"""The contenders of `lockstep bench gpu`: a kernel of Lockstep, or a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], "Tensor"]
Prefill = Callable[["Tensor", "Tensor", "Tensor", bool], Call]
Decode = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], Call]
Varlen = Callable[["Tensor", "Tensor", "Tensor", "Tensor", int, bool], Call]


@dataclass(frozen=True)
class Contender:
    """One column of the tables, by what it can do; None for what it cannot.

    Each function prepares a call: what is done once for many calls is not timed.

    prefill: (q, k, v [B, H, S, D], causal) -> call that returns [B, H, S, D]; autograd
        differentiates it if `backward`.
    decode: (q [B, Hq, 1, D], k_pages, v_pages [n_pages, page, Hkv, D], page_table [B, pages],
        kv_lens [B]) -> call that returns [B, Hq, 1, D].
    varlen: (q, k, v [T, H, D], cu_seqlens [B + 1] int32, longest, causal) -> call that returns
        [T, H, D].

    kind: "ours", "peer", or "bound": a call on other data that shows what could be reached at best,
        which is timed and not checked.
    tokens_first: prefill's tensors lie in memory as [B, S, H, D], as this library prefers them.
    version: The library's version, "" where it is that of torch.
    """

    name: str
    prefill: Prefill | None = None
    backward: bool = False
    decode: Decode | None = None
    varlen: Varlen | None = None
    kind: Literal["ours", "peer", "bound"] = "peer"
    tokens_first: bool = False
    version: str = ""
