"""What numba finds out anew for each function and each operation, found out once.

Kernels have eighty functions of a few thousand operations on whole numbers: half of the time that
numba takes for them goes into looking up what an addition is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.core import base, errors, types
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering


class Operators:
    """numba's typing of calls, which remembers what it found for arithmetic and for parts.

    Finding it takes as long as everything else in type inference: numba asks each NumPy function
    of that name, too, and again for each literal.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_value_type(self, value: Any) -> Any:
        return _type_of(self._context, value)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        numbers = all(isinstance(arg, (types.Number, types.Boolean)) for arg in args)
        is_operator = numbers and isinstance(func, types.Function)
        if kws or not (is_operator or isinstance(func, types.Dispatcher)):
            return self._context.resolve_function_type(func, args, kws)
        key = func, tuple(types.unliteral(arg) for arg in args)
        if key not in _SIGNATURES:
            _SIGNATURES[key] = self._context.resolve_function_type(*key, kws)
        return _SIGNATURES[key]


_SIGNATURES: dict[Any, Any] = {}


def _type_of(context: Any, value: Any) -> Any:
    """The type of a value; functions, which numba takes for something else first, once each."""
    if not callable(value):
        return context.resolve_value_type(value)
    if id(value) not in _FUNCTIONS:
        _FUNCTIONS[id(value)] = value, context.resolve_value_type(value)
    return _FUNCTIONS[id(value)][1]


_FUNCTIONS: dict[int, tuple[Any, Any]] = {}  # with the function, whose id is its own while it lives


class _Lower(Lower):
    """numba's lowering, which tries three versions of an operator for constants before it takes the
    one for numbers. There are none for constants among those of kernels; LLVM folds them."""

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        signature = self.fndesc.calltypes[expr]
        values = [
            self.context.cast(self.builder, self.loadvar(x.name), self.typeof(x.name), kind)
            for x, kind in zip((expr.lhs, expr.rhs), signature.args, strict=True)
        ]
        key = op, signature.args
        if key not in _OPERATIONS:
            typing = self.context.typing_context
            function = _type_of(typing, op)
            _OPERATIONS[key] = function, function.get_call_type(typing, signature.args, {})
        result = self.context.get_function(*_OPERATIONS[key])(self.builder, values)
        return self.context.cast(self.builder, result, signature.return_type, resty)


_OPERATIONS: dict[Any, Any] = {}


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):
    """numba's pass with that."""

    _name = "lockstep_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower


def remember_sizes(context: Any) -> None:
    """numba asks LLVM for the size of every variable anew, by way of a module of its own."""
    ask = context.get_abi_sizeof

    def size_of(kind: ir.Type) -> int:
        key = str(kind)
        if key not in _SIZES:
            _SIZES[key] = ask(kind)
        return _SIZES[key]

    context.get_abi_sizeof = size_of


_SIZES: dict[str, int] = {}  # in bytes


@contextmanager
def taken() -> Iterator[None]:
    """For as long as a kernel is lowered, under numba's lock: no colours in messages about what
    numba tries and does not fit, no second look at the signature of what lowers an operation."""
    names = ("code", "errmsg", "filename", "indicate", "highlight", "reset")
    colours, has_loc = errors._termcolor_inst, base._has_loc
    errors._termcolor_inst = SimpleNamespace(**dict.fromkeys(names, str))
    base._has_loc = cache(has_loc)
    try:
        yield
    finally:
        errors._termcolor_inst, base._has_loc = colours, has_loc
