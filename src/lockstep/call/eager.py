"""The eager path: a call of an operator that does not go through torch's dispatcher.

In eager mode the dispatcher would only find the implementation that is at hand already, and a short
kernel is over before it has. So a call goes through the dispatcher only where something has to see
it there: a compiler, a mode, a transform, a tensor subclass, a profiler. For autograd alone, an
autograd.Function around the implementation is enough, at a quarter of the time that the dispatcher
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
# Asking whether one of these is a tensor takes longer than knowing that it is not.
_OPTION_TYPES = frozenset({type(None), bool, int, float, str, list})


# Looked up once: on the way to a short kernel the looking-up counts.
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._is_tracing
_has_storage = torch._C._has_storage
_profiler_enabled = torch._C._autograd._profiler_enabled


def is_eager() -> bool:
    """Whether no compiler, mode, transform, trace or profiler is active."""
    return not (
        is_compiling()
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _is_tracing()
        or _profiler_enabled()
    )


def can_skip_dispatcher(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would do no more than call the implementation, autograd aside."""
    if not is_eager():
        return False
    for arg in args:
        kind = type(arg)
        if kind in PLAIN_TYPES:
            if not (arg.is_cuda or arg.is_cpu) or arg.is_neg() or arg._is_zerotensor():
                return False
            # Several gradients at a time (is_grads_batched) come wrapped.
            if not _has_storage(arg):
                return False
        elif kind not in _OPTION_TYPES and isinstance(arg, Tensor):
            return False
    return True


def _requires_grad(args: tuple[Any, ...]) -> bool:
    """Whether autograd records a call whose tensors are of plain types."""
    return torch.is_grad_enabled() and any(
        arg.requires_grad for arg in args if type(arg) in PLAIN_TYPES
    )


class Operator:
    """An operator that is called past the dispatcher where `can_skip_dispatcher` allows it.

    `backward` and `setup_context` are those that the operator's gradient is registered with.
    """

    def __init__(
        self,
        op: Any,
        implementation: Callable[..., Any],
        backward: Callable[..., Any],
        setup_context: Callable[..., None],
    ) -> None:
        self.op, self.implementation = op, implementation

        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            *tensors, options, run = args
            output = tuple(run())
            setup_context(ctx, (*tensors, *options), output)
            return output

        def backward_of_tensors(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            n_tensors = len(ctx.needs_input_grad) - 2
            return *backward(ctx, *grads)[:n_tensors], None, None

        function: Any = type(
            op._opname,
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(backward_of_tensors)},
        )
        # Function.apply is this, and looks for transforms, of which there are none here.
        self._apply: Any = super(torch.autograd.Function, function).apply

    def __call__(self, *args: Any) -> Any:
        # What a transform has saved may be asked for when it is over, as by torch.func.vjp.
        args = unwrap_dead_wrappers(args)
        if not can_skip_dispatcher(args):
            return self.op(*args)
        if _requires_grad(args):
            return self.with_gradient(partial(self.implementation, *args), args)
        return self.implementation(*args)

    def with_gradient(
        self, run: Callable[[], Any], tensors: tuple[Any, ...], options: tuple[Any, ...] = ()
    ) -> Any:
        """The results of `run`, recorded by autograd as this operator's results.

        `tensors` and `options` are the arguments of the operator. Autograd looks at each of the
        tensors, and at no option.
        """
        return self._apply(*tensors, options, run)
