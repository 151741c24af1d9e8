"""The common part of the public calls: their options, and the path from arguments to results."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from lockstep.call import autocast, ops
from lockstep.call.eager import is_eager
from lockstep.checks import check_types
from lockstep.kernels.kernel import Given
from lockstep.problem import Tensors, Window, make_options


class CommonOptions(TypedDict, total=False):
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    query_invariant: bool
    allow_tf32: bool
    constant_time: bool
    kernel: str | None


class VarlenOptions(CommonOptions, total=False):
    page_table: Tensor | None
    kv_lens: Tensor | None
    kv_starts: Tensor | None
    max_seqlen_q: int | None


class PagedOptions(CommonOptions, total=False):
    bias: Tensor | None
    kv_starts: Tensor | None
    secret_lengths: bool


class DenseOptions(PagedOptions, total=False):
    kv_lens: Tensor | None


def run(
    operator: ops.Attention,
    given: Given,
    option_arguments: tuple[Any, ...],
    window: Window | None,
    return_lse: bool,
    kernel: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Follows one call from its arguments to its results: `ops` does the rest.

    `given` are the fields of `Tensors`, and `option_arguments` the arguments of `make_options`. The
    other arguments are among these, too: they are passed by name as well because finding them in
    the tuple would take time in every call.
    """
    is_cast = autocast.is_any_enabled()
    if not is_cast and is_eager():
        result: Tensor | tuple[Tensor, Tensor] | None
        result = operator.call_cached(given, option_arguments, window, return_lse)
        if result is not None:
            return result
    options, tensors = make_options(*option_arguments), Tensors._make(given)
    if is_cast:
        check_types(tensors, operator.layout)
        tensors = autocast.cast(tensors)
    results = operator(tensors, options, kernel)
    return results[:2] if return_lse else results[0]
