"""Whether a rung's output is right: the library's rule, against the float64 oracle.

The largest error is at most twice that of PyTorch's own math attention in the same precision, plus
a few float32 roundings of the largest element, since PyTorch may happen to be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rung import Problem, Tensors

if TYPE_CHECKING:
    import torch

LIMIT = 2.0  # times PyTorch's error
ROUNDINGS = 4 * 2.0**-24  # of the largest element


@dataclass(frozen=True)
class Errors:
    """Largest errors against the oracle: of a rung, and of PyTorch's math attention."""

    ours: float
    theirs: float
    largest: float  # element of the exact output

    @property
    def ok(self) -> bool:
        return self.ours <= LIMIT * self.theirs + ROUNDINGS * self.largest


def errors(problem: Problem, tensors: Tensors) -> Errors:
    """How far `tensors.out` is from exact attention; an element never written counts as infinite.

    >>> errors(problem, tensors).ok                                    # doctest: +SKIP
    True
    """
    import torch

    exact = oracle(problem, tensors)
    ours = (tensors.out.double() - exact).abs().nan_to_num(nan=torch.inf).max()
    theirs = (_math(problem, tensors).double() - exact).abs().max()
    return Errors(float(ours), float(theirs), float(exact.abs().max()))


def oracle(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """Exact attention [B, H, S, D] in float64."""
    from lockstep import reference

    bias = _bias(problem, tensors.q.device)
    out = reference.attention(*tensors[:3], causal=problem.causal, bias=bias)
    assert not isinstance(out, tuple)
    return out


def _math(problem: Problem, tensors: Tensors) -> torch.Tensor:
    """PyTorch's attention written out, in the precision of the inputs. A row that sees no key is
    NaN there, and zero here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, _ = tensors
    bias = _bias(problem, q.device)
    if bias is not None and problem.causal:
        bias = bias + q.new_full(bias.shape[-2:], float("-inf")).float().triu(1)
    with sdpa_kernel(SDPBackend.MATH):
        if bias is None:
            return scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).nan_to_num()


def _bias(problem: Problem, device: torch.device) -> torch.Tensor | None:
    """Minus infinity for the keys that do not count, [1, 1, S, S]; None where all do."""
    import torch

    if problem.length is None:
        return None
    bias = torch.zeros(1, 1, problem.S, problem.S, device=device)
    bias[..., problem.length :] = float("-inf")
    return bias
