"""Lockstep as the kernel behind `torch.nn.functional.scaled_dot_product_attention`.

    from lockstep.integrations import sdpa

    sdpa.activate()            # for the whole process, until sdpa.restore()
    with sdpa.active(): ...    # or for a block

Every model that calls `scaled_dot_product_attention`, `torch.nn.MultiheadAttention` included, then
runs Lockstep. PyTorch still decides which of its fused kernels a call goes to; the operators of
those kernels are what Lockstep takes over:

    CPU    _scaled_dot_product_flash_attention_for_cpu
    CUDA   _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention,
           _scaled_dot_product_cudnn_attention, _flash_attention_forward,
           _flash_attention_forward_no_dropout_inplace (`torch.nn.attention.varlen`)

with their gradients. What PyTorch gives to its math implementation, such as value head dims that
differ from those of the keys, does not come here. What Lockstep does not do, dropout above all,
goes on to PyTorch's own kernel.

The operators are taken over above autograd: their gradient is then that of `lockstep.attention`,
which keeps more than the lse between forward and backward. A caller of a backward operator has
the lse alone, so the forward runs once more there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep
from lockstep.problem import Options, pad_bias

NAME = "lockstep"

# Takes the arguments of an operator, and returns what it returns.
_Answer = Callable[..., Any]


@contextmanager
def active() -> Iterator[None]:
    """Lockstep behind `scaled_dot_product_attention` inside the block; what was there after it.

    Example:
        >>> q = torch.randn(1, 8, 32, 64)
        >>> with active():
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.equal(out, lockstep.attention(q, q, q, causal=True))
        True
    """
    before = _registry().current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        restore()
        if before is not None:
            _registry().activate_flash_attention_impl(before)


def activate() -> None:
    """Put Lockstep behind `scaled_dot_product_attention`, for the whole process.

    It takes the place of whatever other implementation is active (`torch.nn.attention` knows one
    at a time). Once it is active, calling this again changes nothing.

    Raises:
        RuntimeError: This PyTorch cannot change its implementation of attention.
    """
    registry = _registry()
    registry.register_flash_attention_impl(NAME, register_fn=_take_over)
    if registry.current_flash_attention_impl() != NAME:
        registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """PyTorch's own kernels again. Changes nothing unless Lockstep is active."""
    if _registry().current_flash_attention_impl() == NAME:
        _registry().restore_flash_attention_impl()


def is_active() -> bool:
    """Whether Lockstep is behind `scaled_dot_product_attention` now."""
    return bool(_registry().current_flash_attention_impl() == NAME)


def _registry() -> Any:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl") or not hasattr(
        torch.library, "get_kernel"
    ):
        raise RuntimeError(
            f"lockstep.integrations.sdpa needs PyTorch 2.11 or newer, this is {torch.__version__}"
        )
    return torch.nn.attention


class _Handle:
    """What the registry keeps while Lockstep is active."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def remove(self) -> None:
        self.library._destroy()


def _take_over() -> _Handle:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for device, answers in (("CPU", _ON_CPU), ("CUDA", _ON_CUDA)):
        if device == "CUDA" and torch.version.cuda is None:
            continue
        for name, answer in answers.items():
            if not hasattr(torch.ops.aten, name):
                continue  # an operator of later versions of PyTorch
            is_backward = name.endswith("_backward")
            for key in [device] if is_backward else [device, f"Autograd{device}"]:
                theirs = torch.library.get_kernel(f"aten::{name}", key)
                ours = answer if key != device else torch.no_grad()(answer)
                with warnings.catch_warnings():
                    # Torch warns that a kernel takes another's place, which is what was asked for.
                    warnings.simplefilter("ignore")
                    library.impl(name, _or_theirs(ours, theirs), key, with_keyset=True)
    return _Handle(library)


def _or_theirs(answer: _Answer, theirs: Any) -> Callable[..., Any]:
    """`answer`, or PyTorch's kernel where Lockstep has none for the call."""

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return answer(*args, **kwargs)
        except NotImplementedError:
            return theirs.call_boxed(keys, *args, **kwargs)

    return call


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
    debug: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, D] and lse [B, H, Sq]."""
    if dropout_p or debug:
        raise NotImplementedError("Lockstep has no dropout")
    k, v, bias, is_causal, window = _align(q, k, v, is_causal, bias)
    out, lse = lockstep.attention(
        q, k, v, causal=is_causal, window=window, bias=bias, scale=scale, return_lse=True
    )
    # PyTorch's is contiguous whatever the order of q.
    return out, lse.contiguous()


def _align(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, bool, tuple[None, int] | None]:
    """k, v, bias, causal and window of a causal mask that ends in the lower right corner, as ours
    does, from one that begins in the upper left corner, as PyTorch's does."""
    Sq, Skv = q.shape[2], k.shape[2]
    if is_causal and Sq > Skv:
        return k, v, bias, False, (None, Sq - Skv)
    if is_causal and Sq < Skv:
        k, v = k[:, :, :Sq], v[:, :, :Sq]
        bias = bias[..., :Sq] if bias is not None and bias.shape[-1] == Skv else bias
    return k, v, bias, is_causal, None


def _random_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that did not happen."""
    return q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)


def _flash_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    return _attend(query, key, value, dropout_p, is_causal, scale, attn_mask)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _attend(query, key, value, dropout_p, is_causal, scale, debug=return_debug_mask)
    return _as_flash(query, key, out, lse)


def _as_flash(query: Tensor, key: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    none = query.new_empty(0)
    return out, lse, none, none, query.shape[2], key.shape[2], *_random_state(query), none


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = _attend(query, key, value, dropout_p, is_causal, scale, attn_bias, return_debug_mask)
    return _as_flash(query, key, out, lse)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    out, lse = _attend(query, key, value, dropout_p, is_causal, scale, attn_bias)
    return out, lse, *_random_state(query)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Tokens first: [B, S, H, D], or [T, H, D] with cum_seq_q. The causal mask ends in the lower
    right corner, and a window of -1 has no limit. lse is [B, H, Sq], or [H, T]."""
    unknown = (alibi_slopes, block_table, seqused_k)
    if dropout_p or return_debug_mask or any(x is not None for x in unknown):
        raise NotImplementedError("Lockstep has no such option here")
    sides = [None if x is None or x < 0 else x for x in (window_size_left, window_size_right)]
    window = None if sides == [None, None] else (sides[0], sides[1])
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = lockstep.attention(
            q, k, v, causal=is_causal, window=window, scale=scale, return_lse=True
        )
        out, lse = out.transpose(1, 2), lse.contiguous()
    else:
        assert cum_seq_k is not None
        out, lse = lockstep.attention_varlen(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            causal=is_causal,
            window=window,
            scale=scale,
            return_lse=True,
        )
        lse = lse.transpose(0, 1)
    return out, lse, *_random_state(query), query.new_empty(0)


def _flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, lse, *_ = _flash_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _derive(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `_attend`, which runs again for what lse alone does not say."""
    if dropout_p:
        raise NotImplementedError("Lockstep has no dropout")
    keys, values, bias, is_causal, window = _align(q, k, v, is_causal, bias)
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


def _flash_for_cpu_backward(
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
    return _derive(grad_out, query, key, value, dropout_p, is_causal, scale, attn_mask)


def _flash_backward(
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
    return _derive(grad_out, query, key, value, dropout_p, is_causal, scale)


_ON_CPU: dict[str, _Answer] = {
    "_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu_backward,
}
_ON_CUDA: dict[str, _Answer] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
}
