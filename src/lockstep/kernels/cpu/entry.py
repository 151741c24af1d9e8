"""Where a thread enters a kernel: the one place that sets how floating-point numbers behave.

Flushing of subnormal numbers, rounding and trapping are settings of each thread, which
``torch.set_flush_denormal`` and others change on the thread that calls them and on no other. A
kernel needs numbers as IEEE 754 has them by default, on every thread: its entry says so, and
puts back what was there before it returns.
"""

from __future__ import annotations

# A control register of 0 on ARM, 0x1F80 on x86: round to nearest even, keep subnormals and NaNs,
# trap nothing.
_ARM = """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

define void @"{name}"(i64 %arguments) {{
  %before = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)
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
  store i32 8064, ptr %needed
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  call void @llvm.x86.sse.ldmxcsr(ptr %needed)
  call void @"{name}.inside"(i64 %arguments)
  call void @llvm.x86.sse.ldmxcsr(ptr %before)
  ret void
}}
"""
_ELSEWHERE = """
define void @"{name}"(i64 %arguments) {{
  call void @"{name}.inside"(i64 %arguments)
  ret void
}}
"""
_ENTRIES = {"aarch64": _ARM, "arm64": _ARM, "x86_64": _X86}


def entry_of(name: str, function: str, triple: str) -> str:
    """LLVM's text for ``void name(int64 arguments)``, which calls a function that numba lowered.

    Such a function takes pointers to a result and to an exception first, and returns a status;
    kernels have no result and raise nothing.
    """
    entry = _ENTRIES.get(triple.split("-")[0], _ELSEWHERE).format(name=name)
    return f"""{entry}
declare i32 @"{function}"(ptr, ptr, i64)

define void @"{name}.inside"(i64 %arguments) noinline {{
  %result = alloca ptr
  %exception = alloca ptr
  call i32 @"{function}"(ptr %result, ptr %exception, i64 %arguments)
  ret void
}}
"""
