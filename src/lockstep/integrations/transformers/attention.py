"""One layer's attention as transformers calls it, by `lockstep.attention` or `attention_varlen`.

Padded batches run as packed ones, without a copy (`lockstep.padded`); their padding becomes 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import lockstep
from lockstep.integrations.transformers.lazy_mask import LazyMask, Plan, plan_of, seen_by
from lockstep.padded import attention_in_ranges

# What models pass along that changes nothing here: about caches, outputs and losses, positions
# that rotary embeddings have used, and what other implementations want to know of `cu_seq_lens`.
IGNORED = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "past_key_values",
        "past_key_value",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "labels",
        "deterministic",
        "max_length_q",
        "max_length_k",
        "layer_idx",
        "logits_to_keep",
    }
)


class LayerOptions(NamedTuple):
    """The options of `lockstep.attention` that a layer sets."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    query_invariant: bool


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    query_invariant: bool = False,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function to register.

    Args:
        query: [B, Hq, Sq, D]; key: [B, Hkv, Skv, D]; value: [B, Hkv, Skv, Dv]
        attention_mask: What `masks.make_mask` made, or a mask [B or 1, Hq or 1, Sq, Skv]: boolean,
            True for what counts, or of numbers to be added to the scores.
        indices: [B, Sq, n] int, the keys that sparse attention has chosen for each query.

    Returns:
        out [B, Sq, Hq, Dv], and None for the weights, which are never there as a whole.

    Raises:
        ValueError: An argument asks for something that would otherwise be ignored in silence.
    """
    _refuse(dropout, rest)
    sinks = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(query.dtype)
    options = LayerOptions(scaling, softcap, sinks, query_invariant)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if cu_seq_lens_q is not None:
        offsets = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        window = _window(sliding_window, is_causal)
        return _packed(options, query, key, value, offsets, is_causal, window), None
    lengths = (query.shape[2], key.shape[2])
    if attention_mask is None:
        plan = Plan(is_causal, _window(sliding_window, is_causal))
    elif isinstance(attention_mask, LazyMask) and attention_mask.shape[2:] == lengths:
        plan = plan_of(attention_mask)
    else:
        mask = _chosen(attention_mask[..., : lengths[1]], indices)
        return _biased(options, query, key, value, mask, position_bias), None
    if not (plan.seen is None and position_bias is None and indices is None):
        mask = _chosen(seen_by(plan, *lengths, key.device), indices)
        return _biased(options, query, key, value, mask, position_bias), None
    if plan.offsets is not None:
        offsets = (plan.offsets, plan.offsets)
        return _packed(options, query, key, value, offsets, True, plan.window), None
    if plan.ranges is not None:
        return _in_ranges(options, query, key, value, plan, plan.ranges), None
    kv_lens = None if plan.end is None else plan.end.expand(query.shape[0]).contiguous()
    out = lockstep.attention(
        query,
        key,
        value,
        causal=plan.causal,
        window=plan.window,
        kv_lens=kv_lens,
        **options._asdict(),
    )
    return out.transpose(1, 2), None


def _refuse(dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attn_implementation='lockstep' has no dropout, got dropout={dropout}: set the "
            "model's attention dropout to 0, or call model.eval()"
        )
    for name, value in rest.items():
        if name not in IGNORED and value is not None and value is not False:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"attn_implementation='lockstep' does not know {name}={shown}")


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int] | None:
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _chosen(mask: Tensor, indices: Tensor | None) -> Tensor:
    """A mask [B or 1, Hq or 1, Sq, Skv], all but the chosen keys hidden."""
    if indices is None:
        return mask
    nothing = torch.zeros((*indices.shape[:2], mask.shape[3]), dtype=torch.bool, device=mask.device)
    is_chosen = nothing.scatter(2, indices.long(), True)[:, None]  # [B, 1, Sq, Skv]
    return mask & is_chosen if mask.dtype == torch.bool else mask.where(is_chosen, -torch.inf)


def _biased(
    options: LayerOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    more: Tensor | None,
) -> Tensor:
    """Attention under a mask [B or 1, Hq or 1, Sq, Skv], boolean or of numbers to be added."""
    bias = mask
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = torch.where(mask, zero, -torch.inf)
    if more is not None:
        bias = bias + more
    return lockstep.attention(query, key, value, bias=bias, **options._asdict()).transpose(1, 2)


def _packed(
    options: LayerOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: tuple[Tensor, Tensor],
    causal: bool,
    window: tuple[int, int] | None,
) -> Tensor:
    B, H, S, _ = query.shape
    q, k, v = (x.transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (query, key, value))
    out = lockstep.attention_varlen(
        q, k, v, *offsets, causal=causal, window=window, **options._asdict()
    )
    return out.view(B, S, H, -1)


def _in_ranges(
    options: LayerOptions, query: Tensor, key: Tensor, value: Tensor, plan: Plan, ranges: Tensor
) -> Tensor:
    start, end, late = ranges.unbind(1)
    arguments = {"causal": plan.causal, "window": plan.window, **options._asdict()}
    if query.shape[2] == 1 and plan.causal:
        # A new token is no padding: the same call, and kernel, as for one sequence by itself.
        out: Tensor = lockstep.attention(
            query, key, value, kv_starts=start, kv_lens=end, **arguments
        )
        return out.transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # The first query of a window to both sides stands at the first key.
    early = start if plan.window is not None and not plan.causal else None
    return attention_in_ranges(q, k, v, start, end, early=early, late=late, **arguments)[0]
