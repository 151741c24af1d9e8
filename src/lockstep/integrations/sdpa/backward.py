"""The backward operators of PyTorch's fused attention.

Their callers have the lse alone of all that the forward kept, so the forward runs once more. Under
autograd these operators do not run: see `sdpa`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.integrations.sdpa.forward import align, window_of
from lockstep.problem import Options, pad_bias


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `forward.attend`, which runs again for what lse alone does not say."""
    if dropout_p:
        raise NotImplementedError("Lockstep has no dropout")
    keys, values, bias, is_causal, window = align(q, k, v, is_causal, bias)
    _, right = window or (None, None)
    tensors = (q, keys, values, pad_bias(bias), *(None,) * 4)
    options = (*Options(is_causal, None, right, scale), None)
    out, _, statistics = torch.ops.lockstep.attention(*tensors, *options)
    needs = [True, True, True, False, False]
    dq, dk, dv = torch.ops.lockstep.attention_backward(
        dout, None, out, statistics, *tensors, *options, needs
    )
    rest = k.shape[2] - keys.shape[2]
    return dq, F.pad(dk, (0, 0, 0, rest)), F.pad(dv, (0, 0, 0, rest))


def flash_for_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad_out, query, key, value, dropout_p, is_causal, scale, attn_mask)


def flash(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad_out, query, key, value, dropout_p, is_causal, scale)


def flash_forward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv of `forward.flash_forward` without pages, which runs again, as in `_gradients`."""
    if dropout_p:
        raise NotImplementedError("Lockstep has no dropout")
    tensors: tuple[Tensor | None, ...] = (query, key, value, None, cum_seq_q, cum_seq_k, None)
    call, backward = (
        torch.ops.lockstep.attention_varlen,
        torch.ops.lockstep.attention_varlen_backward,
    )
    if cum_seq_q is None:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        tensors = (*heads_first, *(None,) * 5)
        grad_out = grad_out.transpose(1, 2)
        call, backward = torch.ops.lockstep.attention, torch.ops.lockstep.attention_backward
    window = window_of(window_size_left, window_size_right)
    options = (*Options(is_causal, *window, scale), None)
    result, _, statistics = call(*tensors, *options)
    needs = [True, True, True, False, False]
    grads = backward(grad_out, None, result, statistics, *tensors, *options, needs)
    return tuple(x.transpose(1, 2) if cum_seq_q is None else x for x in grads)


def efficient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    if grad_input_mask[3]:
        raise NotImplementedError("Lockstep computes the gradient of a bias through autograd alone")
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    grads = _gradients(grad_out, query, key, value, dropout_p, is_causal, scale, bias)
    return *grads, None
