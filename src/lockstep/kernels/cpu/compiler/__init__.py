"""From Python to machine code: SIMD, LLVM, code kept on disk."""
