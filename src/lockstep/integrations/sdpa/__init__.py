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

from lockstep.integrations.sdpa import backward, forward

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
    """The object that the registry keeps while Lockstep is active."""

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


_ON_CPU: dict[str, _Answer] = {
    "_scaled_dot_product_flash_attention_for_cpu": forward.flash_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": backward.flash_for_cpu,
}
_ON_CUDA: dict[str, _Answer] = {
    "_scaled_dot_product_flash_attention": forward.flash,
    "_scaled_dot_product_flash_attention_backward": backward.flash,
    "_scaled_dot_product_cudnn_attention": forward.cudnn,
    "_scaled_dot_product_efficient_attention": forward.efficient,
    "_scaled_dot_product_efficient_attention_backward": backward.efficient,
    "_flash_attention_forward": forward.flash_forward,
    "_flash_attention_backward": backward.flash_forward,
    "_flash_attention_forward_no_dropout_inplace": forward.flash_forward_into,
}
