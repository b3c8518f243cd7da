// The loops over flat shards. Compiled once per instruction set; ZT_ISA is its name.
//
// Plain loops over explicit fma, division and root: the compiler makes vectors of any width from them, and since nothing
// is contracted or reassociated, every width gives the same bits, in the tail too.
#include "kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ZT_JOIN_(a, b) a##b
#define ZT_JOIN(a, b) ZT_JOIN_(a, b)

namespace {

// Far enough ahead that memory answers before the loop gets there; a core's own prefetchers stop at page ends.
const long kPrefetchElements = 320;
const long kElementsPerLine = 16;

inline void prefetch_tile(const ZtShard& s, long i) {
  const long ahead = i + kPrefetchElements;
  for (long j = ahead; j < ahead + kElementsPerTile; j += kElementsPerLine) {
    __builtin_prefetch(s.p + j, 1);
    __builtin_prefetch(s.a + j, 1);
    if (s.b) __builtin_prefetch(s.b + j, 1);
  }
  const long bytes = s.g_type == kFloat32 ? 4 : 2;
  const char* g = (const char*)s.g + ahead * bytes;
  for (long j = 0; j < kElementsPerTile * bytes; j += 64) __builtin_prefetch(g + j, 0);
}

inline const float* widen(const ZtShard& s, long i, long count, float* buffer) {
  if (s.g_type == kFloat32) return (const float*)s.g + i;
  const zt_u16* g = (const zt_u16*)s.g + i;
  if (s.g_type == kBFloat16)
    for (long j = 0; j < count; ++j) buffer[j] = zt_from_bf16(g[j]);
  else
    for (long j = 0; j < count; ++j) buffer[j] = zt_from_fp16(g[j]);
  return buffer;
}

inline void round_to(int type, const float* p, zt_u16* out, long count) {
  if (type == kBFloat16)
    for (long j = 0; j < count; ++j) out[j] = zt_to_bf16(p[j]);
  else
    for (long j = 0; j < count; ++j) out[j] = zt_to_fp16(p[j]);
}

inline void write_past_caches(const zt_u16* tile, zt_u16* out) {
#if defined(__SSE2__)
  for (long j = 0; j < kElementsPerTile; j += 8) _mm_stream_si128((__m128i*)(out + j), *(const __m128i*)(tile + j));
#else
  __builtin_memcpy(out, tile, kElementsPerTile * sizeof(zt_u16));
#endif
}

template <class Op>
inline void update(const Op op, float* __restrict p, const float* __restrict g, float* __restrict a, float* __restrict b,
                   long count) {
  for (long j = 0; j < count; ++j) {
    float x = p[j], first = a[j], second = 0.0f;
    if (Op::kStates > 1) second = b[j];
    op.apply(x, g[j], first, second);
    p[j] = x;
    a[j] = first;
    if (Op::kStates > 1) b[j] = second;
  }
}

template <class Op>
void run(const ZtShard& s, const Op& op, long begin, long end) {
  alignas(64) float wide[kElementsPerTile];
  alignas(64) zt_u16 narrow[kElementsPerTile];
  zt_u16* const out = (zt_u16*)s.out;
  const bool stream = s.stream && out && ((unsigned long)(out + begin) & 15) == 0;
  long i = begin;
  for (; i + kElementsPerTile <= end; i += kElementsPerTile) {
    prefetch_tile(s, i);
    const float* g = widen(s, i, kElementsPerTile, wide);
    update(op, s.p + i, g, s.a + i, s.b ? s.b + i : nullptr, kElementsPerTile);
    if (!out) continue;
    if (stream) {
      round_to(s.out_type, s.p + i, narrow, kElementsPerTile);
      write_past_caches(narrow, out + i);
    } else {
      round_to(s.out_type, s.p + i, out + i, kElementsPerTile);
    }
  }
  if (i < end) {
    const float* g = widen(s, i, end - i, wide);
    update(op, s.p + i, g, s.a + i, s.b ? s.b + i : nullptr, end - i);
    if (out) round_to(s.out_type, s.p + i, out + i, end - i);
  }
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#endif
}

// In the order of zt_sums.h.
template <class Load>
double chunk_square_sum(long begin, long end, Load load) {
  alignas(64) double lane[kLanes] = {0.0};
  long i = begin;
  for (; i + kLanes <= end; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const double x = (double)load(i + j);
      lane[j] += x * x;
    }
  for (int j = 0; i + j < end; ++j) {
    const double x = (double)load(i + j);
    lane[j] += x * x;
  }
  zt_fold(lane);
  return lane[0];
}

double square_sum(const void* x, int type, long begin, long end) {
  if (type == kFloat32) {
    const float* f = (const float*)x;
    return chunk_square_sum(begin, end, [f](long i) { return f[i]; });
  }
  const zt_u16* h = (const zt_u16*)x;
  if (type == kBFloat16) return chunk_square_sum(begin, end, [h](long i) { return zt_from_bf16(h[i]); });
  return chunk_square_sum(begin, end, [h](long i) { return zt_from_fp16(h[i]); });
}

const ZtKernels kKernels = {run<ZtAdam>, run<ZtLion>, run<ZtAdagrad>, run<ZtSgd>, square_sum};

}  // namespace

const ZtKernels* ZT_JOIN(zt_kernels_, ZT_ISA)() { return &kKernels; }
