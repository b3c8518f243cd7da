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
    if (s.a) __builtin_prefetch(s.a + j, 1);
    if (s.b) __builtin_prefetch(s.b + j, 1);
  }
  const long bytes = s.g_type == kFloat32 ? 4 : 2;
  const char* g = (const char*)s.g + ahead * bytes;
  for (long j = 0; j < kElementsPerTile * bytes; j += 64) __builtin_prefetch(g + j, 0);
}

inline const float* widen(const void* x, int type, long i, long count, float* buffer) {
  if (type == kFloat32) return (const float*)x + i;
  const zt_u16* h = (const zt_u16*)x + i;
  if (type == kBFloat16)
    for (long j = 0; j < count; ++j) buffer[j] = zt_from_bf16(h[j]);
  else
    for (long j = 0; j < count; ++j) buffer[j] = zt_from_fp16(h[j]);
  return buffer;
}

inline const float* widen(const ZtShard& s, long i, long count, float* buffer) {
  return widen(s.g, s.g_type, i, count, buffer);
}

inline void round_to(int type, const float* p, zt_u16* out, long count) {
  if (type == kBFloat16)
    for (long j = 0; j < count; ++j) out[j] = zt_to_bf16(p[j]);
  else
    for (long j = 0; j < count; ++j) out[j] = zt_to_fp16(p[j]);
}

inline void write_past_caches(const void* tile, void* out, long bytes) {
#if defined(__SSE2__)
  for (long j = 0; j < bytes; j += 16)
    _mm_stream_si128((__m128i*)((char*)out + j), *(const __m128i*)((const char*)tile + j));
#else
  __builtin_memcpy(out, tile, bytes);
#endif
}

inline bool streams(const ZtShard& s, long begin) {
  return s.stream && s.out && ((unsigned long)((zt_u16*)s.out + begin) & 15) == 0;
}

// The rounded copy of a whole tile.
inline void copy_tile(const ZtShard& s, long i, bool stream) {
  zt_u16* const out = (zt_u16*)s.out + i;
  if (!stream) return round_to(s.out_type, s.p + i, out, kElementsPerTile);
  alignas(64) zt_u16 narrow[kElementsPerTile];
  round_to(s.out_type, s.p + i, narrow, kElementsPerTile);
  write_past_caches(narrow, out, sizeof(narrow));
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
  zt_u16* const out = (zt_u16*)s.out;
  const bool stream = streams(s, begin);
  long i = begin;
  for (; i + kElementsPerTile <= end; i += kElementsPerTile) {
    prefetch_tile(s, i);
    const float* g = widen(s, i, kElementsPerTile, wide);
    update(op, s.p + i, g, s.a + i, s.b ? s.b + i : nullptr, kElementsPerTile);
    if (out) copy_tile(s, i, stream);
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

// --- states in bfloat16 ---

inline void load_state(const zt_u16* __restrict state, long count, float* __restrict x) {
  for (long j = 0; j < count; ++j) x[j] = zt_from_bf16(state[j]);
}

// `noise` (count,): sixteen bits each.
inline void store_state(const float* __restrict x, const zt_u32* __restrict noise, zt_u16* __restrict state, long count) {
  for (long j = 0; j < count; ++j) state[j] = zt_to_bf16_at_random(x[j], noise[j]);
}

template <class Op>
inline __attribute__((always_inline)) void narrow_tile(const ZtShard& s, const ZtNarrow& n, const Op& op, const float* g, long i,
                                                       long count) {
  alignas(64) float a[kElementsPerTile], b[kElementsPerTile];
  alignas(64) zt_u32 noise[kElementsPerTile], low[kElementsPerTile];
  load_state(n.a + i, count, a);
  if (Op::kStates > 1) load_state(n.b + i, count, b);
  update(op, s.p + i, g, a, b, count);
  for (long j = 0; j < count; ++j) noise[j] = zt_noise(n.key, n.first + (zt_u32)(i + j));
  for (long j = 0; j < count; ++j) low[j] = noise[j] & 0xffffu;
  store_state(a, low, n.a + i, count);
  if (Op::kStates > 1) {
    for (long j = 0; j < count; ++j) noise[j] >>= 16;
    store_state(b, noise, n.b + i, count);
  }
}

template <class Op>
void run_narrow(const ZtShard& s, const ZtNarrow& n, const Op& op, long begin, long end) {
  alignas(64) float wide[kElementsPerTile];
  zt_u16* const out = (zt_u16*)s.out;
  const bool stream = streams(s, begin);
  long i = begin;
  for (; i + kElementsPerTile <= end; i += kElementsPerTile) {
    prefetch_tile(s, i);
    narrow_tile(s, n, op, widen(s, i, kElementsPerTile, wide), i, kElementsPerTile);
    if (out) copy_tile(s, i, stream);
  }
  if (i < end) {
    narrow_tile(s, n, op, widen(s, i, end - i, wide), i, end - i);
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

inline void add_tile(float* __restrict into, const float* __restrict x, long count) {
  for (long j = 0; j < count; ++j) into[j] = zt_add(into[j], x[j]);
}

void add(void* into, int into_type, const void* x, int type, long begin, long end) {
  alignas(64) float wide[kElementsPerTile], sum[kElementsPerTile];
  for (long i = begin; i < end; i += kElementsPerTile) {
    const long count = end - i < kElementsPerTile ? end - i : (long)kElementsPerTile;
    const float* own = widen(x, type, i, count, wide);
    if (into_type == kFloat32) {
      add_tile((float*)into + i, own, count);
      continue;
    }
    widen(into, into_type, i, count, sum);
    add_tile(sum, own, count);
    round_to(into_type, sum, (zt_u16*)into + i, count);
  }
}

// The elements of a sum as they lie in memory, and wide while it is made.
template <class T>
struct Plain {
  typedef T Stored;
  typedef T Wide;
  static ZT_METHOD const T* load(const void* part, long i, long, T*) { return (const T*)part + i; }
  static ZT_METHOD void store(const T* __restrict sum, T* __restrict out, long count) {
    for (long j = 0; j < count; ++j) out[j] = sum[j];
  }
};

template <int TYPE>
struct Narrow {
  typedef zt_u16 Stored;
  typedef float Wide;
  static ZT_METHOD const float* load(const void* part, long i, long count, float* wide) {
    return widen(part, TYPE, i, count, wide);
  }
  static ZT_METHOD void store(const float* sum, zt_u16* out, long count) { round_to(TYPE, sum, out, count); }
};

template <class T>
inline void add_tiles(T* __restrict sum, const T* a, const T* b, long count) {
  for (long j = 0; j < count; ++j) sum[j] = a[j] + b[j];
}

template <class Kind>
inline __attribute__((always_inline)) void sum_tile(const ZtParts& s, long i, long count) {
  typedef typename Kind::Wide Wide;
  typedef typename Kind::Stored Stored;
  alignas(64) Wide sum[kElementsPerTile], first[kElementsPerTile], next[kElementsPerTile];
  add_tiles(sum, Kind::load(s.parts[0], i, count, first), Kind::load(s.parts[1], i, count, next), count);
  for (int k = 2; k < s.count; ++k) {
    const Wide* x = Kind::load(s.parts[k], i, count, next);
    for (long j = 0; j < count; ++j) sum[j] = sum[j] + x[j];
  }
  Stored* const out = (Stored*)s.out + i;
  if (!s.stream || count < kElementsPerTile) return Kind::store(sum, out, count);
  alignas(64) Stored tile[kElementsPerTile];
  Kind::store(sum, tile, count);
  write_past_caches(tile, out, sizeof(tile));
}

template <class Kind>
void sum_tiles(const ZtParts& s, long begin, long end) {
  long i = begin;
  for (; i + kElementsPerTile <= end; i += kElementsPerTile) sum_tile<Kind>(s, i, kElementsPerTile);
  for (; i < end; ++i) sum_tile<Kind>(s, i, 1);
#if defined(__SSE2__)
  if (s.stream) _mm_sfence();
#endif
}

// Reads each part once and writes once, where adding part by part reads and writes the sum as often as there are parts.
void sum(const ZtParts& s, long begin, long end) {
  if (s.type == kFloat32) return sum_tiles<Plain<float>>(s, begin, end);
  if (s.type == kFloat64) return sum_tiles<Plain<double>>(s, begin, end);
  if (s.type == kBFloat16) return sum_tiles<Narrow<kBFloat16>>(s, begin, end);
  sum_tiles<Narrow<kFloat16>>(s, begin, end);
}

#define ZT_RUN(name, Op) run<Op>,
#define ZT_RUN_NARROW(name, Op) run_narrow<Op>,
const ZtKernels kKernels = {ZT_OPTIMIZERS(ZT_RUN) ZT_OPTIMIZERS(ZT_RUN_NARROW) square_sum, add, sum};
#undef ZT_RUN
#undef ZT_RUN_NARROW

}  // namespace

const ZtKernels* ZT_JOIN(zt_kernels_, ZT_ISA)() { return &kKernels; }
