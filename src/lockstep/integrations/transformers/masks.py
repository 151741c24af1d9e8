"""What transformers asks to be masked, in a form that needs no [Sq, Skv] tensor.

transformers describes a mask by a function of positions and a padding mask, and hands whatever our
mask function returns to every layer's attention, unchanged if it has four dims. Most masks are
simple: causal or not, a window or not, keys from a first to a last one of each sequence. Those
become a `Plan`, and travel as an int32 tensor [B or 1, A, W, C] whose sizes say what the host has
to know and whose numbers say what only the device knows:

    A    1: all keys, 2: causal, 3: packed sequences, causal
    W    1: no window, else the window's left side + 2; its right side is 0 if causal, else the left
    C    1: no numbers
         2: `end`, how many keys of a static cache are in use, twice, for all sequences
         3: `start`, `end` and `late`: keys from start to end count, and so many positions lie
            behind them up to the last query's, whose rows are padding
         packed: the offsets of all sequences, the tokens of all batch rows being numbered through

Every other mask becomes the boolean mask that PyTorch's attention would get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FULL, CAUSAL, PACKED = 1, 2, 3


class Plan(NamedTuple):
    """What an encoded mask says; see the module."""

    causal: bool
    window: tuple[int, int] | None
    end: Tensor | None = None  # []
    ranges: Tensor | None = None  # [B, 3]
    offsets: Tensor | None = None  # [n + 1]

    def encode(self) -> Tensor:
        kind = PACKED if self.offsets is not None else CAUSAL if self.causal else FULL
        sides = 1 if self.window is None else self.window[0] + 2
        if self.ranges is not None:
            numbers = self.ranges
        elif self.end is not None:
            numbers = self.end.view(1, 1).expand(1, 2)
        elif self.offsets is not None:
            numbers = self.offsets[None]
        else:
            numbers = torch.zeros(1, 1, dtype=torch.int32)
        return numbers[:, None, None, :].expand(-1, kind, sides, -1)


def is_plan(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4


def decode(mask: Tensor) -> Plan:
    _, kind, sides, columns = mask.shape
    numbers = mask[:, 0, 0, :]  # [B or 1, C]
    causal = kind != FULL
    window = None if sides == 1 else (sides - 2, 0 if causal else sides - 2)
    if kind == PACKED:
        return Plan(causal, window, offsets=numbers[0])
    return Plan(
        causal,
        window,
        end=numbers[0, 0] if columns == 2 else None,
        ranges=numbers if columns == 3 else None,
    )


class Pattern(NamedTuple):
    """A mask function, understood."""

    causal: bool = False
    window: int | None = None  # keys to the left, and to the right unless causal
    packed: Tensor | None = None  # [B, S], the number of each token's sequence


def understand(mask_function: Callable[..., Any]) -> Pattern | None:
    """What a mask function of transformers does; None if that is something else.

    Its parts are recognised by who they are, and what they were made with by their closures.
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
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """The mask function to register: what `masking_utils.sdpa_mask` takes.

    Returns an encoded `Plan`, None for one that says nothing, or a boolean mask
    [B, 1, q_length, kv_length] where True counts.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    pattern = understand(mask_function)
    plan = None
    if pattern is not None:
        window = None
        # A window as long as all keys hides none.
        if pattern.window is not None and pattern.window + 1 < kv_offset + kv_length:
            window = (pattern.window, 0 if pattern.causal else pattern.window)
        position_end = q_offset + q_length - kv_offset  # key index behind the last query's
        is_static = isinstance(position_end, Tensor) or position_end != kv_length
        if pattern.packed is not None:
            if pattern.causal and attention_mask is None and not _is_tracing(pattern.packed):
                plan = Plan(True, window, offsets=_offsets(pattern.packed))
        elif attention_mask is not None:
            plan = _padded(
                pattern, window, attention_mask, q_length, kv_length, kv_offset, position_end
            )
        elif not pattern.causal:
            # Without a window it does not matter where queries stand; caches are causal.
            plan = Plan(False, window) if window is None or not is_static else None
        elif is_static:
            end = torch.as_tensor(position_end, dtype=torch.int32, device=device)
            plan = Plan(True, window, end=end.reshape(()).clamp(max=kv_length))
        else:
            plan = Plan(True, window)
    if plan is None:
        mask: Tensor | None = sdpa_mask(
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
        return mask
    if plan[1:] == (None, None, None, None):
        # The layer says itself whether it is causal.
        return None
    return plan.encode().to(device)


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
