"""The operators torch knows: schemas, fake kernels, autograd.

`lockstep::attention`, `::attention_varlen` and `::attention_paged` return `(out, lse)`. The first
two have a `_backward` operator, which returns the wanted gradients in the order q, k, v, bias,
sinks. `lockstep::merge` combines partial results. Every operator is functional, and its outputs
are contiguous whatever the strides of its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep import numerics, vmap
from lockstep.dispatch import select
from lockstep.kernels.kernel import Needs
from lockstep.problem import Options, Tensors, check_parts, check_values, describe

_LIB = torch.library.Library("lockstep", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_OPTIONS = (
    "bool causal, int? window_left, int? window_right, float? scale, float? softcap, str? kernel"
)


class _AttentionOp:
    """One layout's operator: its tensors (`fields` says which), the options, the kernel's name."""

    def __init__(self, name: str, schema: str, fields: tuple[str, ...]) -> None:
        self.name = name
        self.schema = schema
        self.fields = fields
        _LIB.define(f"{name}({schema}, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS)
        _LIB.impl(name, self.forward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lockstep::{name}", self.fake, lib=_LIB)

    def unpack(self, args: tuple[Any, ...]) -> tuple[Tensors, Options, str | None]:
        n = len(self.fields)
        tensors = Tensors(**dict(zip(self.fields, args[:n], strict=True)))
        return tensors, Options(*args[n:-1]), args[-1]

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        tensors, options, kernel = self.unpack(args)
        problem = describe(tensors, options)
        check_values(problem, tensors)
        return select(problem, kernel).forward(problem, _with_contiguous_rows(tensors))

    def fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        tensors, options, _ = self.unpack(args)
        problem = describe(tensors, options)
        out = tensors.q.new_empty(problem.out_shape)
        return out, tensors.q.new_empty(problem.lse_shape, dtype=problem.lse_dtype)

    def register_no_gradient(self) -> None:
        _register_underivable(
            self.name, f"{self.name} is for inference: it has no gradient, run it under no_grad()"
        )

    def register_gradient(self) -> None:
        name = f"{self.name}_backward"
        _LIB.define(
            f"{name}(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {self.schema}, "
            f"{_OPTIONS}, bool[] needs) -> Tensor[]",
            tags=_TAGS,
        )
        _LIB.impl(name, self.backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lockstep::{name}", self.fake_backward, lib=_LIB)
        torch.library.register_autograd(
            f"lockstep::{self.name}",
            self.derive,
            setup_context=self.save_for_derive,
            lib=_LIB,
        )
        _register_underivable(
            name, f"{self.name} has no second derivative: its gradient cannot be derived again"
        )

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> list[Tensor]:
        *inputs, needs = args
        tensors, options, name = self.unpack(tuple(inputs))
        problem = describe(tensors, options)
        check_values(problem, tensors)
        kernel = select(problem, name, backward=True)
        assert kernel.backward is not None
        grads = kernel.backward(
            problem,
            _with_contiguous_rows(tensors),
            out,
            lse,
            _contiguous_rows(dout),
            None if dlse is None else dlse.contiguous(),
            Needs(*needs),
        )
        return [grad for grad, needed in zip(grads, needs, strict=True) if needed]

    def fake_backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> list[Tensor]:
        *inputs, needs = args
        tensors, _, _ = self.unpack(tuple(inputs))
        wanted = (getattr(tensors, n) for n, need in zip(Needs._fields, needs, strict=True) if need)
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]

    def save_for_derive(
        self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        n = len(self.fields)
        ctx.save_for_backward(*inputs[:n], *output)
        ctx.options = inputs[n:]
        ctx.set_materialize_grads(False)

    def derive(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        asked = dict(zip(self.fields, ctx.needs_input_grad, strict=False))
        needs = [asked.get(name, False) for name in Needs._fields]
        if dout is None:
            dout = torch.zeros_like(out)
        op = getattr(torch.ops.lockstep, f"{self.name}_backward").default
        grads = iter(op(dout, dlse, out, lse, *inputs, *ctx.options, needs))
        found = {name: next(grads) for name, need in zip(Needs._fields, needs, strict=True) if need}
        return *(found.get(name) for name in self.fields), *(None for _ in ctx.options)


def _register_underivable(name: str, message: str) -> None:
    """Autograd that raises, where torch would go on without a gradient."""

    def derive(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(message)

    torch.library.register_autograd(f"lockstep::{name}", derive, lib=_LIB)


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _with_contiguous_rows(tensors: Tensors) -> Tensors:
    q, k, v, bias = tensors[:4]
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and bias is None:
        return tensors
    return tensors._replace(
        q=_contiguous_rows(q),
        k=_contiguous_rows(k),
        v=_contiguous_rows(v),
        bias=None if bias is None else _contiguous_rows(bias),
    )


_DENSE = _AttentionOp(
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? kv_lens",
    ("q", "k", "v", "bias", "sinks", "kv_lens"),
)
_DENSE.register_gradient()
_VARLEN = _AttentionOp(
    "attention_varlen",
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    ("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
)
_VARLEN.register_gradient()
_PAGED = _AttentionOp(
    "attention_paged",
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor kv_lens, Tensor? bias, "
    "Tensor? sinks",
    ("q", "k", "v", "page_table", "kv_lens", "bias", "sinks"),
)
_PAGED.register_no_gradient()


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    outs = [out.contiguous() for out in outs]
    lses = [lse.contiguous() for lse in lses]
    return numerics.merge(outs, lses)


def _fake_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _save_for_derive_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*outs, *lses, *output)


def _derive_merge(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    *parts, out, lse = ctx.saved_tensors
    n = len(parts) // 2
    return numerics.merge_backward(parts[:n], parts[n:], out, lse, dout, dlse)


_LIB.define("merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", tags=_TAGS)
_LIB.impl("merge", _merge, "CompositeExplicitAutograd")
torch.library.register_fake("lockstep::merge", _fake_merge, lib=_LIB)
torch.library.register_autograd(
    "lockstep::merge", _derive_merge, setup_context=_save_for_derive_merge, lib=_LIB
)

vmap.register(_LIB)

attention = torch.ops.lockstep.attention.default
attention_varlen = torch.ops.lockstep.attention_varlen.default
attention_paged = torch.ops.lockstep.attention_paged.default
merge = torch.ops.lockstep.merge.default
