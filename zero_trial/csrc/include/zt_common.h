// Scalars with one meaning for every compiler: fused multiply-add, IEEE division and root, and 16-bit rounding.
//
// No includes, so that g++, clang++, nvcc and NVRTC all take this file. Nothing here may be contracted or reassociated
// (-ffp-contract=off): what a kernel computes is then the same bits on every processor.
#ifndef ZT_COMMON_H
#define ZT_COMMON_H

#if defined(__CUDACC__)
#define ZT_FN static __device__ __forceinline__
#define ZT_METHOD __device__ __forceinline__
#else
#define ZT_FN static inline __attribute__((always_inline))
#define ZT_METHOD inline __attribute__((always_inline))
#endif

typedef unsigned short zt_u16;
typedef unsigned int zt_u32;

#if defined(__CUDACC__)

ZT_FN zt_u32 zt_bits(float x) { return __float_as_uint(x); }
ZT_FN float zt_float(zt_u32 x) { return __uint_as_float(x); }
ZT_FN float zt_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ZT_FN float zt_mul(float a, float b) { return __fmul_rn(a, b); }
ZT_FN float zt_add(float a, float b) { return __fadd_rn(a, b); }
ZT_FN float zt_sub(float a, float b) { return __fsub_rn(a, b); }
ZT_FN float zt_div(float a, float b) { return __fdiv_rn(a, b); }
ZT_FN float zt_sqrt(float a) { return __fsqrt_rn(a); }

#else

ZT_FN zt_u32 zt_bits(float x) {
  zt_u32 u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
ZT_FN float zt_float(zt_u32 u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
#if defined(__FMA__) || defined(__aarch64__)
ZT_FN float zt_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// Without the instruction: the product of two floats is exact in double. The sum is rounded to odd (Boldo & Melquiond
// 2008), which makes the second rounding, to float, the only one that counts.
ZT_FN float zt_fma(float a, float b, float c) {
  const double product = (double)a * (double)b;
  const double sum = product + (double)c;
  const double back = sum - product;
  const double error = (product - (sum - back)) + ((double)c - back);
  unsigned long long u;
  __builtin_memcpy(&u, &sum, 8);
  const bool inexact = error > 0.0 || error < 0.0;  // false for NaN, so infinities stay
  const unsigned long long towards = ((error > 0.0) == (sum > 0.0)) ? 1ull : ~0ull;
  u += (inexact && !(u & 1ull)) ? towards : 0ull;
  double odd;
  __builtin_memcpy(&odd, &u, 8);
  return (float)odd;
}
#endif
ZT_FN float zt_mul(float a, float b) { return a * b; }
ZT_FN float zt_add(float a, float b) { return a + b; }
ZT_FN float zt_sub(float a, float b) { return a - b; }
ZT_FN float zt_div(float a, float b) { return a / b; }
ZT_FN float zt_sqrt(float a) { return __builtin_sqrtf(a); }

#endif

// bfloat16 is the upper half of a float; to nearest, ties to even. NaN stays NaN, subnormal numbers are kept.
ZT_FN float zt_from_bf16(zt_u16 h) { return zt_float((zt_u32)h << 16); }
ZT_FN zt_u16 zt_to_bf16(float x) {
  const zt_u32 u = zt_bits(x);
  const zt_u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (zt_u16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// IEEE half precision, without the instructions that not every processor has.
ZT_FN float zt_from_fp16(zt_u16 h) {
  const zt_u32 sign = ((zt_u32)h & 0x8000u) << 16;
  const zt_u32 rest = ((zt_u32)h & 0x7fffu) << 13;
  const zt_u32 normal = rest + (112u << 23);
  const zt_u32 special = rest + (224u << 23);                                        // infinity, NaN
  const zt_u32 tiny = zt_bits(zt_sub(zt_float(rest + (113u << 23)), 6.103515625e-05f));  // subnormal: exact
  const zt_u32 magnitude = rest >= (31u << 23) ? special : rest < (1u << 23) ? tiny : normal;
  return zt_float(sign | magnitude);
}
ZT_FN zt_u16 zt_to_fp16(float x) {
  const zt_u32 u = zt_bits(x), sign = u & 0x80000000u, magnitude = u ^ sign;
  const zt_u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const zt_u32 tiny = zt_bits(zt_add(zt_float(magnitude), 0.5f)) - (126u << 23);  // the addition does the rounding
  const zt_u32 special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const zt_u32 half = magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? tiny : normal;
  return (zt_u16)(half | (sign >> 16));
}

#endif
