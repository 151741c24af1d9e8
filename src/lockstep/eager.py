"""How an operator is called: directly, or through torch's dispatcher.

In plain eager mode the dispatcher would only find the implementation we already hold, and a short
kernel is over before it has. So a call goes there only if something may be listening: a compiler,
a mode, a transform, a tensor subclass, a profiler. If it is autograd alone, an autograd.Function
around the implementation does, at a quarter of the time that the dispatcher takes.
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
_trace = torch._C._get_tracing_state
_has_storage = torch._C._has_storage
_profiler_enabled = torch._C._autograd._profiler_enabled


def is_quiet() -> bool:
    """Whether no compiler, mode, transform, trace or profiler is at work."""
    return not (
        is_compiling()
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _trace() is not None
        or _profiler_enabled()
    )


def nobody_listens(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would do no more than call the implementation, autograd aside."""
    if not is_quiet():
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


def wants_gradient(args: tuple[Any, ...]) -> bool:
    """Of arguments that nobody listens to."""
    if torch.is_grad_enabled():
        for arg in args:
            if type(arg) in PLAIN_TYPES and arg.requires_grad:
                return True
    return False


class Operator:
    """Calls an operator: its `implementation` where nobody listens, otherwise through torch.

    `derive` and `save` are those that the operator's gradient is registered with.
    """

    def __init__(
        self,
        op: Any,
        implementation: Callable[..., Any],
        derive: Callable[..., Any],
        save: Callable[..., None],
    ) -> None:
        self.op, self.implementation = op, implementation

        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            *tensors, options, run = args
            output = tuple(run())
            save(ctx, (*tensors, *options), output)
            return output

        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            n_tensors = len(ctx.needs_input_grad) - 2
            return *derive(ctx, *grads)[:n_tensors], None, None

        self._direct: Any = type(
            op._opname,
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(backward)},
        )

    def __call__(self, *args: Any) -> Any:
        # What a transform has saved may be asked for when it is over, as by torch.func.vjp.
        args = unwrap_dead_wrappers(args)
        if not nobody_listens(args):
            return self.op(*args)
        if wants_gradient(args):
            return self.derivable(partial(self.implementation, *args), args)
        return self.implementation(*args)

    def derivable(
        self, run: Callable[[], Any], tensors: tuple[Any, ...], options: tuple[Any, ...] = ()
    ) -> Any:
        """A call that autograd alone listens to: what `run` returns, with its gradient. Autograd
        looks at each argument by itself, but not into `options`, the last ones."""
        return self._direct.apply(*tensors, options, run)
