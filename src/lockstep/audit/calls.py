"""The calls that audits compare: one drawn batch, run whole, in part, packed or in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep import dispatch
from lockstep.kernels.kernel import Kernel

# Sets of options that calls are made with; sinks are drawn with the batch.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, None), "softcap": 20.0, "sinks": True},
}

# Elements of a tensor at most: an audit of more would take hours.
MAX_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Shape:
    """The sizes and the kind of the calls an audit makes, and how often it repeats one.

    Raises ValueError for sizes that make no attention call, and for unknown options.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    B: int = 4
    Hq: int = 8
    Hkv: int = 2
    S: int = 333
    D: int = 64
    repeats: int = 20
    options: tuple[str, ...] = tuple(OPTIONS)

    def __post_init__(self) -> None:
        for name, least in (("B", 1), ("Hq", 1), ("Hkv", 1), ("S", 16), ("D", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} takes at least {least}, got {getattr(self, name)}")
        if self.B * self.Hq * self.S * self.D > MAX_ELEMENTS:
            elements = self.B * self.Hq * self.S * self.D
            raise ValueError(f"B · Hq · S · D takes up to {MAX_ELEMENTS} numbers, got {elements}")
        if self.Hq % self.Hkv:
            raise ValueError(f"Hq takes a multiple of Hkv = {self.Hkv}, got {self.Hq}")
        for name in self.options:
            if name not in OPTIONS:
                raise ValueError(f"options takes some of {', '.join(OPTIONS)}, got {name!r}")


@dataclass(frozen=True)
class Results:
    """The tensors of one call by name, and the kernel's reasons for those that are missing."""

    tensors: dict[str, Tensor]
    refusals: tuple[str, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Results:
        """The same function of every tensor."""
        return replace(self, tensors={name: function(x) for name, x in self.tensors.items()})

    def sequence(self, b: int) -> Results:
        """Sequence b of a batch, as a batch of one."""
        return self.map(lambda x: x[b : b + 1])

    def queries(self, start: int, end: int) -> Results:
        """Queries start … end of out and lse."""
        return self.map(lambda x: x[:, :, start:end])


@dataclass(frozen=True)
class Batch:
    """A dense call: q [B, Hq, S, D], k and v [B, Hkv, S, D], and what goes with them."""

    kernel: Kernel
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor
    option: str
    kv_lens: Tensor | None = None
    query_invariant: bool = False

    @property
    def options(self) -> dict[str, Any]:
        found = {**OPTIONS[self.option], "query_invariant": self.query_invariant}
        if found.pop("sinks", False):
            found["sinks"] = self.sinks
        return found

    def take(self, rows: list[int]) -> Batch:
        """The sequences with these numbers, in this order."""
        index = torch.tensor(rows, device=self.q.device)
        taken = {name: getattr(self, name)[index] for name in ("q", "k", "v", "dout")}
        lens = None if self.kv_lens is None else self.kv_lens[index]
        return replace(self, **taken, kv_lens=lens)

    def with_lengths(self, lens: list[int]) -> Batch:
        """The same tensors, of which sequence b has lens[b] keys."""
        return replace(self, kv_lens=torch.tensor(lens, device=self.q.device))

    def last_queries(self, n: int) -> Batch:
        """The last n queries against all keys."""
        start = self.q.shape[2] - n
        return replace(self, q=self.q[:, :, start:], dout=self.dout[:, :, start:])

    def queries(self, start: int, end: int) -> Batch:
        """Queries start … end against the keys that are in the cache by then."""
        part = replace(self, q=self.q[:, :, start:end], dout=self.dout[:, :, start:end])
        return part.with_lengths([end] * len(self.q))

    def run(self) -> Results:
        """Results of forward and backward: out, lse, dq, dk, dv."""
        return self._call(self.dout)

    def forward(self) -> Results:
        """Results of the forward alone: out and lse."""
        return self._call(None)

    def _call(self, dout: Tensor | None) -> Results:
        arguments = {"kv_lens": self.kv_lens, **self.options}
        return _call(self.kernel, lockstep.attention, (self.q, self.k, self.v), dout, **arguments)


def draw(shape: Shape, kernel: Kernel, option: str) -> Batch:
    """A random batch, the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=generator, dtype=torch.float32)
        return drawn.to(shape.dtype).to(shape.device)

    q = normal(shape.B, shape.Hq, shape.S, shape.D)
    k, v = (normal(shape.B, shape.Hkv, shape.S, shape.D) for _ in range(2))
    dout = normal(shape.B, shape.Hq, shape.S, shape.D)
    return Batch(kernel, q, k, v, dout, normal(shape.Hq), option)


def packed(batch: Batch, lens: list[int]) -> list[Results]:
    """The first lens[b] tokens of every sequence in one varlen call, split again per sequence."""
    offsets = torch.tensor([0, *lens], device=batch.q.device).cumsum(0).to(torch.int32)

    def pack(x: Tensor) -> Tensor:  # [B, H, S, D] -> [T, H, D]
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)])

    results = _call(
        batch.kernel,
        lockstep.attention_varlen,
        (pack(batch.q), pack(batch.k), pack(batch.v)),
        pack(batch.dout),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        **batch.options,
    )

    def own(b: int) -> Results:
        start = sum(lens[:b])
        return results.map(lambda x: x[start : start + lens[b]].transpose(0, 1)[None].contiguous())

    return [own(b) for b in range(len(lens))]


def paged(batch: Batch, page_size: int, order: Tensor) -> Results:
    """The keys and values in pages; page i of the batch, counted through, lies at order[i]."""
    B, Hkv, Skv, D = batch.k.shape
    per_sequence = -(-Skv // page_size)
    table = order.to(batch.q.device)[: B * per_sequence].view(B, per_sequence)

    def pool(x: Tensor) -> Tensor:  # [B, Hkv, Skv, D] -> [n_pages, page_size, Hkv, D]
        padded = torch.nn.functional.pad(x, (0, 0, 0, per_sequence * page_size - Skv))
        pages = padded.view(B, Hkv, per_sequence, page_size, D).permute(0, 2, 3, 1, 4)
        filled = x.new_full((len(order), page_size, Hkv, D), float("nan"))
        filled[table.flatten()] = pages.flatten(0, 1)
        return filled

    lens = batch.kv_lens
    if lens is None:
        lens = torch.full((B,), Skv, device=batch.q.device)
    return _call(
        batch.kernel,
        lockstep.attention_paged,
        (batch.q, pool(batch.k), pool(batch.v)),
        None,
        page_table=table.to(torch.int32),
        kv_lens=lens.to(torch.int32),
        **batch.options,
    )


def _call(
    kernel: Kernel,
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor | None,
    **arguments: Any,
) -> Results:
    """The kernel's results of function(*inputs, **arguments); with a dout, its gradients too.

    Where the kernel refuses the call or its gradients, the reason stands in their place.
    """
    problem = lockstep.explain(*inputs, **arguments).problem
    refusal = dispatch.refusal(kernel, problem)
    if refusal is not None:
        return Results({}, (refusal,))
    function = partial(function, **arguments, return_lse=True, kernel=kernel.name)
    no_gradients = None if dout is None else dispatch.refusal(kernel, problem, backward=True)
    if dout is None or no_gradients is not None:
        with torch.no_grad():
            out, lse = function(*inputs)
        refusals = () if no_gradients is None else (f"no gradients: {no_gradients}",)
        return Results({"out": out, "lse": lse}, refusals)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    # A gradient through lse as well, the same for every row.
    dlse = torch.full_like(lse, 0.25)
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return Results({"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv})
