"""The operators as torch has them: schemas, fake kernels, autograd.

`lockstep::attention`, `::attention_varlen`, `::attention_paged` and `::attention_varlen_paged`
return `(out, lse)`. The first two return `statistics` as well, for their `_backward` operators,
which return the wanted gradients in the order q, k, v, bias, sinks. `lockstep::merge` combines
partial results. Every operator is functional; where its outputs lie, `memory_order` says.
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

from lockstep import dispatch, memory_order, numerics
from lockstep.call import call_cache
from lockstep.call.eager import PLAIN_TYPES, Operator, can_skip_dispatcher, is_eager
from lockstep.call.gradients import register_gradient
from lockstep.call.prepare import prepare, prepare_backward
from lockstep.call.vmap_rules import (
    DenseArguments,
    VmapRule,
    fold_attention,
    fold_attention_backward,
    lead_with_samples,
    sample_by_sample,
)
from lockstep.checks import REQUIRED, check_parts, check_strided, check_types
from lockstep.forks import fork_safe
from lockstep.kernels.kernel import BackwardTensors, Given, Gradients, Needs, Result
from lockstep.problem import Layout, Options, Tensors, Window, describe, shown

# The name of the package: a copy of it under another name has operators of its own.
_NAMESPACE = __name__.partition(".")[0]
_LIB = torch.library.Library(_NAMESPACE, "DEF")


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema[: schema.index("(")]
    _LIB.define(schema, tags=torch.Tag.pt2_compliant_tag)
    # For every device: the kernels say which ones they run on.
    _LIB.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIB)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _define_gradient(
    op: Any,
    implementation: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    rule: VmapRule,
) -> Operator:
    register_gradient(_LIB, op, backward, setup_context)
    torch.library.register_vmap(op, partial(rule, op), lib=_LIB)
    return Operator(op, implementation, backward, setup_context)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _no_gradient(message: str) -> Callable[..., NoReturn]:
    """A backward that raises, where torch would go on without one."""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(message)

    return backward


class Attention:
    """The operator of one layout.

    Its arguments are the tensors in `fields`, which names them as `Tensors` does, then the options,
    then the name of a kernel.
    """

    operator: Operator
    OPTIONS = (
        "bool causal, int? window_left, int? window_right, float? scale, float? softcap, "
        "bool query_invariant, bool allow_tf32, bool constant_time, bool secret_lengths, "
        "int? max_seqlen_q, str? kernel"
    )

    def __init__(
        self,
        layout: Layout,
        name: str,
        fields: tuple[str, ...],
        returns: str = "(Tensor, Tensor)",
    ) -> None:
        self.layout, self.name, self.fields = layout, name, fields
        tensors = ", ".join(
            f"Tensor{'' if field in REQUIRED[layout] else '?'} {shown(field, layout)}"
            for field in fields
        )
        self.schema = f"{tensors}, {self.OPTIONS}"
        # From Tensors to the arguments of the operator; and back, with a None after them at -1.
        self.arguments_of = itemgetter(*map(Tensors._fields.index, fields))
        self.tensors_of = itemgetter(*_places(Tensors._fields, fields))
        self.op = _define(f"{name}({self.schema}) -> {returns}", self.forward, self.fake_forward)

    def call_cached(
        self,
        given: Given,
        option_arguments: tuple[Any, ...],
        window: Window | None,
        return_lse: bool,
    ) -> Any:
        """The results of a call in eager mode if there was one like it; None if there was none.

        `given` are the fields of `Tensors`, and `option_arguments` the arguments of `make_options`.
        """
        if window is not None and type(window) is not tuple:
            return None
        # 1 and True are equal, and True is wrong.
        types = None if window is None else tuple(map(type, window))
        try:
            lookup = call_cache.lookup_of_arguments(self.layout, types, *option_arguments)
        except TypeError:
            # One of them is wrong, or cannot be looked up.
            return None
        found = lookup.find(given)
        if found is None:
            return None
        entry, addresses, requires_grad = found
        if return_lse or (requires_grad and torch.is_grad_enabled()):
            results = self._run(found, Tensors._make(given), *lookup.options)
            return results[:2] if return_lse else results[0]
        out_of = getattr(entry.run, "out_of", None)
        if out_of is None:
            return entry.run(Tensors._make(given), addresses)[0]
        return out_of(given, addresses)

    def __call__(self, tensors: Tensors, options: Options, name: str | None) -> Result:
        """Runs one call, by the shortest way there is for it."""
        if is_eager():
            found = call_cache.lookup_of_options(options, name).find(tensors)
            if found is not None:
                return self._run(found, tensors, options, name)
        return self._call_uncached(tensors, options, name)

    @fork_safe
    def _call_uncached(self, tensors: Tensors, options: Options, name: str | None) -> Result:
        """Checks and runs a call that is not in the call cache."""
        check_types(tensors, self.layout)
        if not can_skip_dispatcher(tensors):
            # Compilers cannot look into `arguments_of`.
            arguments = (getattr(tensors, field) for field in self.fields)
            return self.operator.op(*arguments, *options, name)
        found = call_cache.find_or_prepare(prepare, tensors, options, name)
        return self._run(found, tensors, options, name)

    def _run(
        self, found: call_cache.Found, tensors: Tensors, options: Options, name: str | None
    ) -> Result:
        """Runs a call of plain tensors, past the dispatcher."""
        entry, addresses, requires_grad = found
        if requires_grad and torch.is_grad_enabled():
            run = partial(entry.run, tensors, addresses)
            return self.operator.with_gradient(run, self.arguments_of(tensors), (*options, name))
        results: Result = entry.run(tensors, addresses)
        return results

    def unpack(self, args: tuple[Any, ...]) -> tuple[Tensors, Options, str | None]:
        """Tensors, options and the name of a kernel from the arguments of the operator."""
        n_tensors = len(self.fields)
        tensors = Tensors._make(self.tensors_of((*args[:n_tensors], None)))
        return tensors, Options._make(args[n_tensors:-1]), args[-1]

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """The implementation of the operator, which the dispatcher calls."""
        tensors, options, name = self.unpack(args)
        check_types(tensors, self.layout)
        tensors = Tensors._make(map(_as_plain, tensors))
        entry, addresses, _ = call_cache.find_or_prepare(prepare, tensors, options, name)
        return tuple(x for x in entry.run(tensors, addresses) if x is not None)

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, options, name = self.unpack(args)
        check_types(tensors, self.layout)
        problem = describe(tensors, options)
        dispatch.candidates(name)
        out = memory_order.empty_like(tensors.q, problem.out_shape)
        of_rows = partial(memory_order.empty_like, tensors.q, dtype=problem.lse_dtype)
        if not problem.has_gradient:
            return out, of_rows(problem.lse_shape)
        return out, of_rows(problem.lse_shape), of_rows(problem.statistics_shape)


class _DifferentiableAttention(Attention):
    """The forward and backward operators of a layout with gradients."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        fields: tuple[str, ...],
        rule: VmapRule,
        backward_rule: VmapRule,
    ) -> None:
        super().__init__(layout, name, fields, "(Tensor, Tensor, Tensor)")
        self.slopes_at = fields.index("alibi_slopes")
        # From what autograd asks for, by argument, to Needs; from Gradients to the arguments.
        self.needs_of = itemgetter(*_places(Needs._fields, fields))
        self.by_argument = itemgetter(*_places(fields, Gradients._fields))
        backward_op = _define(
            f"{name}_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor statistics, "
            f"{self.schema}, bool[] needs) -> Tensor[]",
            self.backward,
            self.fake_backward,
        )
        self.backward_operator = _define_gradient(
            backward_op,
            self.backward,
            _no_gradient(f"{name} has no second derivative: its gradient has no gradient"),
            _save_nothing,
            backward_rule,
        )
        self.operator = _define_gradient(
            self.op, self.forward, self.gradients, self.setup_context, rule
        )

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what `gradients` takes."""
        if ctx.needs_input_grad[self.slopes_at]:
            raise NotImplementedError(
                "alibi_slopes takes a tensor that requires no gradient: a bias has gradients"
            )
        n_tensors = len(self.fields)
        out, _, statistics = output
        ctx.save_for_backward(*inputs[:n_tensors], out, statistics)
        ctx.mark_non_differentiable(statistics)
        ctx.options = inputs[n_tensors:]
        ctx.set_materialize_grads(False)

    def gradients(
        self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None = None
    ) -> tuple[Any, ...]:
        """The gradients in the order of the operator's arguments; autograd calls this."""
        *inputs, out, statistics = ctx.saved_tensors
        needs = Needs._make(self.needs_of((*ctx.needs_input_grad, False)))
        if dout is None:
            dout = fork_safe(torch.zeros_like)(out)
        tensors = BackwardTensors(*self.tensors_of((*inputs, None)), out, statistics, dout, dlse)
        grads = self._cached_gradients(tensors, ctx.options, needs)
        if grads is None:
            arguments = (dout, dlse, out, statistics, *inputs, *ctx.options, list(needs))
            wanted = iter(self.backward_operator(*arguments))
            grads = Gradients._make(next(wanted) if need else None for need in needs)
        return *self.by_argument((*grads, None)), *repeat(None, len(ctx.options))

    def _cached_gradients(
        self, tensors: BackwardTensors, options: tuple[Any, ...], needs: Needs
    ) -> Gradients | None:
        """The gradients of a call that is in the call cache; None for others."""
        # With grad enabled, they might be differentiated in turn.
        if torch.is_grad_enabled() or not is_eager():
            return None
        *rest, name = options
        found = call_cache.lookup_of_options(Options._make(rest), name, needs).find(tensors)
        if found is None:
            return None
        entry, addresses, _ = found
        grads: Gradients = entry.run(tensors, addresses)
        return grads

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, statistics: Tensor, *args: Any
    ) -> list[Tensor]:
        """The implementation of the backward operator, which the dispatcher calls."""
        *forward_args, needs = args
        tensors, options, name = self.unpack(tuple(forward_args))
        needs = Needs._make(needs)
        check_types(tensors, self.layout)
        check_strided("dout", dout)
        given = BackwardTensors._make(map(_as_plain, (*tensors, out, statistics, dout, dlse)))
        entry, addresses, _ = call_cache.find_or_prepare(
            prepare_backward, given, options, name, needs
        )
        grads: Gradients = entry.run(given, addresses)
        return [grad for grad, need in zip(grads, needs, strict=True) if need and grad is not None]

    def fake_backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, statistics: Tensor, *args: Any
    ) -> list[Tensor]:
        *forward_args, needs = args
        tensors, options, _ = self.unpack(tuple(forward_args))
        describe(tensors, options)
        wanted = {
            name: getattr(tensors, name)
            for name, need in zip(Needs._fields, needs, strict=True)
            if need
        }
        return [
            memory_order.empty_like(x, tuple(x.shape)) if name in "qkv" else x.new_empty(x.shape)
            for name, x in wanted.items()
        ]


class _InferenceAttention(Attention):
    """The operator of a layout without gradients."""

    def __init__(self, layout: Layout, name: str, fields: tuple[str, ...], message: str) -> None:
        super().__init__(layout, name, fields)
        self.operator = _define_gradient(
            self.op, self.forward, _no_gradient(message), _save_nothing, sample_by_sample
        )


def _places(names: tuple[str, ...], among: tuple[str, ...]) -> list[int]:
    """Where each of the names stands `among` others; -1 for one that does not."""
    return [among.index(name) if name in among else -1 for name in names]


def _as_plain(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or type(tensor) in PLAIN_TYPES:
        return tensor
    return tensor.as_subclass(Tensor)


attention = _DifferentiableAttention(
    "dense",
    "attention",
    DenseArguments._fields,
    rule=fold_attention,
    backward_rule=fold_attention_backward,
)
attention_varlen = _DifferentiableAttention(
    "varlen",
    "attention_varlen",
    ("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes"),
    rule=sample_by_sample,
    backward_rule=sample_by_sample,
)

attention_paged = _InferenceAttention(
    "paged",
    "attention_paged",
    ("q", "k", "v", "page_table", "kv_lens", "bias", "sinks", "kv_starts", "alibi_slopes"),
    "attention_paged is for inference: it has no gradient",
)
attention_varlen_paged = _InferenceAttention(
    "varlen_paged",
    "attention_varlen_paged",
    (
        *("q", "k", "v", "cu_seqlens_q", "page_table", "kv_lens", "sinks", "kv_starts"),
        "alibi_slopes",
    ),
    "attention_varlen with a page_table is for inference: it has no gradient",
)


@fork_safe
def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    outs, lses = [x.contiguous() for x in outs], [x.contiguous() for x in lses]
    return dispatch.select_merge(outs[0])(outs, lses)


def _fake_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _setup_merge_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*outs, *lses, *output)


@fork_safe
def _merge_gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    *parts, out, lse = ctx.saved_tensors
    n = len(parts) // 2
    return numerics.merge_backward(parts[:n], parts[n:], out, lse, dout, dlse)


_MERGE = _define("merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", _merge, _fake_merge)
_define_gradient(_MERGE, _merge, _merge_gradients, _setup_merge_context, lead_with_samples)


@fork_safe
def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    # Tensors without strides do not get as far as the operator.
    check_parts(outs, lses)
    if forward_ad._current_level >= 0:
        # Plain torch operations, which have a derivative in forward mode.
        return numerics.merge(outs, lses)
    out, lse = _MERGE(outs, lses)
    return out, lse
