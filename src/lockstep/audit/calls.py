"""The calls that audits compare: one drawn batch, run whole, in part, packed or in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.kernels.kernel import Kernel

Results = dict[str, Tensor]

# What a call can ask for, one set of options after the other; sinks are drawn with the batch.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, None), "softcap": 20.0, "sinks": True},
}


@dataclass(frozen=True)
class Shape:
    """The sizes and the kind of the calls an audit makes, and how often it repeats one.

    Raises ValueError for sizes that make no attention call.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    B: int = 4
    Hq: int = 8
    Hkv: int = 2
    S: int = 333
    D: int = 64
    repeats: int = 20

    def __post_init__(self) -> None:
        for name, least in (("B", 1), ("Hq", 1), ("Hkv", 1), ("S", 16), ("D", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} takes at least {least}, got {getattr(self, name)}")
        if self.Hq % self.Hkv:
            raise ValueError(f"Hq takes a multiple of Hkv = {self.Hkv}, got {self.Hq}")


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

    @property
    def options(self) -> dict[str, Any]:
        found = dict(OPTIONS[self.option])
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
        """The same tensors of which only so many keys are real."""
        return replace(self, kv_lens=torch.tensor(lens, device=self.q.device))

    def queries(self, start: int, end: int) -> Batch:
        """Queries start … end against the keys that stood in the cache by then."""
        part = replace(self, q=self.q[:, :, start:end], dout=self.dout[:, :, start:end])
        return part.with_lengths([end] * len(self.q))

    def run(self) -> Results:
        """out and lse, and dq, dk, dv where the kernel has a backward."""
        if self.kernel.backward is None:
            return self.forward()
        return _differentiate(self._attention, (self.q, self.k, self.v), self.dout)

    def forward(self) -> Results:
        """out and lse alone."""
        with torch.no_grad():
            out, lse = self._attention(self.q, self.k, self.v)
        return {"out": out, "lse": lse}

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return lockstep.attention(
            q,
            k,
            v,
            kv_lens=self.kv_lens,
            return_lse=True,
            kernel=self.kernel.name,
            **self.options,
        )


def draw(shape: Shape, kernel: Kernel, option: str) -> Batch:
    """Random numbers that are the same on every device."""
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

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return lockstep.attention_varlen(
            q, k, v, offsets, offsets, return_lse=True, kernel=batch.kernel.name, **batch.options
        )

    inputs = (pack(batch.q), pack(batch.k), pack(batch.v))
    if batch.kernel.backward is None:
        with torch.no_grad():
            results = dict(zip(("out", "lse"), attention(*inputs), strict=True))
    else:
        results = _differentiate(attention, inputs, pack(batch.dout))
    pieces = {name: torch.split(x, lens) for name, x in results.items()}
    return [
        {name: piece[b].transpose(0, 1)[None].contiguous() for name, piece in pieces.items()}
        for b in range(len(lens))
    ]


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
    with torch.no_grad():
        out, lse = lockstep.attention_paged(
            batch.q,
            pool(batch.k),
            pool(batch.v),
            table.to(torch.int32),
            lens.to(torch.int32),
            return_lse=True,
            kernel=batch.kernel.name,
            **batch.options,
        )
    return {"out": out, "lse": lse}


def sequence(results: Results, b: int) -> Results:
    """Sequence b of a batch, as a batch of one."""
    return {name: x[b : b + 1] for name, x in results.items()}


def queries(results: Results, start: int, end: int) -> Results:
    """Queries start … end of out and lse."""
    return {name: results[name][:, :, start:end] for name in ("out", "lse")}


def _differentiate(
    attention: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
) -> Results:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attention(*leaves)
    # A gradient through lse as well, the same for every row.
    dlse = torch.full_like(lse, 0.25)
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
