"""The descriptor of a kernel, and the types of its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lockstep.kernels.carry import Carry
from lockstep.problem import AttentionProblem, Tensors

__all__ = [
    "BackwardTensors",
    "Given",
    "Gradients",
    "Kernel",
    "Merge",
    "Needs",
    "Prepared",
    "PreparedBackward",
    "Result",
    "Tensors",
]

Result = tuple[Tensor, Tensor, "Tensor | None"]
"""out, lse and statistics, as `Kernel` says."""


Given = tuple["Tensor | None", ...]
"""`Tensors` or `BackwardTensors`."""


class BackwardTensors(NamedTuple):
    """The tensors that a backward takes: those of the call, then its results and their gradients.

    `dlse` is None where no gradient comes through lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    kv_lens: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    page_table: Tensor | None
    kv_starts: Tensor | None
    alibi_slopes: Tensor | None
    out: Tensor
    statistics: Tensor
    dout: Tensor
    dlse: Tensor | None

    @property
    def inputs(self) -> Tensors:
        """The tensors of the call."""
        return Tensors._make(self[: len(Tensors._fields)])

    def addresses(self) -> list[int]:
        """The address of each tensor, 0 where there is none."""
        return [0 if x is None else x.data_ptr() for x in self]


class Gradients(NamedTuple):
    """Gradients of one call, each in the shape and dtype of its tensor; those of q, k and v in its
    memory order (`memory_order`), others contiguous."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Needs(NamedTuple):
    """The gradients that are wanted."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


Prepared = Callable[[Tensors, "list[int]"], Result]
"""Runs one kind of call: takes its tensors and their addresses, 0 where there is none. It may have
a method `out_of`, which returns out alone, and takes any tuple of the tensors."""
PreparedBackward = Callable[[BackwardTensors, "list[int]"], Gradients]
"""Computes the gradients of one kind of call: takes its tensors and their addresses, 0 where there
is none."""


class Merge(NamedTuple):
    """How a kernel combines partial results: `lockstep.merge`.

    `supports` says whether `run` takes parts with the device and the dtype of this one. `run` takes
    contiguous parts `out` [..., Dv] and `lse` [...], and combines them in the order given.
    """

    supports: Callable[[Tensor], bool]
    run: Callable[[list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to run attention.

    `supports` returns the reason for refusing a problem, or None; `supports_backward`, where there
    is one, the reason for refusing its gradients alone.

    `prepare` does for a problem and tensors everything that does not depend on data. What it
    returns runs this call and all others whose tensors have the same shapes, strides, dtypes and
    device, addresses that are equal modulo 16 bytes, and one tensor or two as cu_seqlens: it
    returns `out`, `lse` and `statistics`, in the shapes and dtypes the problem gives and in the
    memory order of q (`memory_order`). `prepare_backward` does the same for gradients, and gets
    `out`, `statistics` and `dlse` in that order; it is None for a kernel without them.
    Both may rely on `q`, `k`, `v` and `dout` having a contiguous last dim, on a bias of 4 dims,
    whose strides may be any, 0 included, and on contiguous sinks, lengths, offsets and rows of page
    tables. On a CPU they may rely on lengths, offsets and page indices within their bounds. On a
    GPU these have not been checked: rows of sequences for which they are wrong become NaN, in
    gradients too, while other sequences keep their bits (`kernels.sequences`). Neither may return
    an input or a view of one.

    `merge`, where there is one, combines partial results; the first kernel that takes them does.
    `carry`, where there is one, returns what runs a call whose keys or rows come in blocks.

    `statistics` [*lse.shape, 2] are (m, l) of each row: with scores s as the kernel has them, the
    weights of the row are `exp2((s - m) * unit) / l`, sink included. s - m comes first: it is exact
    for scores near m, however large they are, as an lse of the same precision cannot be. On the
    CPU, s and m are in natural units, as bias, sinks and lse are, and unit = log2(e); on a GPU,
    where one kernel may compute the gradients of what another ran, `AttentionProblem.score_unit`
    says which they have. A row that sees no key has (inf, 1). None where the problem has no
    gradient.

    Four are claims; the audits test exactly what is claimed:

    - deterministic: the same call gives the same bits, every time, on any number of threads.
    - batch_invariant: a sequence's bits, gradients included, depend on nothing around it: batch,
      neighbours, padding, and whether it comes dense, packed or in pages.
    - constant_time: where a problem asks for it, what is executed and which addresses are touched,
      in gradients too, does not depend on the values of tensors other than cu_seqlens, page_table
      and kv_lens; nor on those of kv_lens where it also asks for secret_lengths. A kernel that
      keeps this for some problems only refuses the others in `supports` or `supports_backward`.
    - query_invariant: where a problem asks for it, the bits of a row of out and lse do not depend
      on the other queries of its call either: whole prefill, chunks and one token at a time
      against the same cache agree.
    """

    name: str
    supports: Callable[[AttentionProblem], str | None]
    prepare: Callable[[AttentionProblem, Tensors], Prepared]
    prepare_backward: Callable[[AttentionProblem, BackwardTensors, Needs], PreparedBackward] | None
    deterministic: bool
    batch_invariant: bool
    constant_time: bool
    query_invariant: bool = False
    supports_backward: Callable[[AttentionProblem], str | None] | None = None
    merge: Merge | None = None
    carry: Callable[[], Carry] | None = None
