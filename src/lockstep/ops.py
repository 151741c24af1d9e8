"""The operators torch knows: schemas, fake kernels, autograd.

`lockstep::attention`, `::attention_varlen` and `::attention_paged` return `(out, lse)`. The first
two return `statistics` as well, for their `_backward` operators, which return the wanted gradients
in the order q, k, v, bias, sinks. `lockstep::merge` combines partial results. Every operator is
functional, and its outputs are contiguous whatever the strides of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lockstep import call_cache, dispatch, numerics
from lockstep.checks import check_parts, check_strided, check_types
from lockstep.eager import PLAIN_TYPES, Operator, is_quiet, nobody_listens, wants_gradient
from lockstep.gradients import register_gradient
from lockstep.kernels.cpu.processes import fork_safe
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs, Result
from lockstep.prepare import prepare, prepare_backward
from lockstep.problem import (
    Layout,
    Options,
    Tensors,
    describe,
)
from lockstep.vmap_rules import (
    VmapRule,
    fold_attention,
    fold_attention_backward,
    lead_with_samples,
    sample_by_sample,
)

_LIB = torch.library.Library("lockstep", "DEF")


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema[: schema.index("(")]
    _LIB.define(schema, tags=torch.Tag.pt2_compliant_tag)
    # For every device: the kernels say which ones they run on.
    _LIB.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lockstep::{name}", fake, lib=_LIB)
    return getattr(torch.ops.lockstep, name).default


def _define_gradient(
    op: Any,
    implementation: Callable[..., Any],
    derive: Callable[..., Any],
    save: Callable[..., None],
    rule: VmapRule,
) -> Operator:
    register_gradient(_LIB, op, derive, save)
    torch.library.register_vmap(op, partial(rule, op), lib=_LIB)
    return Operator(op, implementation, derive, save)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _underivable(message: str) -> Callable[..., NoReturn]:
    """A gradient that raises, where torch would go on without one."""

    def derive(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(message)

    return derive


class Attention:
    """The operators of one layout.

    Their arguments are the tensors in `schema`, which `fields` names as `Tensors` does, then the
    options, then the name of a kernel.
    """

    call: Operator
    OPTIONS = (
        "bool causal, int? window_left, int? window_right, float? scale, float? softcap, "
        "bool query_invariant, bool allow_tf32, str? kernel"
    )

    def __init__(
        self,
        layout: Layout,
        name: str,
        schema: str,
        fields: tuple[str, ...],
        returns: str = "(Tensor, Tensor)",
    ) -> None:
        self.layout, self.name = layout, name
        self.schema = f"{schema}, {self.OPTIONS}"
        self.fields = fields
        # From Tensors to the arguments of the operator, and back; -1 is the None behind them.
        self.given = itemgetter(*map(Tensors._fields.index, fields))
        self.order = itemgetter(*(fields.index(f) if f in fields else -1 for f in Tensors._fields))
        self.op = _define(f"{name}({self.schema}) -> {returns}", self.forward, self.fake_forward)

    def unpack(self, args: tuple[Any, ...]) -> tuple[Tensors, Options, str | None]:
        n = len(self.fields)
        tensors = Tensors._make(self.order((*args[:n], None)))
        return tensors, Options._make(args[n:-1]), args[-1]

    def again(self, tensors: Tensors, options: Options, name: str | None) -> Result | None:
        """The results of a call like an earlier one; None if it is the first of its kind, or if
        somebody but autograd listens."""
        if not is_quiet():
            return None
        found = call_cache.find(tensors, options, name)
        if found is None:
            return None
        run, addresses, require_grad = found
        if require_grad and torch.is_grad_enabled():
            run = partial(run, tensors, addresses)
            return self.call.derivable(run, self.given(tensors), (*options, name))
        return run(tensors, addresses)

    @fork_safe
    def __call__(self, tensors: Tensors, options: Options, name: str | None) -> Result:
        if not nobody_listens(tensors):
            # Compilers cannot look into `given`.
            given = (getattr(tensors, field) for field in self.fields)
            return self.call.op(*given, *options, name)
        run = partial(self.run, tensors, options, name)
        if wants_gradient(tensors):
            return self.call.derivable(run, self.given(tensors), (*options, name))
        return run()

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """The operator."""
        tensors, options, name = self.unpack(args)
        check_types(tensors, self.layout)
        results = self.run(Tensors._make(map(_as_plain, tensors)), options, name)
        return tuple(x for x in results if x is not None)

    def run(self, tensors: Tensors, options: Options, name: str | None) -> Result:
        """Of plain tensors."""
        run, addresses, _ = call_cache.find_or_keep(prepare, tensors, options, name)
        return run(tensors, addresses)

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, name = self.unpack(args)
        check_types(tensors, self.layout)
        problem = describe(tensors, options)
        dispatch.candidates(name)
        out = tensors.q.new_empty(problem.out_shape)
        shapes = (problem.lse_shape, problem.statistics_shape)
        of_rows = shapes if problem.has_gradient else shapes[:1]
        return out, *(tensors.q.new_empty(shape, dtype=problem.lse_dtype) for shape in of_rows)


class _DerivableAttention(Attention):
    """A layout with gradients: its forward and backward operators."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        schema: str,
        fields: tuple[str, ...],
        rule: VmapRule,
        backward_rule: VmapRule,
    ) -> None:
        super().__init__(layout, name, schema, fields, "(Tensor, Tensor, Tensor)")
        # From the order of Gradients to that of the operator's tensors, and `needs_of` so far.
        places = {field: i for i, field in enumerate(Gradients._fields)}
        self.in_place = itemgetter(*(places.get(field, -1) for field in fields))
        self._needs: dict[tuple[bool, ...], Needs] = {}
        backward_op = _define(
            f"{name}_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor statistics, "
            f"{self.schema}, bool[] needs) -> Tensor[]",
            self.backward,
            self.fake_backward,
        )
        self.call_backward = _define_gradient(
            backward_op,
            self.backward,
            _underivable(f"{name} has no second derivative: its gradient cannot be derived again"),
            _save_nothing,
            backward_rule,
        )
        self.call = _define_gradient(self.op, self.forward, self.derive, self.save, rule)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, statistics: Tensor, *args: Any
    ) -> list[Tensor]:
        """The operator."""
        tensors, options, name = self.unpack(args[:-1])
        needs = Needs._make(args[-1])
        check_types(tensors, self.layout)
        check_strided("dout", dout)
        given = BackwardTensors._make(map(_as_plain, (*tensors, out, statistics, dout, dlse)))
        run, addresses, _ = call_cache.find_or_keep(prepare_backward, given, options, name, needs)
        grads: Gradients = run(given, addresses)
        return [grad for grad, need in zip(grads, needs, strict=True) if need and grad is not None]

    def derive_again(
        self, given: BackwardTensors, options: tuple[Any, ...], needs: Needs
    ) -> Gradients | None:
        """The gradients of a call like one that was derived before, as `again` does it."""
        if torch.is_grad_enabled() or not is_quiet():
            return None
        *rest, name = options
        found = call_cache.find(given, Options._make(rest), name, needs)
        if found is None:
            return None
        run, addresses, _ = found
        grads: Gradients = run(given, addresses)
        return grads

    def fake_backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, statistics: Tensor, *args: Any
    ) -> list[Tensor]:
        tensors, options, _ = self.unpack(args[:-1])
        describe(tensors, options)
        needs = Needs._make(args[-1])
        wanted = (getattr(tensors, name) for name in needs._fields if getattr(needs, name))
        return [x.new_empty(x.shape) for x in wanted]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        n = len(self.fields)
        out, _, statistics = output
        ctx.save_for_backward(*inputs[:n], out, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.options = inputs[n:]
        ctx.set_materialize_grads(False)

    def derive(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None = None
    ) -> tuple[Any, ...]:
        *inputs, out, statistics = ctx.saved_tensors
        needs = self.needs_of(ctx.needs_input_grad)
        if dout is None:
            dout = fork_safe(torch.zeros_like)(out)
        given = BackwardTensors(*self.order((*inputs, None)), out, statistics, dout, dlse)
        found = self.derive_again(given, ctx.options, needs)
        if found is None:
            results = (dout, dlse, out, statistics)
            grads = iter(self.call_backward(*results, *inputs, *ctx.options, list(needs)))
            found = Gradients._make(next(grads) if need else None for need in needs)
        return *self.in_place((*found, None)), *repeat(None, len(ctx.options))

    def needs_of(self, asked: tuple[bool, ...]) -> Needs:
        """From what autograd asks for, by argument of the operator."""
        needs = self._needs.get(asked)
        if needs is None:
            by_field = dict(zip(self.fields, asked, strict=False))
            needs = Needs._make(by_field.get(name, False) for name in Needs._fields)
            self._needs[asked] = needs
        return needs


def _as_plain(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or type(tensor) in PLAIN_TYPES:
        return tensor
    return tensor.as_subclass(Tensor)


attention = _DerivableAttention(
    "dense",
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? kv_lens",
    ("q", "k", "v", "bias", "sinks", "kv_lens"),
    rule=fold_attention,
    backward_rule=fold_attention_backward,
)
attention_varlen = _DerivableAttention(
    "varlen",
    "attention_varlen",
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    ("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
    rule=sample_by_sample,
    backward_rule=sample_by_sample,
)
attention_paged = Attention(
    "paged",
    "attention_paged",
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor kv_lens, Tensor? bias, "
    "Tensor? sinks",
    ("q", "k", "v", "page_table", "kv_lens", "bias", "sinks"),
)


@fork_safe
def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    outs, lses = [x.contiguous() for x in outs], [x.contiguous() for x in lses]
    return dispatch.select_merge(outs[0])(outs, lses)


def _fake_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _save_for_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*outs, *lses, *output)


@fork_safe
def _derive_merge(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    *parts, out, lse = ctx.saved_tensors
    n = len(parts) // 2
    return numerics.merge_backward(parts[:n], parts[n:], out, lse, dout, dlse)


_MERGE = _define("merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", _merge, _fake_merge)
_define_gradient(_MERGE, _merge, _derive_merge, _save_for_merge, lead_with_samples)

attention_paged.call = _define_gradient(
    attention_paged.op,
    attention_paged.forward,
    _underivable("attention_paged is for inference: it has no gradient"),
    _save_nothing,
    sample_by_sample,
)


@fork_safe
def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    # Tensors without strides do not get as far as the operator.
    check_parts(outs, lses)
    if forward_ad._current_level >= 0:
        # Plain torch operations, which have a derivative in forward mode.
        return numerics.merge(outs, lses)
    out, lse = _MERGE(outs, lses)
    return out, lse
