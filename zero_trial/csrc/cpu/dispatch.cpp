// The C interface: which copy of the kernels a processor gets, and how a shard is cut over threads.
//
// `isa` is 0 for baseline, 1 for AVX2, 2 for AVX-512; types are 0 fp32, 1 bf16, 2 fp16, -1 none. `found_inf` may be null;
// if it points to anything but 0 the step is skipped. Nothing here checks its arguments: the caller has.
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

#define ZT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const long kElementsPerThread = 32768;   // less is not worth waking a thread for
const long kStreamElements = 1L << 20;   // a 16-bit copy of 2 MiB and more does not stay in a core's cache anyway

const ZtKernels* kernels(int isa) {
#if defined(__x86_64__)
  if (isa == 2) return zt_kernels_avx512();
  if (isa == 1) return zt_kernels_avx2();
#endif
  (void)isa;
  return zt_kernels_baseline();
}

long least(long a, long b) { return a < b ? a : b; }

int useful_threads(int threads, long n) {
  const long most = n / kElementsPerThread;
  return (int)(threads < 1 || most < 1 ? 1 : least(threads, most));
}

template <class Op>
void over_threads(void (*run)(const ZtShard&, const Op&, long, long), const ZtShard& shard, const Op& op, int threads,
                  long n) {
  threads = useful_threads(threads, n);
  const long tiles = (n + kElementsPerTile - 1) / kElementsPerTile;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const long begin = tiles * t / threads * kElementsPerTile;
    const long end = least(n, tiles * (t + 1) / threads * kElementsPerTile);
    run(shard, op, begin, end);
  }
}

ZtShard shard_of(long n, float* p, const void* g, int g_type, float* a, float* b, void* out, int out_type) {
  return ZtShard{p, g, g_type, a, b, out_type == kNone ? nullptr : out, out_type, n >= kStreamElements};
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

ZT_EXPORT void zt_adam(int isa, int threads, long n, float* p, const void* g, int g_type, float* m, float* v, void* out,
                       int out_type, const float* found_inf, double lr, double beta1, double beta2, double eps,
                       double decay, double correction1, double correction2, double multiplier, int decoupled) {
  if (found_inf && *found_inf != 0.0f) return;
  const ZtAdam op = {(float)multiplier,
                     (float)(1.0 - beta1),
                     (float)(1.0 - beta2),
                     (float)(lr / correction1),
                     (float)(1.0 / sqrt(correction2)),
                     (float)eps,
                     (float)(decoupled ? 0.0 : decay),
                     (float)(decoupled ? lr * decay : 0.0)};
  over_threads(kernels(isa)->adam, shard_of(n, p, g, g_type, m, v, out, out_type), op, threads, n);
}

ZT_EXPORT void zt_lion(int isa, int threads, long n, float* p, const void* g, int g_type, float* m, void* out,
                       int out_type, const float* found_inf, double lr, double beta1, double beta2, double decay,
                       double multiplier) {
  if (found_inf && *found_inf != 0.0f) return;
  const ZtLion op = {(float)multiplier, (float)(1.0 - beta1), (float)(1.0 - beta2), (float)lr, (float)(lr * decay)};
  over_threads(kernels(isa)->lion, shard_of(n, p, g, g_type, m, nullptr, out, out_type), op, threads, n);
}

ZT_EXPORT void zt_adagrad(int isa, int threads, long n, float* p, const void* g, int g_type, float* s, void* out,
                          int out_type, const float* found_inf, double lr, double eps, double decay,
                          double multiplier) {
  if (found_inf && *found_inf != 0.0f) return;
  const ZtAdagrad op = {(float)multiplier, (float)lr, (float)eps, (float)decay};
  over_threads(kernels(isa)->adagrad, shard_of(n, p, g, g_type, s, nullptr, out, out_type), op, threads, n);
}

ZT_EXPORT void zt_sgd(int isa, int threads, long n, float* p, const void* g, int g_type, float* b, void* out,
                      int out_type, const float* found_inf, double lr, double momentum, double share, double decay,
                      double multiplier, int first, int nesterov) {
  if (found_inf && *found_inf != 0.0f) return;
  const ZtSgd op = {(float)multiplier,
                    (float)lr,
                    (float)decay,
                    (float)(first ? 0.0 : momentum),
                    (float)share,
                    (float)momentum,
                    nesterov ? 0.0f : 1.0f};
  over_threads(kernels(isa)->sgd, shard_of(n, p, g, g_type, b, nullptr, out, out_type), op, threads, n);
}

// Sum of the squares of x in double; not finite if and only if an element is not. Returns 0, or 1 without memory.
ZT_EXPORT int zt_square_sum(int isa, int threads, long n, const void* x, int type, double* out) {
  const long chunks = (n + kElementsPerChunk - 1) / kElementsPerChunk;
  double* partial = (double*)malloc(sizeof(double) * (chunks ? chunks : 1));
  if (!partial) return 1;
  const ZtKernels* table = kernels(isa);
  threads = useful_threads(threads, n);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long c = 0; c < chunks; ++c)
    partial[c] = table->square_sum(x, type, c * kElementsPerChunk, least(n, (c + 1) * kElementsPerChunk));
  double total = 0.0;
  for (long c = 0; c < chunks; ++c) total += partial[c];
  free(partial);
  *out = total;
  return 0;
}
