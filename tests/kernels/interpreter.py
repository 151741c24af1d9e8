"""Triton's interpreter, repaired where it stands in the way. Import this before running kernels.

Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an int: so loops would
have no bounds. And it keeps bfloat16 as bit patterns, which it would multiply as integers.

Most of its time goes into what gives no result, and is left out here:

- At every call of a device function it replaces all functions of the language, which the kernel
  that makes the call has done already.
- It works out whether an integer sum overflows, for an assertion that it then does not make.
- It describes the type and the shape of every tensor anew, of which there are a few dozen.
- It looks for a common type and a common shape where both operands have them, and makes a tensor of
  a number only to learn its type, and another each time the number comes.
- It compares the width of what NumPy returned with that of the type, twice for each result.
- Between a call in a kernel and the function that it means stand two more.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_np_dtype_of_scalar = cache(interpreter._get_np_dtype)
_patch_lang = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_block_type = type("_block_type", (tl.block_type,), {"__init__": tl.block_type.__init__})
_broadcast = TritonSemantic.broadcast_impl_value
_operands = TritonSemantic.binary_op_type_checking_impl
_scalar_constant = TritonSemantic.scalar_constant
_handle = interpreter.TensorHandle
_unwrap = tl.core._unwrap_if_constexpr
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _as_multiplied(handle: Any, precision: Any) -> Any:
    """A factor as float32: bfloat16 widened, float32 cut to tf32 where tensor cores would."""
    if handle.dtype == tl.bfloat16:
        bits = handle.data.astype(np.uint32) << 16
    elif handle.dtype == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
        bits = np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)
    else:
        return handle
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _dot_of_floats(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
    a, b = _as_multiplied(a, precision), _as_multiplied(b, precision)
    return _create_dot(self, a, b, d, precision, *rest)


class _Patched:
    """The modules of the language that are patched while a kernel runs; None between kernels."""

    modules: set[frozenset[int]] | None = None


@cache
def _modules_of(fn: Any) -> frozenset[int]:
    """The modules of the language that a function sees."""
    return frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)


def _patch_once(fn: Any) -> Any:
    """Patches what `fn` sees of the language, unless the kernel that calls it has done so."""
    modules = _modules_of(fn)
    if _Patched.modules is None:
        scope = _patch_lang(fn)
        _Patched.modules = {modules}
        restore = scope.restore

        def restore_and_forget() -> None:
            _Patched.modules = None
            restore()

        scope.restore = restore_and_forget
        return scope
    if modules not in _Patched.modules:
        _Patched.modules.add(modules)
        _patch_lang(fn)
    # The interpreter restores what a kernel has patched, and not what a device function has.
    return None


def _np_dtype(ty: Any) -> np.dtype:
    """What the interpreter makes a table of all types for, each time."""
    scalar = ty.scalar
    is_pointer = isinstance(scalar, tl.pointer_type)
    return np.dtype(np.uint64) if is_pointer else _np_dtype_of_scalar(scalar)


@cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """What all types of a shape have in common."""
    made = _block_type(tl.float32, tl.tuple(shape))
    return made.shape, made.numel, made.name.rpartition(", ")[0]


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    # Sizes of another block are a tuple of numbers already.
    is_plain = type(shape) is tuple and type(shape[0]) is int
    sizes = shape if is_plain else [n.value if type(n) is tl.constexpr else n for n in shape]
    self.sizes = tuple(sizes)
    self.shape, self.numel, name = _block(self.sizes)
    self.name = f"{name}, {element_ty}>"


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape and the number of elements that a tensor has."""
    return tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(type.sizes if type.is_block() else ())


def _broadcast_blocks(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Gives both operands one shape."""
    a, b = _sizes(lhs), _sizes(rhs)
    if a == b:
        return lhs, rhs
    if not a or not b:
        return _fill(self, lhs, b) if b else lhs, _fill(self, rhs, a) if a else rhs
    if len(a) != len(b):
        return _broadcast(self, lhs, rhs)
    sizes = tuple([n if m == 1 else m for m, n in zip(a, b, strict=True)])
    return _spread(self, lhs, sizes), _spread(self, rhs, sizes)


def _sizes(x: Any) -> tuple[int, ...]:
    return x.type.sizes if x.type.is_block() else ()


def _fill(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    """A block of one number."""
    data = np.empty(sizes, x.handle.data.dtype)
    data.fill(x.handle.data.item())
    return self.tensor(_handle(data, x.dtype), tl.block_type(x.dtype, sizes))


def _spread(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    if x.type.sizes == sizes:
        return x
    return self.tensor(
        self.builder.create_broadcast(x.handle, sizes), tl.block_type(x.dtype, sizes)
    )


def _typed_operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Gives both operands one type and one shape; a number takes the type of the other."""
    a = lhs.dtype if isinstance(lhs, tl.tensor) else None
    b = rhs.dtype if isinstance(rhs, tl.tensor) else None
    if a is not None and b is not None:
        if (allow_lhs_ptr and b in _SIGNED) if a.is_ptr() else a is b and not div_or_mod:
            return self.broadcast_impl_value(lhs, rhs)
        if arithmetic_check and a in _SIGNED and b in _SIGNED:
            wider = tl.int64 if a != b else a
            return self.broadcast_impl_value(self.cast(lhs, wider), self.cast(rhs, wider))
    elif arithmetic_check and a is not None and _is_of(rhs, a):
        return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, a))
    elif arithmetic_check and b is not None and _is_of(lhs, b):
        return self.broadcast_impl_value(self.scalar_constant(lhs, b), rhs)
    given = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    return _operands(self, lhs, rhs, *given)


def _is_of(x: Any, dtype: Any) -> bool:
    """Whether a number takes this type and no other."""
    if type(x) is int:
        return dtype is tl.float32 or (dtype in _SIGNED and abs(x) < 1 << 31)
    return type(x) is float and dtype is tl.float32


@lru_cache(maxsize=1000)
def _constant(value: Any, kind: type, dtype: Any) -> Any:
    made = _scalar_constant(TritonSemantic(interpreter.interpreter_builder), value, dtype)
    made.handle.data.flags.writeable = False
    return made


def _known_constant(self: Any, value: Any, dtype: Any) -> Any:
    return _constant(value, type(value), dtype)


def _is_equal(self: Any, other: Any) -> bool:
    """Whether two types are the same."""
    if self is other:
        return True
    other = other.value if type(other) is tl.constexpr else other
    return isinstance(other, tl.dtype) and self.name == other.name


def _unwrapped(x: Any) -> Any:
    """A value, of which few are constants of the kernel or tuples."""
    kind = type(x)
    if kind is tl.tensor or kind is int or x is None:
        return x
    return x.value if kind is tl.constexpr else _unwrap(x)


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _call_with_semantic(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    # Most are behind a check that there is a semantic.
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    scope.set_attr(obj, name, call)


_SIGNED = (tl.int32, tl.int64)
TritonSemantic.broadcast_impl_value = _broadcast_blocks
TritonSemantic.binary_op_type_checking_impl = _typed_operands
TritonSemantic.scalar_constant = _known_constant
tl.core._unwrap_if_constexpr = _unwrapped
tl.dtype.__eq__ = _is_equal
interpreter.TensorHandle.__init__ = _init_handle
interpreter._patch_attr = _call_with_semantic
tl.block_type.__init__ = _init_block_type
tl.tensor.__init__ = _init_tensor
TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _np_dtype
interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_dot = _dot_of_floats
