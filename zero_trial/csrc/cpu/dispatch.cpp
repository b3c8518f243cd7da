// The C interface: which copy of the kernels a processor gets, and how a shard is cut over threads.
//
// `isa` is 0 for baseline, 1 for AVX2, 2 for AVX-512; types are 0 fp32, 1 bf16, 2 fp16, -1 none. Nothing here checks its
// arguments: the caller has.
#include "call.h"

#include <pthread.h>
#include <stdlib.h>

bool zt_forked = false;

__attribute__((constructor)) static void notice_forks() {
  pthread_atfork(nullptr, nullptr, [] { zt_forked = true; });
}

namespace {

// `run(begin, end)` on whole tiles, in each thread its own.
template <class Run>
void over_threads(int threads, long n, const Run& run) {
  threads = useful_threads(threads, n);
  const long tiles = (n + kElementsPerTile - 1) / kElementsPerTile;
  if (threads == 1) return run(0, n);
  const FloatMode callers;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    const Adopted mode(callers);
    const long begin = tiles * t / threads * kElementsPerTile;
    const long end = least(n, tiles * (t + 1) / threads * kElementsPerTile);
    run(begin, end);
  }
}

}  // namespace

ZT_EXPORT int zt_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("fma");
  if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return 2;
  if (fma && __builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

namespace {

template <class Op>
void step(void (*const ZtKernels::*run)(const ZtShard&, const Op&, long, long), const ZtCall& c, const Op& op) {
  const auto kernel = kernels((int)c.isa)->*run;
  const ZtShard shard = shard_of(c);
  over_threads((int)c.threads, (long)c.n, [&](long begin, long end) { kernel(shard, op, begin, end); });
}

template <class Op>
void step(void (*const ZtKernels::*run)(const ZtShard&, const ZtNarrow&, const Op&, long, long), const ZtCall& c,
          const Op& op) {
  const auto kernel = kernels((int)c.isa)->*run;
  const ZtShard shard = shard_of(c);
  const ZtNarrow narrow = narrow_of(c);
  over_threads((int)c.threads, (long)c.n, [&](long begin, long end) { kernel(shard, narrow, op, begin, end); });
}

}  // namespace

// zt_adam(call) and so on.
#define ZT_STEP(name, Op)                                        \
  ZT_EXPORT void zt_##name(const ZtCall* c) {                    \
    const Op op = scalars_of<Op>(*c);                            \
    if (c->narrow)                                               \
      step(&ZtKernels::narrow_##name, *c, op);                   \
    else                                                         \
      step(&ZtKernels::name, *c, op);                            \
  }
ZT_OPTIMIZERS(ZT_STEP)
#undef ZT_STEP

// into += x, of any two types.
ZT_EXPORT void zt_add(int isa, int threads, long n, void* into, int into_type, const void* x, int type) {
  const ZtKernels* table = kernels(isa);
  over_threads(threads, n, [&](long begin, long end) { table->add(into, into_type, x, type, begin, end); });
}

// out = parts[0] + parts[1] + ...; `out` may be one of the parts.
ZT_EXPORT void zt_sum(int isa, int threads, long n, int count, const void* const* parts, int type, void* out) {
  const ZtKernels* table = kernels(isa);
  const long size = type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2;
  bool apart = true;  // else its lines are in a cache when they are written
  for (int k = 0; k < count; ++k) apart = apart && parts[k] != out;
  const ZtParts s = {parts, count, type, out, apart && n * size >= kStreamBytes && ((uintptr_t)out & 15) == 0};
  over_threads(threads, n, [&](long begin, long end) { table->sum(s, begin, end); });
}

// One level of sums of zt_sums.h, in place; returns how many are left.
static long sum_level(double* x, long n) {
  const long chunks = (n + kSumsPerChunk - 1) / kSumsPerChunk;
  for (long c = 0; c < chunks; ++c) {
    double lane[kLanes] = {0.0};
    const long begin = c * kSumsPerChunk, end = least(n, begin + kSumsPerChunk);
    for (long i = begin; i < end; ++i) lane[(i - begin) % kLanes] += x[i];
    zt_fold(lane);
    x[c] = lane[0];
  }
  return chunks;
}

// Sum of the squares of x in double; not finite if and only if an element is not. Returns 0, or 1 without memory.
ZT_EXPORT int zt_square_sum(int isa, int threads, long n, const void* x, int type, double* out) {
  const long chunks = (n + kElementsPerChunk - 1) / kElementsPerChunk;
  double* partial = (double*)malloc(sizeof(double) * (chunks ? chunks : 1));
  if (!partial) return 1;
  const ZtKernels* table = kernels(isa);
  threads = useful_threads(threads, n);
  const FloatMode callers;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const Adopted mode(callers);
    for (long c = chunks * t / threads; c < chunks * (t + 1) / threads; ++c)
      partial[c] = table->square_sum(x, type, c * kElementsPerChunk, least(n, (c + 1) * kElementsPerChunk));
  }
  long left = chunks;
  while (left > 1) left = sum_level(partial, left);
  *out = left ? partial[0] : 0.0;
  free(partial);
  return 0;
}
