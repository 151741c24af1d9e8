"""Explicit SIMD for numba: emit LLVM vector code from Python.

Compilers do not find register-blocked matrix tiles in plain loops; here they are written down.
An *emitter* is a Python function that writes LLVM instructions through :class:`Emit`;
``@emitter(...)`` turns it into something numba kernels can call.

Memory is addressed by plain int64 byte addresses. Everything here is IEEE-exact and in a
fixed order (fma, add, multiply, divide, compare): a lane computes the same bits whatever its
neighbours hold and whatever the vector width of the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lockstep.kernels.cpu.compiler import half
from lockstep.kernels.cpu.compiler.vectors import (
    F16,
    F32,
    LLVM_F16,
    LLVM_F32,
    LLVM_I16,
    LLVM_I32,
    LLVM_I64,
    LLVM_PTR,
    NV,
    WIDTH,
    vector,
    width_of,
)
from lockstep.numerics import LOG2E

POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD

# 2**−f = 1 + f·(c1 + f·(c2 + …)) on [-½, ½], interpolated at Chebyshev nodes: relative error
# below 1e-8.
# The constant term is exactly 1, so exp2(0) is exactly 1: rescaling by it changes no bit.
EXP2_COEFFICIENTS = (
    -0.693147188026,
    0.240226507606,
    -0.0555035711422,
    0.00961808255728,
    -0.00133908633647,
    0.000154531629451,
)
MANTISSA_BITS = 23
# Adding 1.5·2²³ rounds to a whole number that sits in the mantissa's low bits; 127 more make it an
# exponent.
ROUNDING = 12582912.0 + 127.0
# Below this, e**x is about the smallest normal float (e**−87.3): the weight counts as zero.
EXP_UNDERFLOW = -87.0
# Rows of a tile whose exponentials are worked out together: cores with NEON look ahead less far
# than the steps of one row reach.
EXP_ROWS = 2 if WIDTH == 4 else 1
# Constants that exp adds products to. On NEON such a sum takes the constant's register, and to copy
# the constant before costs as much as the sum: there they lie in memory, once for each of the
# vectors of those rows, out of which LLVM would otherwise share one.
ADDENDS = (ROUNDING, *EXP2_COEFFICIENTS)
ADDENDS_NAME = "lockstep.addends"
HAS_HALF = half.has_instructions()


class Emit:
    """Writes vector instructions at one place of a function being compiled."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.ir = builder
        self.copy_of_addends = 0

    def constant(self, value: float, width: int = WIDTH) -> ir.Value:
        if width == 1:
            return ir.Constant(LLVM_F32, value)
        return ir.Constant(vector(width), [value] * width)

    def addend(self, value: float, width: int) -> ir.Value:
        """One of ADDENDS."""
        if WIDTH != 4 or width != 4:
            return self.constant(value, width)
        table = self.ir.module.globals.get(ADDENDS_NAME)
        if table is None:
            # Twice as wide as needed: pairs of loads of neighbours are slower than two loads.
            lines = [[addend] * 8 for addend in ADDENDS] * NV * EXP_ROWS
            type = ir.ArrayType(vector(8), len(lines))
            table = ir.GlobalVariable(self.ir.module, type, ADDENDS_NAME)
            # LLVM takes nothing for granted about the contents of weak variables.
            table.linkage, table.initializer = "weak", ir.Constant(type, lines)
        line = self.copy_of_addends * len(ADDENDS) + ADDENDS.index(value)
        at = table.gep([ir.Constant(LLVM_I32, 0), ir.Constant(LLVM_I32, line)])
        return self.ir.load(at, typ=vector(4), align=16)

    def exps(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """`exp` of up to NV · EXP_ROWS vectors, whose steps LLVM interleaves."""
        results = []
        for self.copy_of_addends, x in enumerate(vectors):
            results.append(self.exp(x))
        self.copy_of_addends = 0
        return results

    def integer(self, value: int) -> ir.Value:
        return ir.Constant(LLVM_I64, value)

    def offset(self, base: ir.Value, index: ir.Value, step: int | ir.Value) -> ir.Value:
        """``base + index * step`` on addresses."""
        step = self.integer(step) if isinstance(step, int) else step
        return self.ir.add(base, self.ir.mul(index, step))

    def pointer(self, address: ir.Value, offset: int = 0) -> ir.Value:
        if offset:
            address = self.ir.add(address, self.integer(offset))
        return self.ir.inttoptr(address, LLVM_PTR)

    def load(self, address: ir.Value, offset: int = 0, type: ir.Type | None = None) -> ir.Value:
        type = vector() if type is None else type
        element = type.element if isinstance(type, ir.VectorType) else type
        align = 2 if element in (LLVM_F16, LLVM_I16) else 4
        return self.ir.load(self.pointer(address, offset), typ=type, align=align)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        align = 2 if element in (LLVM_F16, LLVM_I16) else 4
        self.ir.store(value, self.pointer(address, offset), align=align)

    def prefetch(self, address: ir.Value, level: int = 1, to_write: bool = False) -> None:
        """Start bringing a cache line near, into this level of caches; harmless at any address."""
        signature = ir.FunctionType(ir.VoidType(), [LLVM_PTR, LLVM_I32, LLVM_I32, LLVM_I32])
        write, keep, data = (ir.Constant(LLVM_I32, n) for n in (int(to_write), 4 - level, 1))
        self.intrinsic("prefetch.p0", signature, [self.pointer(address), write, keep, data])

    def splat(self, value: ir.Value, width: int = WIDTH) -> ir.Value:
        if width == 1:
            return value
        undefined = ir.Constant(vector(width, value.type), ir.Undefined)
        first = self.ir.insert_element(undefined, value, ir.Constant(LLVM_I32, 0))
        return self.shuffle(first, first, [0] * width)

    def splats(self, address: ir.Value, n: int, offset: int = 0) -> list[ir.Value]:
        """n floats of memory, a multiple of 4, each in all lanes of a vector."""
        if WIDTH == 4:
            # NEON multiplies with a lane of a vector: none of these becomes an instruction.
            some = [self.load(address, offset + 16 * i) for i in range(n // 4)]
            return [self.shuffle(x, x, [lane] * 4) for x in some for lane in range(4)]
        floats = (self.load(address, offset + 4 * i, LLVM_F32) for i in range(n))
        return [self.splat(x) for x in floats]

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(LLVM_I32, len(lanes)), list(lanes))
        return self.ir.shuffle_vector(x, y, mask)

    def lane(self, value: ir.Value, index: int) -> ir.Value:
        return self.ir.extract_element(value, ir.Constant(LLVM_I32, index))

    def _call(self, name: str, *args: ir.Value) -> ir.Value:
        type = args[0].type
        suffix = f"v{width_of(args[0])}f32" if width_of(args[0]) > 1 else "f32"
        return self.intrinsic(f"{name}.{suffix}", ir.FunctionType(type, [type] * len(args)), args)

    def intrinsic(
        self, name: str, signature: ir.FunctionType, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        """Call one of LLVM's own functions."""
        callee = cgutils.get_or_insert_function(self.ir.module, signature, f"llvm.{name}")
        return self.ir.call(callee, arguments)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self._call("fma", x, y, z)

    def select(self, condition: ir.Value, left: ir.Value, right: ir.Value) -> ir.Value:
        """``left if condition else right``, of which LLVM makes no branch: of vectors it cannot."""
        if width_of(left) > 1:
            return self.ir.select(condition, left, right)
        zero = ir.Constant(LLVM_I32, 0)
        lanes = [
            self.ir.insert_element(ir.Constant(ir.VectorType(x.type, 4), ir.Undefined), x, zero)
            for x in (condition, left, right)
        ]
        return self.lane(self.ir.select(*lanes), 0)

    def elsewhere(self, address: ir.Value) -> ir.Value:
        """The same address, which LLVM does not know to be the same: it does not look into
        assembly, even if there is none."""
        function = ir.FunctionType(LLVM_I64, [LLVM_I64])
        return self.ir.call(ir.InlineAsm(function, "", "=r,0", side_effect=False), [address])

    def store_selected(
        self, condition: ir.Value, otherwise: ir.Value, address: ir.Value, offset: int = 0
    ) -> None:
        """Keep a vector in memory where ``condition`` holds, and write ``otherwise`` elsewhere.

        All of it is read and written. LLVM would make a masked store of this, or a masked load,
        which touch memory or not as the condition is. What is loaded is stored as it is first, so
        that it has more uses than one.
        """
        x = self.load(address, offset)
        address = self.elsewhere(address)
        self.store(x, address, offset)
        self.store(self.select(condition, x, otherwise), self.elsewhere(address), offset)

    def maximum(self, new: ir.Value, old: ir.Value) -> ir.Value:
        """The larger one; a NaN in ``new`` is passed over. ``old`` is not NaN."""
        if width_of(new) == 4:
            return self._call("maxnum", new, old)  # one instruction on NEON
        return self.select(self.ir.fcmp_ordered(">", new, old), new, old)

    def distance(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """|x − y| of vectors of int32, as float32."""
        zero = ir.Constant(x.type, [0] * width_of(x))
        apart = self.ir.sub(x, y)
        size = self.ir.select(
            self.ir.icmp_signed("<", apart, zero), self.ir.sub(zero, apart), apart
        )
        return self.ir.sitofp(size, vector(width_of(x)))

    def split(self, x: ir.Value, unit: float) -> tuple[ir.Value, ir.Value]:
        """x · unit = n − f with n whole, the product unrounded: returns 2**n and f."""
        factor = self.constant(unit, width_of(x))
        shifted = self.fma(x, factor, self.addend(ROUNDING, width_of(x)))
        whole = self.ir.fsub(shifted, self.constant(ROUNDING, width_of(x)))
        bits = self.ir.bitcast(shifted, vector(width_of(x), LLVM_I32))
        # n − x · unit is one instruction everywhere; x · unit − n is two on NEON.
        fraction = self.fma(self.ir.fneg(x), factor, whole)
        return self.float_of(bits, MANTISSA_BITS), fraction

    def float_of(self, bits: ir.Value, shift: int) -> ir.Value:
        """The float whose bit pattern is ``bits << shift``."""
        width = width_of(bits)
        by = ir.Constant(bits.type, shift if width == 1 else [shift] * width)
        return self.ir.bitcast(self.ir.shl(bits, by), vector(width))

    def exp2m1_fraction(self, f: ir.Value) -> ir.Value:
        """2**−f − 1 for |f| ≤ ½, with no cancellation."""
        width = width_of(f)
        poly = self.constant(EXP2_COEFFICIENTS[-1], width)
        for coefficient in EXP2_COEFFICIENTS[-2::-1]:
            poly = self.fma(poly, f, self.addend(coefficient, width))
        return self.ir.fmul(poly, f)

    def exp(self, x: ir.Value) -> ir.Value:
        """e**x for x ≤ 0; zero below the underflow limit, NaN for NaN."""
        width = width_of(x)
        scale, f = self.split(x, LOG2E)
        # A product, not a sum of bit patterns, so that NaN stays NaN.
        result = self.fma(self.exp2m1_fraction(f), scale, scale)
        tiny = self.ir.fcmp_ordered("<", x, self.constant(EXP_UNDERFLOW, width))
        return self.select(tiny, self.constant(0.0, width), result)

    def log2(self, x: ir.Value) -> ir.Value:
        """log2(x) for normal x > 0; NaN for NaN."""
        width = width_of(x)
        integers = vector(width, LLVM_I32)

        def constant(value: int) -> ir.Value:
            return ir.Constant(integers, value if width == 1 else [value] * width)

        # x = 2**e · y with y in [√½, √2); log y = 2·atanh(t), t = (y − 1)/(y + 1).
        sqrt_half = constant(0x3F3504F3)
        bits = self.ir.sub(self.ir.bitcast(x, integers), sqrt_half)
        exponent = self.ir.sitofp(self.ir.ashr(bits, constant(23)), vector(width))
        mantissa = self.ir.add(self.ir.and_(bits, constant(0x007FFFFF)), sqrt_half)
        y = self.ir.bitcast(mantissa, vector(width))
        one = self.constant(1.0, width)
        t = self.ir.fdiv(self.ir.fsub(y, one), self.ir.fadd(y, one))
        square = self.ir.fmul(t, t)
        series = self.constant(2.0 * LOG2E / 11.0, width)
        for odd in (9, 7, 5, 3, 1):
            series = self.fma(series, square, self.constant(2.0 * LOG2E / odd, width))
        result = self.fma(series, t, exponent)
        return self.select(self.ir.fcmp_unordered("uno", x, x), x, result)

    def tanh(self, x: ir.Value) -> ir.Value:
        """tanh(x) = E / (E + 2) with E = exp(2x) − 1, accurate near zero too."""
        width = width_of(x)
        limit, minus = self.constant(10.0, width), self.constant(-10.0, width)
        low = self.select(self.ir.fcmp_ordered("<", x, minus), minus, x)
        clipped = self.select(self.ir.fcmp_ordered(">", low, limit), limit, low)
        scale, f = self.split(clipped, 2.0 * LOG2E)
        scale_m1 = self.ir.fsub(scale, self.constant(1.0, width))
        e = self.fma(scale, self.exp2m1_fraction(f), scale_m1)
        return self.ir.fdiv(e, self.ir.fadd(e, self.constant(2.0, width)))

    def load_as_f32(self, address: ir.Value, kind: int, width: int, offset: int = 0) -> ir.Value:
        """``width`` tensor elements of storage type ``kind``, widened."""
        if kind == F32:
            return self.load(address, offset, vector(width))
        if kind == F16 and not HAS_HALF:
            return half.widen(self, self.load(address, offset, vector(width, LLVM_I16)))
        if kind == F16:
            numbers = self.load(address, offset, vector(width, LLVM_F16))
            return self.ir.fpext(numbers, vector(width))
        short = self.load(address, offset, vector(width, LLVM_I16))
        return self.float_of(self.ir.zext(short, vector(width, LLVM_I32)), 16)

    def store_from_f32(
        self, value: ir.Value, address: ir.Value, kind: int, offset: int = 0
    ) -> None:
        """Round to nearest even into storage type ``kind``."""
        width = width_of(value)
        if kind == F32:
            self.store(value, address, offset)
        elif kind == F16 and not HAS_HALF:
            self.store(half.narrow(self, value), address, offset)
        elif kind == F16:
            self.store(self.ir.fptrunc(value, vector(width, LLVM_F16)), address, offset)
        else:
            self.store(self._bf16(value), address, offset)

    def _bf16(self, value: ir.Value) -> ir.Value:
        width = width_of(value)
        integers = vector(width, LLVM_I32)

        def constant(number: int) -> ir.Value:
            return ir.Constant(integers, number if width == 1 else [number] * width)

        bits = self.ir.bitcast(value, integers)
        high = self.ir.lshr(bits, constant(16))
        odd = self.ir.and_(high, constant(1))
        rounded = self.ir.add(bits, self.ir.add(odd, constant(0x7FFF)))
        # Rounding would carry some NaNs over into infinity: keep them, quietly.
        quiet = self.ir.or_(high, constant(0x40))
        is_nan = self.ir.fcmp_unordered("uno", value, value)
        result = self.select(is_nan, quiet, self.ir.lshr(rounded, constant(16)))
        return self.ir.trunc(result, vector(width, LLVM_I16))

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """A block of n vectors, turned: log2(n) rounds of interleaving halves. The columns come one
        after the other, in vectors as wide as the rows were."""
        n, width = len(rows), width_of(rows[0])
        low = [lane for i in range(width // 2) for lane in (i, width + i)]
        high = [lane for i in range(width // 2, width) for lane in (i, width + i)]
        for _ in range(n.bit_length() - 1):
            pairs = zip(rows[: n // 2], rows[n // 2 :], strict=True)
            rows = [self.shuffle(x, y, lanes) for x, y in pairs for lanes in (low, high)]
        return rows

    @contextmanager
    def loop(self, count: ir.Value) -> Iterator[ir.Value]:
        with cgutils.for_range(self.ir, count) as loop:
            yield loop.index

    def variable(self, value: ir.Value) -> Variable:
        """A register that a loop updates."""
        slot = cgutils.alloca_once(self.ir, value.type)
        variable = Variable(self, slot, value.type)
        variable.set(value)
        return variable


class Variable:
    """A mutable value; LLVM promotes it to a register."""

    def __init__(self, emit: Emit, slot: ir.Value, type: ir.Type) -> None:
        self._emit, self._slot, self._type = emit, slot, type

    def get(self) -> ir.Value:
        return self._emit.ir.load(self._slot, typ=self._type)

    def set(self, value: ir.Value) -> None:
        self._emit.ir.store(value, self._slot)


def emitter(*arguments: types.Type, returns: types.Type = types.void) -> Callable[..., Any]:
    """Make ``function(emit, *values)`` callable from numba code with these argument types."""

    def decorate(function: Callable[..., Any]) -> Any:
        def typing(context, *_):  # type: ignore[no-untyped-def]
            def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
                result = function(Emit(builder), *values)
                return context.get_dummy_value() if result is None else result

            return returns(*arguments), codegen

        # numba reads the arity off the signature.
        names = ["context", *(f"argument{i}" for i in range(len(arguments)))]
        typing.__signature__ = Signature([Parameter(n, POSITIONAL) for n in names])  # type: ignore
        typing.__name__ = function.__name__
        typing.__doc__ = function.__doc__
        return intrinsic(typing)

    return decorate
