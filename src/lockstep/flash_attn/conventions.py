"""From the conventions of flash_attn to those of `lockstep.attention`, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.api import attention, attention_varlen

WindowSize = tuple["int | None", "int | None"]
NO_WINDOW: WindowSize = (-1, -1)


class Scores(NamedTuple):
    """The options of `lockstep.attention` that say what scores become and which keys count."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> Scores:
        """A causal mask sets the right side of the window to 0; negative sides have no limit."""
        left, right = (None if x is None or x < 0 else x for x in window_size)
        window = None if left is None and (causal or right is None) else (left, right)
        if causal and window is not None:
            window = (left, 0)
        return cls(causal, window, softmax_scale, softcap or None, sinks)


def refuse(function: str, **arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that asks for something."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (value == 0):
            raise NotImplementedError(
                f"{function}: {name} is not supported by Lockstep, got {value}"
            )


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    kv_lens: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of q, k, v with tokens before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(
        q,
        k,
        v,
        **scores._asdict(),
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
    return out.transpose(1, 2), lse


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scores: Scores,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, Dv] and lse [Hq, Tq] of packed tokens.

    Of sequence b, the first `seqused_q[b]` queries and `seqused_k[b]` keys are used. The rest is a
    sequence of its own: queries without keys, whose out is 0, and keys without queries.
    """
    if seqused_q is not None or seqused_k is not None:
        used_q = _used(cu_seqlens_q, seqused_q)
        used_k = _used(cu_seqlens_k, seqused_k)
        # Three parts: used; the other queries; the other keys.
        cu_seqlens_q = torch.stack([used_q, cu_seqlens_q[1:], cu_seqlens_q[1:]], 1)
        cu_seqlens_k = torch.stack([used_k, used_k, cu_seqlens_k[1:]], 1)
        cu_seqlens_q, cu_seqlens_k = (
            torch.cat([x.new_zeros(1), x.flatten()]) for x in (cu_seqlens_q, cu_seqlens_k)
        )
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        **scores._asdict(),
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
    return out, lse.transpose(0, 1)


def in_chunks(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, chunk: int, max_seqlen_k: int
) -> tuple[Tensor, Tensor]:
    """Offsets with every `chunk` keys of a sequence, and the queries at their positions, as a
    sequence of its own.

    The last query stands at the last key, and so it does in each chunk: causal masks and windows
    mean what they meant.
    """
    if chunk < 0:
        raise ValueError(f"attention_chunk takes 0 or more keys, got {chunk}")
    first_q, end_q, first_k, end_k = (
        x[:, None] for cu in (cu_seqlens_q, cu_seqlens_k) for x in (cu[:-1], cu[1:])
    )
    n = max(1, -(-max_seqlen_k // chunk))
    ends = torch.arange(1, n + 1, device=cu_seqlens_k.device, dtype=cu_seqlens_k.dtype) * chunk
    ends_k = torch.minimum(first_k + ends, end_k)  # [B, n]
    moved = first_q + (end_q - first_q) - (end_k - first_k) + ends
    ends_q = torch.minimum(torch.maximum(moved, first_q), end_q).to(cu_seqlens_q.dtype)
    # A sequence without queries or keys, or with fewer chunks than another, has empty ones.
    ends_q[:, -1], ends_k[:, -1] = end_q[:, 0], end_k[:, 0]
    q, k = (torch.cat([x.new_zeros(1), x.flatten()]) for x in (ends_q, ends_k))
    return q, k


def dense_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, chunk: int
) -> tuple[Tensor, Tensor]:
    """`dense`, with queries that see the keys of their own chunk alone."""
    (B, Sq), Skv = q.shape[:2], k.shape[1]
    steps = torch.arange(B + 1, device=q.device, dtype=torch.int32)
    offsets = in_chunks(steps * Sq, steps * Skv, chunk, Skv)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = packed(q, k, v, *offsets, scores)
    return out.view(B, Sq, *out.shape[1:]), lse.reshape(-1, B, Sq).transpose(0, 1)


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    scores: Scores,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: Any = None,
) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, Dv] and lse [Hq, Tq] of packed queries; keys are in pages [pages, page, Hkv, D],
    `kv_lens` [B] of each sequence. `max_seqlen_q` is as a caller gives it."""
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        page_table=block_table,
        kv_lens=kv_lens,
        **scores._asdict(),
        alibi_slopes=alibi_slopes,
        max_seqlen_q=bound_of(max_seqlen_q),
        return_lse=True,
    )
    return out, lse.transpose(0, 1)


def bound_of(max_seqlen_q: Any) -> int | None:
    """The most queries of a sequence, if it is a number: for a tensor the host might wait."""
    return max_seqlen_q if isinstance(max_seqlen_q, int) else None


def _used(offsets: Tensor, used: Tensor | None) -> Tensor:
    """Where the used part of each sequence ends."""
    return offsets[1:] if used is None else offsets[:-1] + used.to(offsets.dtype)
