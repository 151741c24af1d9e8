"""Between padded batches and packed tokens, as `flash_attn.bert_padding` does it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` of x.

    Example:
        >>> index_first_axis(torch.arange(5), torch.tensor([1, 3]))
        tensor([1, 3])
    """
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of `first_axis_dim` rows that are 0 but for `values` at `indices`.

    Example:
        >>> index_put_first_axis(torch.tensor([5, 6]), torch.tensor([2, 0]), 4)
        tensor([6, 0, 5, 0])
    """
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one after another.

    Args:
        hidden_states: [B, S, ...]
        attention_mask: [B, S], 1 for tokens.
        unused_mask: [B, S], 1 for further tokens, which are taken along but do not count.

    Returns:
        tokens [T, ...]; their indices [T] in [B · S]; offsets [B + 1] int32 of the sequences; the
        longest length; the lengths [B] without the tokens of `unused_mask`.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> unpad_input(torch.arange(6).view(2, 3), mask)[0]
        tensor([0, 1, 3])
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a padded batch whose rows hold several sequences each, one after another.

    Args:
        hidden_states: [B, S, ...]
        attention_mask_in_length: [B, S]: the lengths of the sequences in a row, which lie one
            after another from its first token on; 0 after them.

    Returns:
        tokens [T, ...]; their indices [T] in [B · S]; offsets int32 of all sequences; the longest
        length.

    Example:
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> found = unpad_input_for_concatenated_sequences(torch.arange(8).view(2, 4), lengths)
        >>> found[0], found[2]
        (tensor([0, 1, 2, 4, 5, 6]), tensor([0, 2, 3, 6], dtype=torch.int32))
    """
    in_length = attention_mask_in_length
    places = torch.arange(in_length.shape[1], device=in_length.device)
    mask = places < in_length.sum(-1, keepdim=True)
    tokens, indices, *_ = unpad_input(hidden_states, mask)
    lengths = in_length[in_length > 0]
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, offsets, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Tokens [T, ...] back in a batch [B, S, ...], 0 elsewhere.

    Example:
        >>> pad_input(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]), 2, 3)
        tensor([[7, 8, 0],
                [9, 0, 0]])
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])
