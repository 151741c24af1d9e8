"""Small device functions that emitted kernels call, each put in only where it is used."""

from __future__ import annotations

INCLUDES = {
    "fp16": "#include <cuda_fp16.h>",
    "bf16": "#include <cuda_bf16.h>",
    "pipeline": "#include <cuda_pipeline.h>",
    "infinity": "#include <math_constants.h>",
    "wmma": "#include <mma.h>",
}

# wmma::load_matrix_sync loads bfloat16 through generic addresses, piece by piece, where it would
# use ldmatrix for float16; said to be in shared memory, both are the same instructions.
_LOAD_SHARED = """\
__device__ __forceinline__ void load_shared(
    wmma::fragment<wmma::matrix_{role}, 16, 16, 16, __nv_bfloat16, wmma::{layout}_major> &to,
    const __nv_bfloat16 *from, unsigned ld) {{
  unsigned *words = reinterpret_cast<unsigned *>(to.x);
  asm volatile(
      "wmma.load.{role}.sync.aligned.{layout}.m16n16k16.shared.bf16 {{%0, %1, %2, %3}}, [%4], %5;"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "r"(unsigned(__cvta_generic_to_shared(from))), "r"(ld)
      : "memory");
}}
"""

HELPERS = {
    **{
        f"load_shared_{role}_{layout}": _LOAD_SHARED.format(role=role, layout=layout)
        for role in "ab"
        for layout in ("row", "col")
    },
    "vector": """\
// N neighbouring elements that move in one instruction.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T item[N];
};
""",
    "lane_id": """\
__device__ __forceinline__ int thread_rank() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ __forceinline__ int lane_id() { return thread_rank() % 32; }
__device__ __forceinline__ int warp_id() { return thread_rank() / 32; }
""",
    "floor_div": """\
// Python's //, which rounds towards minus infinity.
__device__ __forceinline__ int floor_div(int a, int b) {
  int quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
""",
    "floor_mod": """\
// Python's %, which takes the sign of the divisor.
__device__ __forceinline__ int floor_mod(int a, int b) {
  int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
""",
    "ct_exp2": """\
// exp2f multiplies twice more where results are below 2^-126, which are 0 here.
__device__ __forceinline__ float ct_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
""",
    "ct_select": """\
// Both operands are evaluated and one instruction picks: nothing here can become a branch.
__device__ __forceinline__ unsigned ct_select(bool condition, unsigned if_true, unsigned if_false) {
  unsigned picked;
  asm(
      "{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.b32 %0, %2, %3, p; }"
      : "=r"(picked)
      : "r"(unsigned(condition)), "r"(if_true), "r"(if_false));
  return picked;
}
__device__ __forceinline__ int ct_select(bool condition, int if_true, int if_false) {
  return int(ct_select(condition, unsigned(if_true), unsigned(if_false)));
}
__device__ __forceinline__ bool ct_select(bool condition, bool if_true, bool if_false) {
  return ct_select(condition, unsigned(if_true), unsigned(if_false)) != 0;
}
__device__ __forceinline__ float ct_select(bool condition, float if_true, float if_false) {
  return __uint_as_float(
      ct_select(condition, __float_as_uint(if_true), __float_as_uint(if_false)));
}
""",
    "ct_select_vector": """\
template <typename V>
__device__ __forceinline__ V ct_select_vector(bool condition, V if_true, V if_false) {
  V picked;
  for (int word = 0; word < sizeof(V) / 4; ++word) {
    reinterpret_cast<unsigned *>(&picked)[word] =
        ct_select(condition, reinterpret_cast<unsigned *>(&if_true)[word],
                  reinterpret_cast<unsigned *>(&if_false)[word]);
  }
  return picked;
}
""",
    "ct_select_fp16": """\
__device__ __forceinline__ __half ct_select(bool condition, __half if_true, __half if_false) {
  return __ushort_as_half(
      ct_select(condition, unsigned(__half_as_ushort(if_true)),
                unsigned(__half_as_ushort(if_false))));
}
""",
    "ct_select_bf16": """\
__device__ __forceinline__ __nv_bfloat16 ct_select(bool condition, __nv_bfloat16 if_true,
                                                   __nv_bfloat16 if_false) {
  return __ushort_as_bfloat16(
      ct_select(condition, unsigned(__bfloat16_as_ushort(if_true)),
                unsigned(__bfloat16_as_ushort(if_false))));
}
""",
}
