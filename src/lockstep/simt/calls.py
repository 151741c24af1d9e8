"""Calls: casts, the language's own functions, and device functions (inlined)."""

from __future__ import annotations

import ast
import inspect
import math
from typing import Any

from . import ir
from .expressions import NOT_STATIC, Expressions
from .language import Constant, Intrinsic
from .scope import Device, Scope, Static, Variable
from .source import FunctionSource
from .types import (
    ACCUMULATOR,
    Scalar,
    VectorType,
    bool_,
    float32,
    int32,
    round_to_float32,
    scalar_named,
    uint32,
    wrap,
)

FLOAT_MATH = ("exp", "exp2", "ct_exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "floor", "ceil")
BIT_MATH = ("popc", "clz", "ffs", "brev")


class Calls(Expressions):
    """Lowers call expressions. A method named after a function of the language lowers it."""

    def expr_call(self, node: ast.Call) -> ir.Expr:
        lowered = self.call(node)
        if not isinstance(lowered, ir.Expr):
            raise self.error(node, f"{ast.unparse(node.func)}() has no value")
        return lowered

    def call(self, node: ast.Call) -> ir.Expr | ir.Stmt | None:
        """Lower a call: an expression, a statement, or None for a device function without value."""
        target = self.static(node.func)
        if isinstance(target, Intrinsic):
            handler = getattr(self, target.name.replace(".", "_"), None)
            args = self.bind(node, target.signature, target.name)
            if handler is not None:
                return handler(node, **args)
            return self.function(node, target.name.removeprefix("cuda."), list(args.values()))
        if isinstance(target, Device):
            return self.inline(node, target)
        if target is not NOT_STATIC:
            dtype = scalar_named(target)
            if dtype is not None:
                return self.cast(node, dtype)
            if target in (min, max, abs) or getattr(math, target.__name__, None) is target:
                if node.keywords:
                    raise self.error(node, f"{target.__name__}() takes no keyword arguments")
                return self.function(node, target.__name__, node.args)
            if target in (int, float):
                raise self.error(
                    node, f"{target.__name__}() is 64 bits wide; use {target.__name__}32()"
                )
        raise self.error(node, f"a kernel cannot call '{ast.unparse(node.func)}'")

    def bind(self, node: ast.Call, signature: inspect.Signature, name: str) -> dict[str, Any]:
        """Arguments by parameter name: syntax nodes, Python defaults, or a list for *args."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise self.error(node, "* and ** arguments cannot be used in a kernel")
        try:
            bound = signature.bind(*node.args, **{k.arg: k.value for k in node.keywords})
        except TypeError as error:
            raise self.error(node, f"{name}{signature}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def cast(self, node: ast.Call, dtype: Scalar) -> ir.Expr:
        if len(node.args) != 1 or node.keywords:
            raise self.error(node, f"{dtype}() takes one value")
        value = self.scalar(node.args[0])
        if value.type == dtype:
            return value
        if isinstance(value, ir.Literal) and dtype == float32:
            adapted = self.adapt(value, dtype)
            if adapted is not None:
                return adapted
        return ir.Cast(value, type=dtype, loc=self.loc(node), const=convert(value.const, dtype))

    # Functions of values

    def function(self, node: ast.Call, name: str, args: list[ast.expr]) -> ir.Expr:
        """min, max, abs and the math functions."""
        loc = self.loc(node)
        arity = {"min": 2, "max": 2, "fma": 3}.get(name, 1)
        known = ("min", "max", "abs", "fabs", "fma", *FLOAT_MATH, *BIT_MATH)
        if name not in known:
            raise self.error(node, f"function '{name}' is not part of the language")
        if len(args) != arity:
            raise self.error(node, f"{name}() takes {arity} argument(s), got {len(args)}")
        values = [self.expr(a) for a in args]
        if any(isinstance(v.type, VectorType) for v in values):
            raise self.error(node, f"{name}() does not apply to vectors; use their items")
        if ACCUMULATOR in [v.type for v in values]:
            values = [self.accumulator_operand(v, node) for v in values]
            return ir.Math(name, tuple(values), type=ACCUMULATOR, loc=loc)
        if name in BIT_MATH:
            value = values[0]
            if value.type not in (int32, uint32):
                raise self.error(node, f"{name}() needs an integer, got {value.type}")
            return ir.Math(name, (value,), type=value.type if name == "brev" else int32, loc=loc)
        if name in ("min", "max"):
            left, right = self.unify(*values, node, f"arguments of {name}()")
            if left.type == bool_:
                raise self.error(node, f"{name}() does not apply to bool_; use 'and' or 'or'")
            const = None
            if left.const is not None and right.const is not None:
                const = (min if name == "min" else max)(left.const, right.const)
            return ir.Math(name, (left, right), type=left.type, loc=loc, const=const)
        if name == "abs" and values[0].type == int32:
            return ir.Math("abs", (values[0],), type=int32, loc=loc)
        floats = tuple(self.elementwise(v, node) for v in values)
        return ir.Math("abs" if name == "fabs" else name, floats, type=float32, loc=loc)

    def cuda_bitcast(self, node: ast.Call, value: ast.expr, dtype: ast.expr) -> ir.Expr:
        operand, target = self.scalar(value), self.scalar_type(dtype)
        if bool_ in (operand.type, target) or operand.type.bits != target.bits:
            raise self.error(node, f"cannot read the bits of {operand.type} as {target}")
        return ir.Bitcast(operand, type=target, loc=self.loc(node))

    def ct_select(
        self, node: ast.Call, condition: ast.expr, if_true: ast.expr, if_false: ast.expr
    ) -> ir.Expr:
        test = self.condition(condition)
        left, right = self.expr(if_true), self.expr(if_false)
        if not (isinstance(left.type, VectorType) and left.type == right.type):
            left, right = self.unify(left, right, node, "the two values", widen=False)
        return ir.Select(test, left, right, constant_time=True, type=left.type, loc=self.loc(node))

    def ct_exp2(self, node: ast.Call, x: ast.expr) -> ir.Expr:
        return self.function(node, "ct_exp2", [x])

    def ct_mask(self, node: ast.Call, condition: ast.expr) -> ir.Expr:
        loc = self.loc(node)
        ones, zero = self.number(0xFFFFFFFF, loc), self.adapt(self.number(0, loc), uint32)
        test = self.condition(condition)
        return ir.Select(test, ones, zero, constant_time=True, type=uint32, loc=loc)

    def cuda_grid(self, node: ast.Call, ndim: ast.expr) -> ir.Expr:
        return self._grid(node, ndim, "blockIdx.x", "threadIdx.x")

    def cuda_gridsize(self, node: ast.Call, ndim: ast.expr) -> ir.Expr:
        return self._grid(node, ndim, "gridDim.x", None)

    def _grid(self, node: ast.Call, ndim: ast.expr, outer: str, inner: str | None) -> ir.Expr:
        if self.constant_int(ndim, "the number of dimensions") != 1:
            raise self.error(node, "only grid(1) and gridsize(1); use cuda.blockIdx.y and friends")
        loc = self.loc(node)
        a, b = (ir.Special(name, type=int32, loc=loc) for name in (outer, "blockDim.x"))
        product = ir.Binary("*", a, b, type=int32, loc=loc)
        if inner is None:
            return product
        return ir.Binary("+", product, ir.Special(inner, type=int32, loc=loc), type=int32, loc=loc)

    # Synchronisation and warps

    def cuda_syncthreads(self, node: ast.Call) -> ir.Stmt:
        return ir.Barrier(loc=self.loc(node), phase=self.phase)

    def cuda_threadfence(self, node: ast.Call) -> ir.Stmt:
        return ir.Fence(loc=self.loc(node), phase=self.phase)

    def cuda_syncwarp(self, node: ast.Call, mask: ast.expr | int) -> ir.Stmt:
        return ir.WarpBarrier(self.mask(mask, node), loc=self.loc(node), phase=self.phase)

    def mask(self, mask: ast.expr | int, node: ast.Call) -> ir.Expr:
        value = self.number(mask, self.loc(node)) if isinstance(mask, int) else self.scalar(mask)
        return self.coerce(value, uint32, node, "the mask")

    def _shuffle(self, node: ast.Call, mode: str, mask: Any, value: Any, lane: Any) -> ir.Expr:
        shuffled = self.scalar(value)
        if shuffled.type == bool_:
            raise self.error(node, "bool_ cannot be shuffled; use a vote, or cast to int32")
        source = self.coerce(self.scalar(lane), int32, node, "the lane")
        return ir.Shuffle(
            mode, self.mask(mask, node), shuffled, source, type=shuffled.type, loc=self.loc(node)
        )

    def cuda_shfl_sync(self, node: ast.Call, mask: Any, value: Any, lane: Any) -> ir.Expr:
        return self._shuffle(node, "idx", mask, value, lane)

    def cuda_shfl_up_sync(self, node: ast.Call, mask: Any, value: Any, delta: Any) -> ir.Expr:
        return self._shuffle(node, "up", mask, value, delta)

    def cuda_shfl_down_sync(self, node: ast.Call, mask: Any, value: Any, delta: Any) -> ir.Expr:
        return self._shuffle(node, "down", mask, value, delta)

    def cuda_shfl_xor_sync(self, node: ast.Call, mask: Any, value: Any, lane_mask: Any) -> ir.Expr:
        return self._shuffle(node, "xor", mask, value, lane_mask)

    def _vote(self, node: ast.Call, mode: str, mask: Any, predicate: Any) -> ir.Expr:
        dtype = uint32 if mode == "ballot" else bool_
        test = self.condition(predicate)
        return ir.Vote(mode, self.mask(mask, node), test, type=dtype, loc=self.loc(node))

    def cuda_all_sync(self, node: ast.Call, mask: Any, predicate: Any) -> ir.Expr:
        return self._vote(node, "all", mask, predicate)

    def cuda_any_sync(self, node: ast.Call, mask: Any, predicate: Any) -> ir.Expr:
        return self._vote(node, "any", mask, predicate)

    def cuda_ballot_sync(self, node: ast.Call, mask: Any, predicate: Any) -> ir.Expr:
        return self._vote(node, "ballot", mask, predicate)

    # Inlining

    def inline(self, node: ast.Call, device: Device) -> ir.Expr | None:
        """Put the body of a device function before the statement that calls it."""
        if self.no_inlining is not None:
            raise self.error(
                node,
                f"a device function cannot be called in {self.no_inlining}: it is inlined before "
                "the statement; call it in a statement of its own",
            )
        if device in self.inlining:
            raise self.error(node, f"device function '{device.__name__}' calls itself")
        source = FunctionSource(device.function)
        arguments = self.bind(node, inspect.signature(device.function), device.__name__)
        body: ir.Block = []
        callee = Scope(source, is_device=True)
        for name, value in arguments.items():
            callee.bindings[name] = self.argument(name, value, callee, body, node)
        self.device_sources[device.__name__] = source.source
        caller, out = self.scope, self.out
        self.scope, self.out = callee, body
        self.inlining.append(device)
        try:
            self.function_body(source.tree.body)  # type: ignore[attr-defined]
        finally:
            self.inlining.pop()
            self.scope, self.out = caller, out
        loc = self.loc(node)
        self.out.append(ir.Inlined(device.__name__, body, callee.result, loc=loc, phase=self.phase))
        if callee.result is None:
            return None
        return ir.Var(callee.result, type=self.variables[callee.result], loc=loc)

    def argument(self, name: str, node: Any, callee: Scope, body: ir.Block, call: ast.Call) -> Any:
        """The value that a parameter of a device function is bound to."""
        if not isinstance(node, ast.expr):  # a default, already a Python value
            if isinstance(node, (bool, int, float)):
                return self.number(node, self.loc(call))
            return Static(node)
        array = self.array_named(node)
        if array is not None:
            return array
        static = self.static(node)
        if isinstance(static, str) or (
            static is not NOT_STATIC
            and not isinstance(static, (bool, int, float))
            and scalar_named(static) is not None
        ):
            return Static(static)
        value = self.expr(node)
        annotations = {a.arg: a.annotation for a in callee.source.tree.args.args}
        annotation = callee.source.annotation(annotations.get(name))
        if annotation is Constant and value.const is None:
            raise self.error(node, f"'{name}' must be known at compile time")
        dtype = annotation if isinstance(annotation, Scalar) else None
        if dtype is not None:
            value = self.coerce(value, dtype, node, f"argument '{name}'")
        unchanged = name not in callee.assigned
        if value.const is not None and unchanged:
            return value
        if isinstance(value, ir.Var) and unchanged:
            return Variable(value.name)
        fresh = self.fresh(name)
        self.variables[fresh] = value.type
        body.append(ir.Assign(fresh, value, loc=self.loc(node), phase=self.phase))
        return Variable(fresh)

    def function_body(self, body: list[ast.stmt]) -> None:
        raise NotImplementedError  # statements: frontend.FrontEnd


def convert(value: int | float | bool | None, dtype: Scalar) -> int | float | None:
    """A constant cast at compile time; None where that is left to the machine's rounding."""
    if isinstance(value, int) and dtype == float32:
        return round_to_float32(value)
    if isinstance(value, int) and dtype.is_integer:
        return wrap(int(value), dtype)
    return None
