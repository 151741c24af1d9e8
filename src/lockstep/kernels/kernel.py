"""What a kernel says about itself, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lockstep.problem import AttentionProblem, Tensors

__all__ = [
    "Given",
    "Gradients",
    "Kernel",
    "Needs",
    "Prepared",
    "PreparedBackward",
    "Result",
    "Tensors",
    "addresses_of",
]

Result = tuple[Tensor, Tensor, "Tensor | None"]
"""out, lse and statistics, as `Kernel` says."""
Prepared = Callable[[Tensors, "list[int]"], Result]
"""Runs one kind of call: takes its tensors and their addresses, 0 where there is none."""


class Gradients(NamedTuple):
    """Gradients of one call, each contiguous, in the shape and dtype of its tensor."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


Given = tuple["Tensor | None", ...]
"""The tensors of a call; for its gradients, then its out and statistics, dout and dlse."""


def addresses_of(given: Given) -> list[int]:
    """0 where there is no tensor."""
    return [0 if x is None else x.data_ptr() for x in given]


PreparedBackward = Callable[[Given, "list[int]"], Gradients]
"""Derives one kind of call: takes all tensors and their addresses, 0 where there is none."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run attention.

    `supports` returns the reason for refusing a problem, or None; `supports_backward`, where there
    is one, the reason for refusing its gradients alone. `forward` returns `out`, `lse` and
    `statistics`, all contiguous, in the shapes and dtypes the problem gives. `backward` takes what
    forward took, then `out, statistics, dout, dlse, needs`; `dlse` is None where no gradient comes
    through lse. Both may rely on `q`, `k`, `v` and `dout` having a contiguous last dim, on a bias
    of 4 dims, whose strides may be any, 0 included, and on contiguous sinks, lengths, offsets and
    rows of page tables. On a CPU they may rely on lengths, offsets and page indices within their
    bounds; on a GPU nobody has looked at these, and rows of sequences for which they are wrong
    become NaN, in gradients too, while other sequences keep their bits: `triton.sequences`. Neither
    may return an input or a view of one.

    `statistics` [*lse.shape, 2] are (m, l) of each row: with scores s as the kernel has them, the
    weights of the row are `exp2((s - m) * unit) / l`, sink included. s - m comes first: it is exact
    for scores near m, however large they are, as an lse of the same precision cannot be. On the
    CPU, s and m are in natural units, as bias, sinks and lse are, and unit = log2(e); on a GPU,
    where one kernel may derive what another ran, `AttentionProblem.score_unit` says which they
    have. A row that sees no key has (inf, 1). None where the problem has no gradient.

    `prepare`, where there is one, does for a problem and tensors what `forward` does before it
    looks at data. What it returns then serves all calls whose tensors have the same shapes,
    strides, dtypes and device, addresses that are equal modulo 16 bytes, and one tensor or two as
    cu_seqlens. `prepare_backward` is to `backward` what `prepare` is to `forward`.

    Four are claims; the audits test exactly what is claimed:

    - deterministic: the same call gives the same bits, every time, on any number of threads.
    - batch_invariant: a sequence's bits, gradients included, depend on nothing around it: batch,
      neighbours, padding, and whether it comes dense, packed or in pages.
    - constant_time: what is executed and touched does not depend on values or secret lengths.
    - query_invariant: where a problem asks for it, the bits of a row of out and lse do not depend
      on the other queries of its call either: whole prefill, chunks and one token at a time
      against the same cache agree.
    """

    name: str
    supports: Callable[[AttentionProblem], str | None]
    forward: Callable[[AttentionProblem, Tensors], Result]
    backward: (
        Callable[
            [AttentionProblem, Tensors, Tensor, Tensor, Tensor, Tensor | None, Needs], Gradients
        ]
        | None
    )
    deterministic: bool
    batch_invariant: bool
    constant_time: bool
    query_invariant: bool = False
    supports_backward: Callable[[AttentionProblem], str | None] | None = None
    prepare: Callable[[AttentionProblem, Tensors], Prepared] | None = None
    prepare_backward: Callable[[AttentionProblem, Given, Needs], PreparedBackward] | None = None
