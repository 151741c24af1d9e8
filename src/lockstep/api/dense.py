"""Attention over sequences of one length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from lockstep.api.shared import DenseOptions, run
from lockstep.call import ops
from lockstep.problem import Window, pad_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[DenseOptions]
) -> tuple[Tensor, Tensor]: ...
def attention(
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
    kv_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    constant_time: bool = False,
    secret_lengths: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: `softmax(softcap(scale · q kᵀ) + bias) v`.

    Differentiable in q, k, v, bias and sinks, through lse as well: once, in reverse mode. A
    sequence's bits do not depend on the batch around it.

    Args:
        q: [B, Hq, Sq, D] float16, bfloat16, float32 or float64. As for k and v, any strides do;
            a last dim that is not contiguous costs a copy.
        k: [B, Hkv, Skv, D] in the dtype of q. Hq is a multiple of Hkv, and query head h reads
            key head `h // (Hq // Hkv)`.
        v: [B, Hkv, Skv, Dv] in the dtype of q.
        causal: Row `q_idx` sees the keys up to its diagonal position `q_idx + Skv - Sq`.
        window: `(left, right)`: how many keys a row sees on either side of its diagonal position,
            None for no limit on that side.
        scale: Factor of the scores, `D ** -0.5` if None; 0, or of a size between 1e-37 and 1e37.
        softcap: Bounds scores smoothly: `softcap · tanh(score / softcap)`, before the bias.
            Between 1e-37 and 1e37, and `scale / softcap` likewise.
        sinks: [Hq] in the dtype of q or float32. One more logit per head in the denominator of
            the softmax, with no value attached.
        bias: Broadcastable to [B, Hq, Sq, Skv], in the dtype of q or float32, added to the scores.
            Where it is -inf, it hides the key. Any strides do, and cost no copy.
        kv_lens: [B] int32 or int64, each from 0 to Skv. Sequence b has `kv_lens[b]` keys; what
            lies beyond is not looked at, and `Skv` in the above becomes `kv_lens[b]`. A length out
            of that range raises on the CPU. On a GPU, where looking at it would wait for the
            device, it makes its own sequence NaN, unless the environment has LOCKSTEP_CHECK=1.
        kv_starts: [B] int32 or int64, each from 0 to `kv_lens[b]`, or Skv without lengths. Keys of
            sequence b before `kv_starts[b]`, padding on the left, are not looked at: it gets what
            it gets from `k[b, :, kv_starts[b]:]`, bit for bit. Its diagonal stays where it is, at
            its last key. Wrong ones are treated as wrong lengths are.
        alibi_slopes: [Hq] or [B, Hq], finite, in the dtype of q or float32 (ALiBi): scores lose the
            slope of their head times the distance of the key from the row's diagonal position,
            after the softcap. No bias can come with them, nor a gradient be asked for them.
        return_lse: Also return the log-sum-exp of each row's scores.
        query_invariant: Also make the bits of a row of out and lse independent of the other
            queries of the call: a whole prefill, its chunks and single tokens against the same
            cache then agree bit for bit. Only kernels that promise it will run.
        allow_tf32: Let a GPU cut the factors of float32 products to tf32, 10 bits after the
            point, whatever torch is set to do: off by a few thousandths, and on an H200 as fast or
            up to five times as fast, by the head dim.
        constant_time: Make what is executed and which addresses are touched, in gradients too,
            depend on shapes, dtypes, strides and options alone, never on values. Only kernels that
            promise it will run. The documentation says what this does not cover.
        secret_lengths: With constant_time, hide the values of kv_lens as well: all Skv keys are
            loaded, and those beyond a length are masked.
        kernel: The name of a kernel, which then runs or raises. None chooses; see `explain`.

    Returns:
        out [B, Hq, Sq, Dv] in the dtype of q, and with `return_lse` the pair `(out, lse)`, where
        lse is [B, Hq, Sq] in float32 (float64 for float64), natural logarithm. A row that sees no
        key has out 0 and lse -inf. If q is a view of tokens [B, Sq, Hq, D] in memory, so are both:
        `out.transpose(1, 2).reshape(B, Sq, -1)` copies nothing. Gradients lie as their tensors do.

    Raises:
        ValueError, TypeError: An argument does not fit; the message names it.
        NotImplementedError: No kernel runs this; the message has the reason of each.

    Example:
        >>> q = torch.randn(2, 8, 1024, 64)
        >>> k, v = torch.randn(2, 2, 2, 1024, 64)
        >>> lockstep.attention(q, k, v, causal=True).shape
        torch.Size([2, 8, 1024, 64])
        >>> starts = torch.tensor([0, 24])  # keys of padding on the left
        >>> lockstep.attention(q[:, :, -1:], k, v, kv_starts=starts).shape
        torch.Size([2, 8, 1, 64])
    """
    option_arguments = (
        causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel,
        constant_time, secret_lengths,
    )  # fmt: skip
    bias = None if bias is None else pad_bias(bias)
    given = (q, k, v, bias, sinks, kv_lens, None, None, None, kv_starts, alibi_slopes)
    return run(ops.attention, given, option_arguments, window, return_lse, kernel)
