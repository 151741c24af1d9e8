"""Calls that touch memory: atomics, vectors, asynchronous copies and matrix fragments."""

from __future__ import annotations

import ast
from typing import Any

from . import ir
from .calls import Calls
from .expressions import NOT_STATIC
from .types import (
    ACCUMULATOR,
    FragmentType,
    Scalar,
    VectorType,
    bfloat16,
    float16,
    float32,
    int32,
    uint32,
)

ACCESS_BYTES = (4, 8, 16)


class MemoryCalls(Calls):
    """Lowers `cuda.atomic.*`, `cuda.v*`, `cuda.memcpy_async`, `cuda.pipeline_*` and `wmma.*`."""

    def writable(self, node: ast.expr) -> ir.Array:
        array = self.array(node)
        array.written = True
        return array

    # Atomics

    def _atomic(
        self, node: ast.Call, op: str, array: Any, index: Any, value: Any, compare: Any = None
    ) -> ir.Expr:
        target = self.writable(array)
        if target.dtype not in (int32, uint32):
            raise self.error(
                node,
                f"atomics are for int32 and uint32, '{target.name}' holds {target.dtype}"
                + ("; the order of float additions would change the result" if op == "add" else ""),
            )
        if target.space is ir.Space.LOCAL:
            raise self.error(
                node, f"'{target.name}' belongs to one thread; an atomic has no meaning there"
            )
        operand = self.coerce(self.scalar(value), target.dtype, node, "the value")
        expected = None
        if compare is not None:
            expected = self.coerce(self.scalar(compare), target.dtype, node, "the old value")
        place = self.indices(target, index)
        return ir.Atomic(
            op, target, place, operand, expected, type=target.dtype, loc=self.loc(node)
        )

    def cuda_atomic_add(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "add", array, index, value)

    def cuda_atomic_sub(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "sub", array, index, value)

    def cuda_atomic_min(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "min", array, index, value)

    def cuda_atomic_max(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "max", array, index, value)

    def cuda_atomic_and_(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "and", array, index, value)

    def cuda_atomic_or_(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "or", array, index, value)

    def cuda_atomic_xor(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "xor", array, index, value)

    def cuda_atomic_exch(self, node: ast.Call, array: Any, index: Any, value: Any) -> ir.Expr:
        return self._atomic(node, "exch", array, index, value)

    def cuda_atomic_cas(
        self, node: ast.Call, array: Any, index: Any, old: Any, value: Any
    ) -> ir.Expr:
        return self._atomic(node, "cas", array, index, value, old)

    # Vectors

    def vector_type(self, dtype: Any, width: int, node: ast.AST) -> VectorType:
        if not isinstance(dtype, Scalar) or dtype.size * width not in ACCESS_BYTES or width < 2:
            raise self.error(
                node, f"{width} x {dtype} is not 4, 8 or 16 bytes of at least two elements"
            )
        return VectorType(dtype, width)

    def cuda_vload(self, node: ast.Call, array: Any, index: Any, width: Any) -> ir.Expr:
        source = self.array(array)
        dtype = self.vector_type(source.dtype, self.constant_int(width, "the width"), node)
        self.addressable(source, node)
        return ir.VectorLoad(source, self.indices(source, index), type=dtype, loc=self.loc(node))

    def cuda_vstore(self, node: ast.Call, array: Any, index: Any, vector: Any) -> ir.Stmt:
        target = self.writable(array)
        self.addressable(target, node)
        value = self.expr(vector)
        if not isinstance(value.type, VectorType) or value.type.dtype != target.dtype:
            raise self.error(
                node, f"'{target.name}' takes vectors of {target.dtype}, got {value.type}"
            )
        place = self.indices(target, index)
        return ir.VectorStore(target, place, value, loc=self.loc(node), phase=self.phase)

    def cuda_vec(self, node: ast.Call, items: tuple[ast.expr, ...] = ()) -> ir.Expr:
        values = [self.scalar(item) for item in items]
        if not values:
            raise self.error(node, "vec() needs items")
        dtype = next((v.type for v in values if v.const is None), values[0].type)
        typed = tuple(self.coerce(v, dtype, node, "every item") for v in values)
        return ir.VectorMake(
            typed, type=self.vector_type(dtype, len(typed), node), loc=self.loc(node)
        )

    def addressable(self, array: ir.Array, node: ast.AST) -> None:
        if array.space is ir.Space.LOCAL:
            raise self.error(node, f"'{array.name}' lives in registers; index its elements")

    # Asynchronous copies

    def cuda_memcpy_async(
        self,
        node: ast.Call,
        target: Any,
        target_index: Any,
        source: Any,
        source_index: Any,
        count: Any,
    ) -> ir.Stmt:
        to, origin = self.writable(target), self.array(source)
        if to.space is not ir.Space.SHARED or origin.space is not ir.Space.GLOBAL:
            raise self.error(node, "memcpy_async copies from global to shared memory")
        if to.dtype != origin.dtype:
            raise self.error(node, f"cannot copy {origin.dtype} to {to.dtype} without a conversion")
        n = self.constant_int(count, "the count")
        assert isinstance(to.dtype, Scalar)
        if n * to.dtype.size not in ACCESS_BYTES:
            raise self.error(node, f"{n} x {to.dtype} is not 4, 8 or 16 bytes")
        return ir.AsyncCopy(
            to,
            self.indices(to, target_index),
            origin,
            self.indices(origin, source_index),
            n,
            loc=self.loc(node),
            phase=self.phase,
        )

    def cuda_pipeline_commit(self, node: ast.Call) -> ir.Stmt:
        return ir.AsyncCommit(loc=self.loc(node), phase=self.phase)

    def cuda_pipeline_wait_prior(self, node: ast.Call, pending: Any) -> ir.Stmt:
        n = self.constant_int(pending, "the number of pending groups")
        if n < 0:
            raise self.error(node, f"the number of pending groups cannot be {n}")
        return ir.AsyncWait(n, loc=self.loc(node), phase=self.phase)

    # Fragments

    def wmma_fill(self, node: ast.Call, value: Any) -> ir.Expr:
        scalar = self.coerce(self.scalar(value), float32, node, "the value")
        return ir.FragmentFill(scalar, type=ACCUMULATOR, loc=self.loc(node))

    def place(
        self, node: ast.Call, array: ir.Array, index: Any, ld: Any, layout: Any
    ) -> tuple[tuple[ir.Expr, ...], ir.Expr, str]:
        """Index, leading dimension and layout of a fragment in memory."""
        order = layout if isinstance(layout, str) else self.static(layout)
        if order not in ("row", "col"):
            got = "something else" if order is NOT_STATIC else repr(order)
            raise self.error(node, f"layout must be 'row' or 'col', got {got}")
        self.addressable(array, node)
        where = self.indices(array, index)
        if ld is not None:
            return where, self.coerce(self.scalar(ld), int32, node, "ld"), order
        if array.ndim < 2:
            raise self.error(node, f"'{array.name}' has one dimension: give ld")
        if array.shape is not None:
            return where, self.number(array.shape[-1], self.loc(node)), order
        raise self.error(
            node, f"'{array.name}' is in global memory: give ld, its row stride in elements"
        )

    def _load(
        self, node: ast.Call, role: str, array: Any, index: Any, ld: Any, layout: Any
    ) -> ir.Expr:
        source = self.array(array)
        allowed = (float32,) if role == "accumulator" else (float16, bfloat16)
        if source.dtype not in allowed:
            names = " or ".join(t.name for t in allowed)
            raise self.error(
                node, f"this fragment holds {names}, '{source.name}' holds {source.dtype}"
            )
        where, stride, order = self.place(node, source, index, ld, layout)
        dtype = ACCUMULATOR
        if role != "accumulator":
            assert isinstance(source.dtype, Scalar)
            dtype = FragmentType(role, source.dtype, order)
        return ir.FragmentLoad(source, where, stride, order, type=dtype, loc=self.loc(node))

    def wmma_load_a(self, node: ast.Call, array: Any, index: Any, ld: Any, layout: Any) -> ir.Expr:
        return self._load(node, "a", array, index, ld, layout)

    def wmma_load_b(self, node: ast.Call, array: Any, index: Any, ld: Any, layout: Any) -> ir.Expr:
        return self._load(node, "b", array, index, ld, layout)

    def wmma_load_c(self, node: ast.Call, array: Any, index: Any, ld: Any, layout: Any) -> ir.Expr:
        return self._load(node, "accumulator", array, index, ld, layout)

    def wmma_mma_sync(self, node: ast.Call, a: Any, b: Any, c: Any) -> ir.Expr:
        operands = [self.expr(x) for x in (a, b, c)]
        for operand, role in zip(operands, ("a", "b", "accumulator"), strict=True):
            if not isinstance(operand.type, FragmentType) or operand.type.role != role:
                raise self.error(node, f"expected a fragment of role '{role}', got {operand.type}")
        left, right, acc = operands
        if left.type.dtype != right.type.dtype:  # type: ignore[union-attr]
            raise self.error(node, f"cannot multiply {left.type} by {right.type}")
        return ir.FragmentMma(left, right, acc, type=ACCUMULATOR, loc=self.loc(node))

    def wmma_store(
        self, node: ast.Call, array: Any, index: Any, fragment: Any, ld: Any, layout: Any
    ) -> ir.Stmt:
        target, value = self.writable(array), self.expr(fragment)
        if value.type != ACCUMULATOR:
            raise self.error(node, f"only accumulators can be stored, got {value.type}")
        if target.dtype != float32:
            raise self.error(
                node, f"an accumulator is float32, '{target.name}' holds {target.dtype}"
            )
        where, stride, order = self.place(node, target, index, ld, layout)
        return ir.FragmentStore(
            target, where, value, stride, order, loc=self.loc(node), phase=self.phase
        )
