"""Lockstep's kernels as contenders in `lockstep bench gpu`."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.bench.contender import Call, Contender

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.kernels.kernel import Kernel

INVARIANT, EQUAL = ", query-invariant", ", equal lengths"


def contenders(kernels: list[Kernel]) -> list[Contender]:
    """A contender for each kernel, another for query invariance where the kernel claims it, and a
    bound for packed sequences."""
    found = []
    for kernel in kernels:
        found.append(_contender(kernel, kernel.name))
        if kernel.query_invariant:
            found.append(_contender(kernel, kernel.name + INVARIANT, query_invariant=True))
        found.append(
            Contender(
                kernel.name + EQUAL,
                varlen=partial(_equal_lengths, kernel=kernel.name),
                kind="bound",
            )
        )
    return found


def _contender(kernel: Kernel, name: str, **options: Any) -> Contender:
    options["kernel"] = kernel.name
    # Query invariance concerns out and lse, and matters to chunked prefill and decoding alone.
    plain = "query_invariant" not in options
    return Contender(
        name,
        prefill=partial(_prefill, options=options),
        backward=kernel.prepare_backward is not None and plain,
        decode=partial(_decode, options=options),
        varlen=partial(_varlen, options=options) if plain else None,
        kind="ours",
    )


def _prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any]) -> Call:
    import lockstep

    return partial(lockstep.attention, q, k, v, causal=causal, **options)


def _decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    options: dict[str, Any],
) -> Call:
    import lockstep

    cache = k_pages, v_pages, page_table, kv_lens
    return partial(lockstep.attention_paged, q, *cache, causal=True, **options)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    options: dict[str, Any],
) -> Call:
    import lockstep

    return partial(
        lockstep.attention_varlen, q, k, v, cu_seqlens, cu_seqlens, causal=causal, **options
    )


def _equal_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    kernel: str,
) -> Call:
    """Dense sequences of one length, with as many pairs of a query and a key as the packed ones
    have, and about as many tokens: the speed of packed sequences if all were equally long."""
    import torch

    import lockstep

    T, H, D = q.shape
    pairs = int(cu_seqlens.long().diff().square().sum())
    B = max(1, round(T * T / pairs))
    S = round(math.sqrt(pairs / B))
    x = torch.randn(3, B, H, S, D, dtype=torch.float32, device=q.device).to(q.dtype)
    return partial(lockstep.attention, *x, causal=causal, kernel=kernel)
