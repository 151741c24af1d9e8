"""The checks of `lockstep demo`: results are exact, and have the same bits.

Exactness goes by the error rule (`lockstep.error_rule`); bits are compared without tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.output.formats import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

# Several spans of keys, and sizes that are no multiple of a tile.
B, HQ, HKV, S, D = 2, 8, 2, 777, 64

Attention = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Exactness:
    """Largest errors against the oracle: of Lockstep, of PyTorch's math attention, and allowed."""

    what: str
    ours: float
    theirs: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.allowed


@dataclass(frozen=True)
class SameBits:
    """The share of elements that have the same bits when one thing about a call changes."""

    what: str
    ours: float
    theirs: float

    @property
    def ok(self) -> bool:
        return self.ours == 1.0


def exactness() -> Iterator[Exactness]:
    """Causal attention with grouped heads in every dtype, and its gradients."""
    import torch

    from lockstep.error_rule import Expected, error, expect
    from lockstep.problem import Options, Tensors, describe

    def expected(inputs: tuple[Tensor, ...], dout: Tensor | None = None) -> dict[str, Expected]:
        tensors = Tensors(*inputs)
        return expect(describe(tensors, Options(causal=True)), tensors, dout)

    def compare(what: str, result: Tensor, rule: Expected) -> Exactness:
        return Exactness(what, error(result, rule.exact), rule.math, rule.allowed)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = _inputs(dtype)
        yield compare(f"{dtype_name(dtype)} output", _lockstep(*inputs), expected(inputs)["out"])

    inputs = _inputs(torch.float32)
    dout = torch.randn(B, HQ, S, D, generator=torch.Generator().manual_seed(1))
    rules = expected(inputs, dout)
    for name, mine in zip("qkv", _gradients(_lockstep, inputs, dout), strict=True):
        yield compare(f"fp32 gradient of {name}", mine, rules[f"d{name}"])


def same_bits() -> Iterator[SameBits]:
    """One sequence computed again, by both libraries, while one thing about the call changes."""
    import torch

    q, k, v = _inputs(torch.float32)
    first = q[:1], k[:1], v[:1]
    alone = [call(*first) for call in (_lockstep, _sdpa)]

    def compare(what: str, run: Callable[[Attention], Tensor]) -> SameBits:
        ours, theirs = (
            _share_equal(run(call), expected)
            for call, expected in zip((_lockstep, _sdpa), alone, strict=True)
        )
        return SameBits(what, ours, theirs)

    yield compare("the same call again", lambda call: call(*first))
    yield compare("with another sequence in the batch", lambda call: call(q, k, v)[:1])
    yield compare("one thread instead of all", lambda call: _on_one_thread(call, *first))
    yield compare("queries in chunks of 100", lambda call: _in_chunks(call, *first, size=100))
    yield compare("one query at a time, as in decoding", lambda c: _in_chunks(c, *first, size=1))


def _lockstep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import lockstep

    return lockstep.attention(q, k, v, causal=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fastest attention, its causal mask aligned to the last query as in Lockstep."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _inputs(dtype: object) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HQ, S, D, generator=generator)
    k, v = torch.randn(2, B, HKV, S, D, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)  # type: ignore[call-overload]


def _gradients(
    attention: Attention, inputs: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, ...]:
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def _in_chunks(attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, size: int) -> Tensor:
    """Attention in chunks of queries, each against the keys up to its own last query."""
    import torch

    chunks = []
    for start in range(0, q.shape[2], size):
        end = min(start + size, q.shape[2])
        chunks.append(attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
    return torch.cat(chunks, dim=2)


def _on_one_thread(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return attention(q, k, v)
    finally:
        torch.set_num_threads(threads)


def _share_equal(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())
