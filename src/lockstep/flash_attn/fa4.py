"""The functions of FlashAttention 4's `flash_attn.cute`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.flash_attn.conventions import Scores, WindowSize, dense, packed, paged, refuse

NO_WINDOW: WindowSize = (None, None)
# Arguments that change how FlashAttention 4 computes, and not what.
HINTS = frozenset(
    {
        "num_splits",
        "pack_gqa",
        "deterministic",
        "scheduler_metadata",
        "disable_scheduler_metadata",
        "seqlen_k_per_split",
        "min_seqlen_k",
    }
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """`lockstep.flash_attn.flash_attn_func` with the arguments of FlashAttention 4, by name.

    Args:
        learnable_sink: [Hq], one more logit per head in the denominator; differentiable.
        others: `num_splits`, `pack_gqa`, `deterministic` and hints to the scheduler, which
            Lockstep does not need.

    Returns:
        out [B, Sq, Hq, Dv], and lse [B, Hq, Sq] or None.

    Raises:
        NotImplementedError: Another argument is given: `score_mod`, `mask_mod`, `qv`, ….

    Example:
        >>> q = torch.randn(2, 100, 8, 64)
        >>> out, _ = flash_attn_func(q, q, q, causal=True, window_size=(63, None))
        >>> out.shape
        torch.Size([2, 100, 8, 64])
    """
    _refuse("flash_attn_func", others)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, learnable_sink)
    out, lse = dense(q, k, v, scores)
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = NO_WINDOW,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """`lockstep.flash_attn.flash_attn_varlen_func` with the arguments of FlashAttention 4.

    With `page_table`, k and v are pages [pages, page, Hkv, D], and `seqused_k` or `cu_seqlens_k`
    says how many keys a sequence has. There, no sequence has more queries than `max_seqlen_q`.

    Raises:
        ValueError: `cu_seqlens_q` or, without pages, `cu_seqlens_k` is not given.

    Example:
        >>> q, ends = torch.randn(100, 8, 64), torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends)[0].shape
        torch.Size([100, 8, 64])
    """
    _refuse("flash_attn_varlen_func", others)
    scores = Scores.of(softmax_scale, causal, window_size, softcap, learnable_sink)
    if cu_seqlens_q is None:
        raise ValueError("flash_attn_varlen_func needs cu_seqlens_q")
    if page_table is not None:
        refuse("flash_attn_varlen_func with page_table", seqused_q=_kind(seqused_q))
        lens = cu_seqlens_k.diff() if cu_seqlens_k is not None and seqused_k is None else seqused_k
        if lens is None:
            raise ValueError("flash_attn_varlen_func needs seqused_k or cu_seqlens_k with pages")
        out, lse = paged(q, k, v, cu_seqlens_q, lens, page_table, scores, max_seqlen_q=max_seqlen_q)
    elif cu_seqlens_k is None:
        raise ValueError("flash_attn_varlen_func needs cu_seqlens_k, or page_table and seqused_k")
    else:
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scores, seqused_q, seqused_k)
    return out, lse if return_lse else None


def _refuse(function: str, others: dict[str, Any]) -> None:
    given = {name: x for name, x in others.items() if name not in HINTS}
    refuse(function, **{name: _kind(x) for name, x in given.items()})


def _kind(x: Any) -> str | None:
    return None if x is None else type(x).__name__
