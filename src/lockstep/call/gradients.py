"""How the gradient of an operator is registered.

torch.library.register_autograd makes an autograd.Function of it, which torch.func refuses: such a
function has to define what it does at each level of nested transforms. It also leaves forward-mode
differentiation out without an error. An operator that only calls itself below autograd has nothing
to define, as torch's own operators do not. The registration here makes transforms accept it,
compiled or not, and raises in forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def register_gradient(
    library: torch.library.Library,
    op: Any,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> None:
    """Registers what torch.library.register_autograd would take for `op`."""

    def below_autograd(keys: Any, inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *leaves, structure, keys, grad_enabled = args
        inputs = tree_unflatten(leaves, structure)
        # Autograd is off in here, and so it would be for a transform around the one at work.
        with torch.set_grad_enabled(grad_enabled):
            output = below_autograd(keys, inputs)
        setup_context(ctx, inputs, output)
        # A list would pass for an output without gradient.
        return tuple(output)

    def backward_of_leaves(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *tree_leaves(backward(ctx, *grads)), None, None, None

    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            f"{op._opname} has no forward-mode derivative: there is no jvp of it"
        )

    methods = {"forward": forward, "backward": backward_of_leaves, "jvp": jvp}
    function: Any = type(
        f"{op._opname}_gradient",
        (torch.autograd.Function,),
        {name: staticmethod(method) for name, method in methods.items()},
    )
    # Function.apply is this and the refusal.
    apply: Any = super(torch.autograd.Function, function).apply
    returns_list = str(op._schema.returns[0].type).startswith("List")

    def call(keys: Any, *inputs: Any) -> Any:
        if not _is_differentiated(inputs):
            return below_autograd(keys, inputs)
        leaves, structure = tree_flatten(inputs)
        with enable_single_level_autograd_function():
            output = apply(*leaves, structure, keys, torch.is_grad_enabled())
        return list(output) if returns_list else output

    library.impl(op._opname, call, "Autograd", with_keyset=True)


def _is_differentiated(inputs: tuple[Any, ...]) -> bool:
    """Whether autograd, or a forward-mode derivative, follows a call with these inputs."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
