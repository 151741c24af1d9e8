"""The front end: a Python function in, a checked and typed kernel out.

`build` lowers the syntax tree (statements here, expressions in `expressions`, calls in `calls` and
`memory_calls`), then runs the analyses: definite assignment and scopes (`flow`), uniformity and
signs (`facts`), secrets (`secrets`). Whatever the language does not have raises
`UnsupportedConstruct` here, before anything runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from . import ir
from .expressions import BINARY
from .facts import annotate
from .flow import check_assignments, place_declarations
from .folding import describe
from .language import Intrinsic, cuda, phase
from .memory_calls import MemoryCalls
from .scope import Static, Variable
from .secrets import check_secrets
from .source import FunctionSource
from .types import ACCUMULATOR, ArrayType, Scalar, Type, int32

ARRAY_MAKERS = (cuda.shared.array, cuda.local.array)


def build(
    function: Callable,
    types: Mapping[str, Scalar | ArrayType],
    constants: Mapping[str, Any],
    secrets: frozenset[str] = frozenset(),
) -> ir.Kernel:
    """Lower `function` for the given parameter types and compile-time constants.

    Raises `UnsupportedConstruct` for anything outside the language and `SecretLeak` where a branch,
    loop bound or address depends on a parameter in `secrets`.
    """
    source = FunctionSource(function)
    front = FrontEnd(source)
    parameters = front.bind_parameters(types, constants, secrets)
    body: list[ast.stmt] = source.tree.body  # type: ignore[attr-defined]
    front.function_body(body)
    kernel = ir.Kernel(
        name=function.__name__,
        doc=function.__doc__,
        parameters=parameters,
        constants=front.constants,
        arrays=front.arrays,
        variables=front.variables,
        body=front.out,
        source=source.source,
        device_sources=front.device_sources,
    )
    check_assignments(kernel)
    place_declarations(kernel)
    annotate(kernel)
    check_secrets(kernel)
    return kernel


class FrontEnd(MemoryCalls):
    """Lowers statements."""

    def bind_parameters(
        self,
        types: Mapping[str, Scalar | ArrayType],
        constants: Mapping[str, Any],
        secrets: frozenset[str],
    ) -> tuple[ir.Parameter, ...]:
        parameters = []
        for argument in self.scope.source.tree.args.args:  # type: ignore[attr-defined]
            name, loc = argument.arg, self.loc(argument)
            if name in constants:
                value = constants[name]
                number = isinstance(value, (bool, int, float))
                if name in self.scope.assigned:
                    raise self.error(argument, f"'{name}' is a constant: it cannot be assigned")
                self.scope.bindings[name] = (
                    self.number(value, loc, name) if number else Static(value)
                )
                continue
            dtype = types[name]
            parameters.append(ir.Parameter(name, dtype, name in secrets))
            if isinstance(dtype, ArrayType):
                array = ir.Array(name, dtype.dtype, dtype.ndim, ir.Space.GLOBAL, loc)
                self.arrays[name] = self.scope.bindings[name] = array
            else:
                self.variables[name] = dtype
                self.scope.bindings[name] = Variable(name)
        return tuple(parameters)

    def function_body(self, body: list[ast.stmt]) -> None:
        """Lower a whole body; in a device function, returns are its results."""
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        self.statements(body, tail=True)

    def statements(self, body: list[ast.stmt], tail: bool = False) -> None:
        """Lower a list of statements; `tail` where nothing of the function follows it."""
        for i, node in enumerate(body):
            rest = body[i + 1 :]
            if isinstance(node, ast.If):
                test = self.condition(node.test)
                if test.const is not None:
                    self.statements((node.body if test.const else node.orelse) + rest, tail)
                    return
                if self.scope.is_device and tail and rest and returns(node.body):
                    # an early return: what follows is the other arm
                    self.branch(node, test, node.body, node.orelse + rest, tail)
                    return
                self.branch(node, test, node.body, node.orelse, tail and not rest)
                continue
            if isinstance(node, ast.Return):
                self.stmt_return(node, tail)
                return
            method = getattr(self, f"stmt_{type(node).__name__.lower()}", None)
            if method is None:
                raise self.error(node, f"{describe(node)} cannot be used in a kernel")
            method(node)

    def block(self, body: list[ast.stmt], tail: bool = False) -> ir.Block:
        """Lower a nested list of statements into a block of its own."""
        outer, self.out = self.out, []
        try:
            self.statements(body, tail)
            return self.out
        finally:
            self.out = outer

    def emit(self, cls: type, node: ast.AST, *args: Any) -> None:
        self.out.append(cls(*args, loc=self.loc(node), phase=self.phase))

    # Assignments

    def stmt_assign(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            raise self.error(node, "chained assignment; write one assignment per line")
        target = node.targets[0]
        maker = self.static(node.value.func) if isinstance(node.value, ast.Call) else None
        if isinstance(maker, Intrinsic) and maker in ARRAY_MAKERS:
            self.declare_array(node, target, node.value, maker)
        else:
            self.assign(target, self.expr(node.value), node)

    def stmt_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is None or not isinstance(node.target, ast.Name):
            raise self.error(node, "a declaration needs a name and a value")
        dtype = self.scalar_type(node.annotation)
        value = self.coerce(self.expr(node.value), dtype, node, f"'{node.target.id}'")
        self.assign(node.target, value, node)

    def stmt_augassign(self, node: ast.AugAssign) -> None:
        if type(node.op) not in BINARY:
            raise self.error(node, f"operator {describe(node.op)}= cannot be used in a kernel")
        target = node.target
        if isinstance(target, ast.Subscript):
            array = self.writable(target.value)
            index = self.indices(array, target.slice)
            old: ir.Expr = ir.Load(array, index, type=array.dtype, loc=self.loc(target))
            value = self.binary(BINARY[type(node.op)], old, self.expr(node.value), node)
            self.emit(ir.Store, node, array, index, self.stored(array, value, node))
            return
        if not isinstance(target, ast.Name):
            raise self.error(target, f"cannot assign to {describe(target)}")
        loaded = ast.copy_location(ast.Name(target.id, ast.Load()), target)
        value = self.binary(BINARY[type(node.op)], self.expr(loaded), self.expr(node.value), node)
        self.assign(target, value, node)

    def assign(self, target: ast.expr, value: ir.Expr, node: ast.stmt) -> None:
        if isinstance(target, ast.Subscript):
            array = self.writable(target.value)
            index = self.indices(array, target.slice)
            self.emit(ir.Store, node, array, index, self.stored(array, value, node))
        elif isinstance(target, ast.Name):
            name = self.variable(target, value.type)
            wanted = self.variables[name]
            if value.type != wanted:
                value = self.coerce(value, wanted, node, f"'{target.id}', assigned before as such,")
            self.emit(ir.Assign, node, name, value)
        else:
            raise self.error(
                target, f"cannot assign to {describe(target)}; assign one name at a time"
            )

    def stored(self, array: ir.Array, value: ir.Expr, node: ast.AST) -> ir.Expr:
        return self.coerce(value, array.dtype, node, f"an element of '{array.name}'")

    def variable(self, target: ast.Name, dtype: Type) -> str:
        """The variable a name is bound to; a new one of type `dtype` on first assignment."""
        bound = self.scope.bindings.get(target.id)
        if isinstance(bound, Variable):
            self.scope.spent_loop_vars.discard(target.id)
            return bound.name
        if bound is not None:
            kind = "an array" if isinstance(bound, ir.Array) else "a constant"
            raise self.error(target, f"'{target.id}' is {kind} and cannot be assigned")
        name = self.fresh(target.id)
        self.variables[name] = dtype
        self.scope.bindings[target.id] = Variable(name)
        return name

    def declare_array(
        self, node: ast.Assign, target: ast.expr, call: ast.Call, maker: Intrinsic
    ) -> None:
        if not isinstance(target, ast.Name):
            raise self.error(target, "an array is assigned to a plain name")
        if target.id in self.scope.bindings:
            raise self.error(target, f"'{target.id}' has a meaning already")
        args = self.bind(call, maker.signature, maker.name)
        space = ir.Space.SHARED if maker is cuda.shared.array else ir.Space.LOCAL
        parts = args["shape"].elts if isinstance(args["shape"], ast.Tuple) else [args["shape"]]
        shape = tuple(self.constant_int(part, "a dimension") for part in parts)
        dtype: Any = self.static(args["dtype"])
        if not (space is ir.Space.LOCAL and dtype == ACCUMULATOR):
            dtype = self.scalar_type(args["dtype"])
        array = ir.Array(
            self.fresh(target.id),
            dtype,
            len(shape),
            space,
            self.loc(node),
            shape=shape,
            extents=tuple(self.expr(part) for part in parts),
        )
        offset = args.get("offset")
        if space is ir.Space.SHARED and shape == (0,):
            array.shape = None
            array.offset = (
                self.scalar(offset)
                if isinstance(offset, ast.expr)
                else self.number(offset, array.loc)
            )
        elif any(n <= 0 for n in shape):
            raise self.error(node, f"every dimension must be positive, got {shape}")
        elif offset:
            raise self.error(node, "offset is for dynamic shared memory, shape 0")
        self.arrays[array.name] = self.scope.bindings[target.id] = array
        self.emit(ir.Declare, node, array, array.offset)

    # Control

    def branch(
        self,
        node: ast.If,
        test: ir.Expr,
        body: list[ast.stmt],
        orelse: list[ast.stmt],
        tail: bool,
    ) -> None:
        self.emit(ir.If, node, test, self.block(body, tail), self.block(orelse, tail))

    def stmt_for(self, node: ast.For) -> None:
        if node.orelse:
            raise self.error(node.orelse[0], "for/else cannot be used in a kernel")
        if not isinstance(node.target, ast.Name):
            raise self.error(node.target, "a loop variable is a plain name")
        call = node.iter
        if not (isinstance(call, ast.Call) and self.static(call.func) is range):
            raise self.error(node.iter, "a kernel can only loop over range(...)")
        if call.keywords or not 1 <= len(call.args) <= 3:
            raise self.error(call, "range() takes one to three positional arguments")
        bounds = [self.coerce(self.scalar(a), int32, a, "a bound of range()") for a in call.args]
        start = bounds[0] if len(bounds) > 1 else self.number(0, self.loc(call))
        stop = bounds[1] if len(bounds) > 1 else bounds[0]
        step = bounds[2] if len(bounds) > 2 else self.number(1, self.loc(call))
        if step.const == 0:
            raise self.error(call, "the step of range() cannot be zero")
        name = node.target.id
        inside = (n for statement in node.body for n in ast.walk(statement))
        for inner in inside:
            if (
                isinstance(inner, ast.Name)
                and inner.id == name
                and isinstance(inner.ctx, ast.Store)
            ):
                raise self.error(
                    inner, f"loop variable '{name}' cannot be assigned in its own loop"
                )
        variable = self.variable(node.target, int32)
        if self.variables[variable] != int32:
            raise self.error(
                node.target, f"'{name}' is {self.variables[variable]} elsewhere, not int32"
            )
        body = self.block(node.body)
        self.scope.spent_loop_vars.add(name)
        descending = step.const is not None and step.const < 0
        self.emit(ir.For, node, variable, start, stop, step, descending, body)

    def stmt_while(self, node: ast.While) -> None:
        if node.orelse:
            raise self.error(node.orelse[0], "while/else cannot be used in a kernel")
        test = self.not_hoisting("the condition of a while loop", self.condition, node.test)
        if test.const is not None and not test.const:
            return
        self.emit(ir.While, node, test, self.block(node.body))

    def stmt_break(self, node: ast.Break) -> None:
        self.emit(ir.Break, node)

    def stmt_continue(self, node: ast.Continue) -> None:
        self.emit(ir.Continue, node)

    def stmt_pass(self, node: ast.Pass) -> None:
        pass

    def stmt_return(self, node: ast.Return, tail: bool) -> None:
        if not self.scope.is_device:
            if node.value is not None:
                raise self.error(node, "a kernel returns nothing; store the result in an array")
            self.emit(ir.Return, node)
            return
        if not tail:
            raise self.error(
                node, "a device function returns at its end, or from the arms of an if there"
            )
        if node.value is None:
            return
        value = self.expr(node.value)
        if self.scope.result is None:
            self.scope.result = self.fresh(f"{self.inlining[-1].__name__}_result")
            self.variables[self.scope.result] = value.type
        wanted = self.variables[self.scope.result]
        value = self.coerce(value, wanted, node, "the result, returned elsewhere as such,")
        self.emit(ir.Assign, node, self.scope.result, value)

    def stmt_with(self, node: ast.With) -> None:
        item = node.items[0]
        call = item.context_expr
        if (
            len(node.items) != 1
            or item.optional_vars is not None
            or not isinstance(call, ast.Call)
            or self.static(call.func) is not phase
        ):
            raise self.error(node, "the only 'with' in a kernel is: with simt.phase('name'):")
        name = self.static(self.bind(call, phase.signature, phase.name)["name"])
        if not isinstance(name, str) or not name:
            raise self.error(call, "the name of a phase is a string literal")
        outer, self.phase = self.phase, name
        try:
            body = self.block(node.body)
        finally:
            self.phase = outer
        self.emit(ir.Phase, node, name, body)

    def stmt_expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return
        if not isinstance(node.value, ast.Call):
            raise self.error(node, "this expression has no effect")
        lowered = self.call(node.value)
        if isinstance(lowered, ir.Stmt):
            self.out.append(lowered)
        elif isinstance(lowered, (ir.Atomic, ir.Shuffle, ir.Vote)):
            self.emit(ir.Evaluate, node, lowered)
        elif lowered is not None and not isinstance(lowered, ir.Var):
            raise self.error(node, "the value of this call is not used")


def returns(body: list[ast.stmt]) -> bool:
    """Whether control never leaves the end of `body`."""
    last = body[-1]
    if isinstance(last, ast.If):
        return bool(last.orelse) and returns(last.body) and returns(last.orelse)
    return isinstance(last, ast.Return)
