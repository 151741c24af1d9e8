"""The rules of `torch.vmap` for the operators.

Dense attention folds the mapped dim into the batch. What has no batch dim to fold it into (sinks
and slopes that differ from sample to sample, gradients that are sums over the batch, packed and
paged calls) runs sample by sample. Batch invariance makes both give the same bits.

A rule takes `(call, info, in_dims, *args)` and returns `(output, out_dims)`; `call` takes the
arguments without the mapped dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.kernels.kernel import Needs

VmapRule = Callable[..., tuple[Any, Any]]


class DenseArguments(NamedTuple):
    """The tensors that `attention` takes, in its order; or the mapped dim of each."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    kv_lens: Any
    kv_starts: Any
    alibi_slopes: Any


class DenseBackwardArguments(NamedTuple):
    """The tensors that `attention_backward` takes, in its order; or the mapped dim of each."""

    dout: Any
    dlse: Any
    out: Any
    statistics: Any
    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    kv_lens: Any
    kv_starts: Any
    alibi_slopes: Any


_Dense = TypeVar("_Dense", DenseArguments, DenseBackwardArguments)
_OF_HEADS = ("sinks", "alibi_slopes")


def sample_by_sample(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """Runs the samples one after another."""
    if info.batch_size == 0:
        outline = _outline(call, in_dims, args)
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        stacked = [x.new_empty((0, *x.shape), device=device) for x in outline]
        return _like(outline, stacked)
    results = []
    for i in range(info.batch_size):
        sample = (
            arg.select(dim, i) if isinstance(dim, int) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        )
        results.append(call(*sample))
    stacked = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
    return _like(results[0], stacked)


def fold_attention(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """The vmap rule of `attention`."""
    tensors, options = _split(DenseArguments, args)
    dims, _ = _split(DenseArguments, in_dims)
    if dims.sinks is not None or dims.alibi_slopes is not None:
        return sample_by_sample(call, info, in_dims, *args)
    # Samples that do not fit together may still do so once they are folded.
    _outline(call, in_dims, args)
    n, B = info.batch_size, _batch(tensors.q, dims.q)
    results = call(*_fold_all(tensors, dims, n, B), *options)
    return _like(results, [x.unflatten(0, (n, B)) for x in results])


def fold_attention_backward(
    call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """The vmap rule of `attention_backward`."""
    tensors, options = _split(DenseBackwardArguments, args)
    dims, _ = _split(DenseBackwardArguments, in_dims)
    *_, needs = options
    needs = Needs._make(needs)
    has_own_heads = dims.sinks is not None or dims.alibi_slopes is not None
    if has_own_heads or needs.bias or needs.sinks:
        return sample_by_sample(call, info, in_dims, *args)
    n, B = info.batch_size, _batch(tensors.q, dims.q)
    grads = call(*_fold_all(tensors, dims, n, B), *options)
    return _like(grads, [grad.unflatten(0, (n, B)) for grad in grads])


def lead_with_samples(
    call: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: list[Tensor]
) -> tuple[Any, Any]:
    """The vmap rule of `merge`, whose tensors may have any dims before their last."""
    leading = [
        [_lead(x, dim, info.batch_size) for x, dim in zip(xs, dims, strict=True)]
        for xs, dims in zip(args, in_dims, strict=True)
    ]
    results = call(*leading)
    return _like(results, list(results))


def _split(kind: type[_Dense], args: tuple[Any, ...]) -> tuple[_Dense, tuple[Any, ...]]:
    """The tensors among the arguments of an operator, and the options after them."""
    n_tensors = len(kind._fields)
    return kind._make(args[:n_tensors]), args[n_tensors:]


def _fold_all(tensors: _Dense, dims: _Dense, n: int, B: int) -> _Dense:
    """Folds n samples into the batch of every tensor but those [Hq], which have none."""
    return tensors._make(
        x if name in _OF_HEADS and x is not None and x.dim() == 1 else _fold(x, dim, n, B)
        for name, x, dim in zip(tensors._fields, tensors, dims, strict=True)
    )


def _like(results: Any, mapped: list[Tensor]) -> tuple[Any, Any]:
    """Results with the mapped dim first, in the kind of sequence that an operator returns."""
    kind = type(results)
    return kind(mapped), kind(0 for _ in mapped)


def _outline(call: Callable[..., Any], in_dims: tuple[int | None, ...], args: Any) -> Any:
    """The results of one sample as meta tensors. Raises what its shapes and dtypes raise."""

    def sample(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        shape = [size for i, size in enumerate(arg.shape) if i != dim]
        return torch.empty(shape, dtype=arg.dtype, device="meta")

    return call(*map(sample, args, in_dims))


def _batch(q: Tensor, dim: int | None) -> int:
    return q.shape[0] if dim is None or dim > 0 else q.shape[1]


def _lead(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(x: Tensor | None, dim: int | None, n: int, B: int) -> Tensor | None:
    """[n, B or 1, ...], the mapped dim anywhere or absent -> [n * B, ...]"""
    if x is None:
        return None
    x = _lead(x, dim, n)
    return x.expand(n, B, *x.shape[2:]).flatten(0, 1)
