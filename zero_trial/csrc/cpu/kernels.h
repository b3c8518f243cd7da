// What dispatch.cpp knows of the copies of kernels.cpp, one per instruction set.
#ifndef ZT_KERNELS_H
#define ZT_KERNELS_H

#include "../include/zt_optimizers.h"
#include "../include/zt_states.h"
#include "../include/zt_sums.h"

enum ZtType { kNone = -1, kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };  // the last in sums of parts only

// A flat shard: n elements of parameter, gradient, states and, unless `out_type` is kNone, a 16-bit copy of the parameter.
struct ZtShard {
  float* p;
  const void* g;
  int g_type;
  float* a;
  float* b;  // null for optimizers with one state
  void* out;
  int out_type;
  bool stream;  // write `out` past the caches
};

// The states of a shard that are bfloat16 (zt_states.h); `a` and `b` of the shard are null. The shard is a part of one tensor that
// begins at element `first`.
struct ZtNarrow {
  zt_u16 *a, *b;
  zt_u32 key, first;
};

// What several ranks have put into a sum: `count` flat arrays of one type. `out` is another array of that type, or one of them.
struct ZtParts {
  const void* const* parts;
  int count;
  int type;
  void* out;
  bool stream;  // write `out` past the caches
};

enum { kElementsPerTile = 64 };

struct ZtKernels {
#define ZT_FIELD(name, Op) void (*name)(const ZtShard&, const Op&, long begin, long end);
  ZT_OPTIMIZERS(ZT_FIELD)
#undef ZT_FIELD
#define ZT_FIELD(name, Op) void (*narrow_##name)(const ZtShard&, const ZtNarrow&, const Op&, long begin, long end);
  ZT_OPTIMIZERS(ZT_FIELD)
#undef ZT_FIELD
  double (*square_sum)(const void* x, int type, long begin, long end);  // of one chunk
  void (*add)(void* into, int into_type, const void* x, int type, long begin, long end);  // the sum is rounded once
  void (*sum)(const ZtParts&, long begin, long end);  // from left to right, 16 bits in fp32 and rounded once
};

const ZtKernels* zt_kernels_baseline();
#if defined(__x86_64__)
const ZtKernels* zt_kernels_avx2();
const ZtKernels* zt_kernels_avx512();
#endif

#endif
