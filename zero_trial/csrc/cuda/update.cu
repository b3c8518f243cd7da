// One optimizer step over one flat tensor or a table of them: every element is read once and written once.
//
// ZT_OP is the element's arithmetic (zt_optimizers.h), ZT_GRADIENT how gradients are stored, ZT_OUT how the rounded copy of the
// parameter is (-1: there is none), ZT_STATE how states are (zt_states.h). Bytes per element: 8 for the parameter; 8 (fp32), 4 (bf16)
// or 2.125 (8 bits) per state; the gradient, the copy.
#include "zt_optimizers.h"
#include "zt_states.h"
#include "zt_tile.h"

#ifndef ZT_STATE
#define ZT_STATE 0
#endif

#if ZT_STATE == 0
typedef ZT_OP Scalars;  // of a group
#else
struct Scalars {  // of a part of a tensor
  zt_u16 *a_scale, *b_scale;
  zt_u32 key, first;  // of its noise; the place of its element 0 in the tensor
  ZT_OP op;
};
#endif

struct ZtUpdate {
  const ZtPiece* pieces;   // null: the one piece and its scalars below
  const Scalars* groups;
  const float* found_inf;  // null, or the step is skipped where it is not 0
  const float* factor;     // null, or multiplies the gradients on top of the op's multiplier
  zt_i64 count, tiles;
  ZtPiece piece;
  Scalars scalars;
};

typedef ZtStored<kStoredFloat32> Wide;
typedef ZtStored<ZT_GRADIENT> Gradient;
typedef ZtStored<ZT_OUT> Out;

#if ZT_STATE == 0

ZT_FN void update_whole_tile(const ZtPiece& s, const ZT_OP& op, zt_i64 begin, int thread) {
  float p[kUnroll][kVector], g[kUnroll][kVector], a[kUnroll][kVector], b[kUnroll][kVector];
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    Gradient::load4(s.g, i, g[u]);
    Wide::load4(s.p, i, p[u]);
    Wide::load4(s.a, i, a[u]);
    if (ZT_OP::kStates > 1) Wide::load4(s.b, i, b[u]);
  }
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k) op.apply(p[u][k], g[u][k], a[u][k], b[u][k]);
    Wide::store4(s.p, i, p[u]);
    Wide::store4(s.a, i, a[u]);
    if (ZT_OP::kStates > 1) Wide::store4(s.b, i, b[u]);
    Out::store4(s.out, i, p[u]);
  }
}

ZT_FN void update_elements(const ZtPiece& s, const ZT_OP& op, zt_i64 begin, zt_i64 end, int thread) {
  for (zt_i64 i = begin + thread; i < end; i += kThreads) {
    float p = Wide::load(s.p, i), a = Wide::load(s.a, i), b = 0.0f;
    if (ZT_OP::kStates > 1) b = Wide::load(s.b, i);
    op.apply(p, Gradient::load(s.g, i), a, b);
    Wide::store(s.p, i, p);
    Wide::store(s.a, i, a);
    if (ZT_OP::kStates > 1) Wide::store(s.b, i, b);
    Out::store(s.out, i, p);
  }
}

#else

// Codes or halves of one state: `SECOND` of the two.
template <bool SECOND>
struct Narrow {
  static const bool kSigned = ((SECOND ? 2 : 1) & ZT_OP::kSigned) != 0;
  static const int kBytes = ZT_STATE == kState8Bits ? 1 : 2;

  static ZT_METHOD const void* of(const ZtPiece& s) { return SECOND ? s.b : s.a; }
  static ZT_METHOD zt_u16* scale_at(const Scalars& x, zt_i64 i) { return (SECOND ? x.b_scale : x.a_scale) + i / kBlock; }
  static ZT_METHOD float from_code(zt_u32 code, float scale) {
    return zt_from_code<kSigned>(kSigned ? (int)(signed char)code : (int)(code & 0xffu), scale);
  }
  static ZT_METHOD float scale_of(const Scalars& x, zt_i64 i) {
    const zt_u16* at = scale_at(x, i);
    ZT_ACCESS(at, 2, false);
    return zt_from_bf16(*at);
  }
  static ZT_METHOD zt_u32 bits_of(zt_u32 noise) { return SECOND ? noise >> 16 : noise & 0xffffu; }

  static ZT_METHOD float load(const ZtPiece& s, const Scalars& x, zt_i64 i) {
    if (ZT_STATE == kStateBFloat16) return ZtStored<kStoredBFloat16>::load(of(s), i);
    const zt_u8* at = (const zt_u8*)of(s) + i;
    ZT_ACCESS(at, 1, false);
    return from_code(*at, scale_of(x, i));
  }
  static ZT_METHOD void load4(const ZtPiece& s, const Scalars& x, zt_i64 i, float* values) {
    if (ZT_STATE == kStateBFloat16) return ZtStored<kStoredBFloat16>::load4(of(s), i, values);
    const zt_u32* at = (const zt_u32*)((const zt_u8*)of(s) + i);
    ZT_ACCESS(at, 4, false);
    const zt_u32 four = *at;
    const float scale = scale_of(x, i);
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k) values[k] = from_code(four >> (8 * k), scale);
  }

  // Largest magnitude of the block that `lanes` threads side by side share; all threads of a block of threads must call it together.
  static ZT_METHOD zt_u32 largest_of(zt_u32 own, int lanes) {
    ZT_UNROLL
    for (int lane = 1; lane < lanes; lane *= 2) {
      const zt_u32 other = __shfl_xor_sync(0xffffffffu, own, lane);
      own = other > own ? other : own;
    }
    return own;
  }
  static ZT_METHOD void store_scale(const Scalars& x, zt_i64 i, zt_u16 scale) {
    zt_u16* at = scale_at(x, i);
    ZT_ACCESS(at, 2, true);
    *at = scale;
  }

  static ZT_METHOD void store4(const ZtPiece& s, const Scalars& x, zt_i64 i, const float* values, const zt_u32* noise) {
    if (ZT_STATE == kStateBFloat16) {
      uint2* at = (uint2*)((zt_u16*)of(s) + i);
      ZT_ACCESS(at, 8, true);
      zt_u32 half[kVector];
      ZT_UNROLL
      for (int k = 0; k < kVector; ++k) half[k] = zt_to_bf16_at_random(values[k], bits_of(noise[k]));
      uint2 four;
      four.x = half[0] | (half[1] << 16), four.y = half[2] | (half[3] << 16);
      *at = four;
      return;
    }
    zt_u32 largest = 0;
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const zt_u32 magnitude = zt_bits(values[k]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    const zt_u16 scale = zt_scale_of(largest_of(largest, kBlock / kVector));
    const float inverse = zt_inverse_scale(scale);
    zt_u32 four = 0;
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k)
      four |= ((zt_u32)zt_to_code<kSigned>(values[k], inverse, bits_of(noise[k])) & 0xffu) << (8 * k);
    zt_u32* at = (zt_u32*)((zt_u8*)of(s) + i);
    ZT_ACCESS(at, 4, true);
    *at = four;
    if (i % kBlock == 0) store_scale(x, i, scale);
  }
  // Only where `have`; the other threads help to find the block's largest.
  static ZT_METHOD void store(const ZtPiece& s, const Scalars& x, zt_i64 i, float value, zt_u32 noise, bool have) {
    if (ZT_STATE == kStateBFloat16) {
      zt_u16* at = (zt_u16*)of(s) + i;
      if (have) {
        ZT_ACCESS(at, 2, true);
        *at = zt_to_bf16_at_random(value, bits_of(noise));
      }
      return;
    }
    const zt_u16 scale = zt_scale_of(largest_of(have ? zt_bits(value) & 0x7fffffffu : 0u, kBlock));
    if (!have) return;
    zt_u8* at = (zt_u8*)of(s) + i;
    ZT_ACCESS(at, 1, true);
    *at = (zt_u8)zt_to_code<kSigned>(value, zt_inverse_scale(scale), bits_of(noise));
    if (i % kBlock == 0) store_scale(x, i, scale);
  }
};

ZT_FN void update_whole_tile(const ZtPiece& s, const Scalars& x, zt_i64 begin, int thread) {
  float p[kUnroll][kVector], g[kUnroll][kVector], a[kUnroll][kVector], b[kUnroll][kVector];
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    Gradient::load4(s.g, i, g[u]);
    Wide::load4(s.p, i, p[u]);
    Narrow<false>::load4(s, x, i, a[u]);
    if (ZT_OP::kStates > 1) Narrow<true>::load4(s, x, i, b[u]);
  }
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    zt_u32 noise[kVector];
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k) {
      x.op.apply(p[u][k], g[u][k], a[u][k], b[u][k]);
      noise[k] = zt_noise(x.key, x.first + (zt_u32)i + k);
    }
    Wide::store4(s.p, i, p[u]);
    Narrow<false>::store4(s, x, i, a[u], noise);
    if (ZT_OP::kStates > 1) Narrow<true>::store4(s, x, i, b[u], noise);
    Out::store4(s.out, i, p[u]);
  }
}

// A warp takes a block of codes, so `begin` is a multiple of kBlock where states are codes.
ZT_FN void update_elements(const ZtPiece& s, const Scalars& x, zt_i64 begin, zt_i64 end, int thread) {
  for (zt_i64 row = begin; row < end; row += kThreads) {
    const zt_i64 i = row + thread;
    const bool have = i < end;
    float p = 0.0f, a = 0.0f, b = 0.0f;
    if (have) {
      p = Wide::load(s.p, i), a = Narrow<false>::load(s, x, i);
      if (ZT_OP::kStates > 1) b = Narrow<true>::load(s, x, i);
      x.op.apply(p, Gradient::load(s.g, i), a, b);
      Wide::store(s.p, i, p);
      Out::store(s.out, i, p);
    }
    const zt_u32 noise = zt_noise(x.key, x.first + (zt_u32)i);
    Narrow<false>::store(s, x, i, a, noise, have);
    if (ZT_OP::kStates > 1) Narrow<true>::store(s, x, i, b, noise, have);
  }
}

#endif

// How many elements of a state stand before the first four that may be accessed at once.
ZT_FN int state_head(const void* state) {
  const int bytes = ZT_STATE == kState8Bits ? 1 : ZT_STATE == kStateBFloat16 ? 2 : 4;
  return (int)((0 - (unsigned long long)state / bytes) & (kVector - 1));
}

// Whether all tensors have as many elements before the first aligned one as the parameter has; none where states are codes, whose
// blocks begin at element 0.
ZT_FN bool alike(const ZtPiece& s, int head) {
  bool same = state_head(s.a) == head && zt_head<ZT_GRADIENT>(s.g) == head;
  if (ZT_STATE == kState8Bits) same = same && head == 0;
  if (ZT_OP::kStates > 1) same = same && state_head(s.b) == head;
  if (ZT_OUT != kStoredNone) same = same && zt_head<ZT_OUT == kStoredNone ? 0 : ZT_OUT>(s.out) == head;
  return same;
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_update(const ZtUpdate launch) {
  if (launch.found_inf && *launch.found_inf != 0.0f) return;
  const float factor = launch.factor ? *launch.factor : 1.0f;
  int tile = (int)zt_share(launch.tiles, blockIdx.x, gridDim.x);
  const int end = (int)zt_share(launch.tiles, blockIdx.x + 1, gridDim.x);
  zt_i64 index = launch.pieces ? zt_piece_of(launch.pieces, launch.count, tile) : 0;
  for (; tile < end; ++index) {
    ZtPiece s = launch.piece;
    Scalars scalars = launch.scalars;
    if (launch.pieces) {
      s = launch.pieces[index];
      scalars = launch.groups[s.group];
    }
#if ZT_STATE == 0
    ZT_OP& op = scalars;
#else
    ZT_OP& op = scalars.op;
#endif
    op.multiplier = zt_mul(op.multiplier, factor);
    const bool whole = alike(s, zt_head<0>(s.p));
    const int head = whole ? zt_head<0>(s.p) : 0;
    const int last = (int)zt_least(end, s.tile + zt_tiles(s.n));
    if (tile == s.tile) update_elements(s, scalars, 0, zt_least(head, s.n), threadIdx.x);
    for (; tile < last; ++tile) {
      const zt_i64 begin = (tile - s.tile) * kTile + head;
      if (whole && begin + kTile <= s.n)
        update_whole_tile(s, scalars, begin, threadIdx.x);
      else
        update_elements(s, scalars, begin, zt_least(s.n, begin + kTile), threadIdx.x);
    }
  }
}
