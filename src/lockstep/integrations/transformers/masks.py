"""Masks that transformers asks for, as a `LazyMask`.

transformers describes a mask by a function of positions and a padding mask. Functions that are
causal, bounded by a window or packed are understood, and padding on one side is too; they become a
`Plan` that needs no [Sq, Skv] tensor. Every other mask becomes the boolean mask that PyTorch's
attention would get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.integrations.transformers import lazy_mask
from lockstep.integrations.transformers.lazy_mask import LazyMask, Plan


class Pattern(NamedTuple):
    """A mask function, understood."""

    causal: bool = False
    window: int | None = None  # keys to the left, and to the right unless causal
    packed: Tensor | None = None  # [B, S], the number of each token's sequence


def understand(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function of transformers; None if it is none of those known here.

    Its parts are recognised by their functions, and their parameters by their closures.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():
        # A compiler sees no closures.
        return None
    name = getattr(mask_function, "__qualname__", "").removesuffix(".<locals>.inner_mask")
    cells: tuple[Any, ...] = getattr(mask_function, "__closure__", None) or ()
    made_with = cells[0].cell_contents if len(cells) == 1 else None
    if name == "and_masks.<locals>.and_mask":
        parts = [understand(part) for part in made_with or ()]
        return _both(*parts) if len(parts) == 2 else None
    if name == "sliding_window_overlay":
        return None if made_with is None else Pattern(window=made_with - 1)
    if name == "sliding_window_bidirectional_overlay":
        return None if made_with is None else Pattern(window=made_with)
    if name == "packed_sequence_mask_function":
        return Pattern(packed=made_with)
    return None


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is None or b is None:
        return None
    if (a.window is not None and b.window is not None) or (
        a.packed is not None and b.packed is not None
    ):
        return None
    return Pattern(
        a.causal or b.causal,
        b.window if a.window is None else a.window,
        b.packed if a.packed is None else a.packed,
    )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> LazyMask:
    """The mask function to register: what `masking_utils.eager_mask` takes.

    Returns a mask [B, 1, q_length, kv_length] of `dtype` that is built only if it is looked at.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    pattern = understand(mask_function)
    plan = None
    if pattern is not None:
        plan = _plan(pattern, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if plan is None:
        seen = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**rest, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
            device=device,
        )
        plan = Plan(False, seen=seen)
    return lazy_mask.make(plan, (batch_size, 1, q_length, kv_length), dtype, device)


def _plan(
    pattern: Pattern,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> Plan | None:
    """The plan for a pattern and these keys; None if there is none."""
    window = None
    # A window as long as all keys hides none.
    if pattern.window is not None and pattern.window + 1 < kv_offset + kv_length:
        window = (pattern.window, 0 if pattern.causal else pattern.window)
    position_end = q_offset + q_length - kv_offset  # key index after the last query's
    is_static = isinstance(position_end, Tensor) or position_end != kv_length
    if pattern.packed is not None:
        if not pattern.causal or attention_mask is not None or _is_tracing(pattern.packed):
            return None
        return Plan(True, window, offsets=_offsets(pattern.packed))
    if attention_mask is not None:
        return _padded(
            pattern, window, attention_mask, q_length, kv_length, kv_offset, position_end
        )
    if not pattern.causal:
        # Without a window it does not matter where queries stand; caches are causal.
        return Plan(False, window) if window is None or not is_static else None
    if is_static:
        end = torch.as_tensor(position_end, dtype=torch.int32, device=device)
        return Plan(True, window, end=end.reshape(()).clamp(max=kv_length))
    return Plan(True, window)


def _padded(
    pattern: Pattern,
    window: tuple[int, int] | None,
    attention_mask: Tensor,
    q_length: int,
    kv_length: int,
    kv_offset: int,
    position_end: int | Tensor,
) -> Plan | None:
    """The plan of a padding mask [B, ·] whose ones stand side by side; else None."""
    if _is_tracing(attention_mask):
        return None
    mask = attention_mask.bool()
    missing = kv_offset + kv_length - mask.shape[1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    mask = mask[:, kv_offset : kv_offset + kv_length]  # [B, kv_length]
    key = torch.arange(kv_length, dtype=torch.int32, device=mask.device)
    if pattern.causal:
        mask = mask & (key < position_end)
    count = mask.sum(1, dtype=torch.int32)  # [B]
    start = torch.where(mask, key, kv_length).amin(1).clamp(max=kv_length).int()
    end = torch.where(mask, key + 1, 0).amax(1).int()
    start = torch.minimum(start, end)
    if not bool((end - start == count).all()):
        return None
    is_whole = bool((count == kv_length).all())
    if is_whole:
        return Plan(pattern.causal, window)
    # Rows of padding see keys all the same where nothing depends on where they stand.
    late = torch.zeros_like(end)
    if pattern.causal or window is not None:
        late = (position_end - end).int()
    if not pattern.causal and window is not None and q_length != kv_length:
        return None
    return Plan(pattern.causal, window, ranges=torch.stack([start, end, late], 1))


def _offsets(packed: Tensor) -> Tensor:
    """[n + 1] int32: where sequences begin, all batch rows in one line, from their numbers
    [B, S]."""
    B, S = packed.shape
    begins = torch.ones(B, S, dtype=torch.bool, device=packed.device)
    begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
    first = begins.flatten().nonzero().flatten()
    return torch.nn.functional.pad(first, (0, 1), value=B * S).int()


def _is_tracing(x: Tensor) -> bool:
    from transformers.utils.import_utils import is_tracing

    return bool(is_tracing(x))
