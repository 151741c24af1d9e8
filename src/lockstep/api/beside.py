"""The calls beside attention: `merge` combines results, `explain` names the kernel of a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep import dispatch
from lockstep.call import autocast, ops
from lockstep.checks import check_types, split_parts
from lockstep.dispatch import Explanation
from lockstep.problem import Tensors, Window, describe, make_options, pad_bias


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combines the results of attention over different keys into that over all of them.

    The state is carried from the first part to the last, in float32 (float64 for float64), just
    as a kernel carries it from one span of keys to the next. Differentiable.

    Args:
        parts: `(out, lse)` pairs of the same queries, as returned with `return_lse=True`:
            out [..., Dv], lse [...].

    Returns:
        The pair `(out, lse)`, in the shapes and dtypes of the parts. Where every part has lse
        -inf, out is 0 and lse is -inf.

    Raises:
        ValueError, TypeError: The parts do not fit together.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 256, 64)
        >>> halves = zip(k.split(128, dim=2), v.split(128, dim=2))
        >>> parts = [lockstep.attention(q, k, v, return_lse=True) for k, v in halves]
        >>> out, lse = lockstep.merge(parts)
    """
    return ops.merge(*split_parts(parts))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: int | None = None,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    secret_lengths: bool = False,
    kernel: str | None = None,
) -> Explanation:
    """Says which kernel a call would run and why each other one refuses. Runs nothing.

    Takes the arguments of the call: with `cu_seqlens_q` those of `attention_varlen`, with
    `page_table` alone those of `attention_paged` (k and v are then the pages), otherwise those of
    `attention`.

    Returns:
        An `Explanation` with `kernel` (a name, or None), `refusals` (a reason per name) and
        `problem`. Print it to read it.

    Raises:
        ValueError, TypeError: An argument does not fit, or no kernel has the name `kernel`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64, dtype=torch.float64)
        >>> lockstep.explain(q, k, v, causal=True).kernel
        'oracle'
    """
    options = make_options(
        causal,
        window,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        kernel=kernel,
        constant_time=constant_time,
        secret_lengths=secret_lengths,
        max_seqlen_q=max_seqlen_q,
    )
    tensors = Tensors(
        *(q, k, v, pad_bias(bias), sinks, kv_lens, cu_seqlens_q, cu_seqlens_k, page_table),
        *(kv_starts, alibi_slopes),
    )
    check_types(tensors, tensors.layout)
    return dispatch.explain(describe(autocast.cast(tensors), options), kernel)
