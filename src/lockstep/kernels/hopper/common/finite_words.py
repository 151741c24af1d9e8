"""Which of the two 16-bit numbers in a 32-bit word are finite, without a branch."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon


@gluon.constexpr_function
def _assembly(dtype):
    kind, infinities = ("bf16x2", "0x7f807f80") if dtype == gl.bfloat16 else ("f16x2", "0x7c007c00")
    return (
        "{ .reg .b32 a, b; "
        f"abs.{kind} a, $1; mov.b32 b, {infinities}; set.lt.u32.{kind} $0, a, b; "
        "}"
    )


@gluon.jit
def finite(words, dtype: gl.constexpr):
    """0xffff for each number of int32 `words` that is finite, 0 for others."""
    assembly: gl.constexpr = _assembly(dtype)
    return gl.inline_asm_elementwise(assembly, "=r,r", [words], gl.int32, is_pure=True, pack=1)
