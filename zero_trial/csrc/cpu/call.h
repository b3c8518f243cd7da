// What a caller hands over: one block of eight-byte fields per tensor and step; and which kernels and how many threads work on it.
#ifndef ZT_CALL_H
#define ZT_CALL_H

#include "kernels.h"

#include <fenv.h>
#include <stdint.h>

#define ZT_EXPORT extern "C" __attribute__((visibility("default")))

enum { kMostScalars = 8 };

// One optimizer step over one shard, as the caller packs it: every field has eight bytes. What a kernel does not have is 0.
struct ZtCall {
  int64_t isa, threads, n;
  float* p;
  const void* g;
  int64_t g_type;
  void *a, *b;
  void* out;
  int64_t out_type;
  int64_t narrow, key, first;  // narrow: the states are bfloat16, and the noise is that of zt_states.h
  double scalars[kMostScalars];  // the fields of the op's struct; a caller of a step with fewer leaves the last ones out
};

enum : long {
  kElementsPerThread = 32768,  // less is not worth waking a thread for
  kStreamBytes = 16L << 20,    // a sum of that size would only push other things out of the caches
  kStreamElements = 1L << 20,  // a 16-bit copy of 2 MiB and more does not stay in a core's cache anyway
};

static inline ZtShard shard_of(const ZtCall& c) {
  const bool low = c.out_type != kNone;
  float *const a = c.narrow ? nullptr : (float*)c.a, *const b = c.narrow ? nullptr : (float*)c.b;
  return {c.p, c.g, (int)c.g_type, a, b, low ? c.out : nullptr, (int)c.out_type, c.n >= kStreamElements};
}

static inline ZtNarrow narrow_of(const ZtCall& c) {
  return {(zt_u16*)c.a, (zt_u16*)c.b, (zt_u32)c.key, (zt_u32)c.first};
}

// The op's struct: what the caller computed in double, rounded once.
template <class Op>
Op scalars_of(const ZtCall& c) {
  enum { kFields = sizeof(Op) / sizeof(float) };
  static_assert(kFields <= kMostScalars, "raise kMostScalars");
  float fields[kFields];
  for (int i = 0; i < kFields; ++i) fields[i] = (float)c.scalars[i];
  Op op;
  __builtin_memcpy(&op, fields, sizeof(op));
  return op;
}

static inline const ZtKernels* kernels(int isa) {
#if defined(__x86_64__)
  if (isa == 2) return zt_kernels_avx512();
  if (isa == 1) return zt_kernels_avx2();
#endif
  (void)isa;
  return zt_kernels_baseline();
}

static inline long least(long a, long b) { return a < b ? a : b; }

// True in a child of fork(): it has none of its parent's threads, and OpenMP would wait for them forever.
extern bool zt_forked;

static inline int useful_threads(long threads, long n) {
  const long most = n / kElementsPerThread;
  return (int)(zt_forked || threads < 1 || most < 1 ? 1 : least(threads, most));
}

// Rounding and flushing of subnormal numbers to zero are settings of a thread. Threads that help compute with the caller's, so that
// the number of threads does not change a bit, and get their own back.
struct FloatMode {
  fenv_t mode;
  FloatMode() { fegetenv(&mode); }
};

struct Adopted {
  fenv_t own;
  explicit Adopted(const FloatMode& callers) {
    fegetenv(&own);
    fesetenv(&callers.mode);
  }
  ~Adopted() { fesetenv(&own); }
};

#endif
