"""Where a thread enters a kernel: the one place that sets how floating-point numbers behave, and
how tile registers are divided.

Flushing of subnormal numbers, rounding and trapping are settings of each thread, which
``torch.set_flush_denormal`` and others change on the thread that calls them and on no other. A
kernel needs numbers as IEEE 754 has them by default, on every thread: its entry says so, and
puts back what was there before it returns. A constant-time kernel has subnormal numbers flushed to
zero, of which operations take longer: x86 has them assisted by microcode, Neoverse divides slower.

A kernel with tiles (see ``matrix``) finds them divided as it needs them, and leaves them as they
were divided before: other libraries note for each thread how they left them.
"""

from __future__ import annotations

# A control register of 0 on ARM, 0x1F80 on x86: round to nearest even, keep subnormals and NaNs,
# trap nothing. Flushing is bit 24 (FZ) on ARM, bits 15 and 6 (FTZ, DAZ) on x86.
_ARM = """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

define void @"{name}"(i64 %arguments) {{
  %before = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 {mode})
  call void @"{name}.inside"(i64 %arguments)
  call void @llvm.aarch64.set.fpcr(i64 %before)
  ret void
}}
"""
_X86 = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define void @"{name}"(i64 %arguments) {{
  %before = alloca i32
  %needed = alloca i32
  store i32 {mode}, ptr %needed
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  call void @llvm.x86.sse.ldmxcsr(ptr %needed)
  call void @"{name}.inside"(i64 %arguments)
  call void @llvm.x86.sse.ldmxcsr(ptr %before)
  ret void
}}
"""
# 64 bytes: a 1, then from byte 16 on how many bytes a row of each tile has, from byte 48 on how
# many rows. All are 0 where no tile is in use.
_TILED = """
declare void @llvm.x86.sttilecfg(ptr)
declare void @llvm.x86.ldtilecfg(ptr)

@"{name}.tiles" = private constant
  <{{ i8, [15 x i8], [8 x i16], [8 x i16], [8 x i8], [8 x i8] }}> <{{
  i8 1, [15 x i8] zeroinitializer, [8 x i16] [{bytes}], [8 x i16] zeroinitializer,
  [8 x i8] [{rows}], [8 x i8] zeroinitializer }}>

define void @"{name}"(i64 %arguments) {{
  %before = alloca [64 x i8]
  call void @llvm.x86.sttilecfg(ptr %before)
  call void @llvm.x86.ldtilecfg(ptr @"{name}.tiles")
  call void @"{name}.untiled"(i64 %arguments)
  call void @llvm.x86.ldtilecfg(ptr %before)
  ret void
}}
"""
_ELSEWHERE = """
define void @"{name}"(i64 %arguments) {{
  call void @"{name}.inside"(i64 %arguments)
  ret void
}}
"""
_ARM_MODES, X86_MODES = (0, 1 << 24), (0x1F80, 0x1F80 | 1 << 15 | 1 << 6)
_ENTRIES = {
    "aarch64": (_ARM, _ARM_MODES),
    "arm64": (_ARM, _ARM_MODES),
    "x86_64": (_X86, X86_MODES),
}


def entry_of(
    name: str, function: str, triple: str, flush: bool = False, tiles: bool = False
) -> str:
    """LLVM's text for ``void name(int64 arguments)``, which calls a function that numba lowered.

    Such a function takes pointers to a result and to an exception first, and returns a status;
    kernels have no result and raise nothing.
    """
    text, modes = _ENTRIES.get(triple.split("-")[0], (_ELSEWHERE, (0, 0)))
    entry = text.format(name=f"{name}.untiled" if tiles else name, mode=modes[flush])
    if tiles:
        sizes = {"bytes": ", ".join(["i16 64"] * 8), "rows": ", ".join(["i8 16"] * 8)}
        entry += _TILED.format(name=name, **sizes)
        name += ".untiled"
    return f"""{entry}
declare i32 @"{function}"(ptr, ptr, i64)

define void @"{name}.inside"(i64 %arguments) noinline {{
  %result = alloca ptr
  %exception = alloca ptr
  call i32 @"{function}"(ptr %result, ptr %exception, i64 %arguments)
  ret void
}}
"""
