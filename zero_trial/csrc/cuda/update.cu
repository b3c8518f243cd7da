// One optimizer step over one flat tensor or a table of them: every element is read once and written once.
//
// ZT_OP is the element's arithmetic (zt_optimizers.h), ZT_GRADIENT how gradients are stored, ZT_OUT how the rounded copy of the
// parameter is (-1: there is none), ZT_STATE how states are (zt_states.h). Bytes per element: 8 for the parameter; 8 (fp32) or
// 4 (bf16) per state; the gradient, the copy.
#include "zt_optimizers.h"
#include "zt_states.h"
#include "zt_tile.h"

#if ZT_STATE == 0
typedef ZT_OP Scalars;  // of a group
ZT_FN const ZT_OP& op_of(const Scalars& x) { return x; }
ZT_FN zt_u32 noise_of(const Scalars&, zt_i64) { return 0; }
#else
struct Scalars {      // of a part of a tensor
  zt_u32 key, first;  // of its noise; the place of its element 0 in the tensor
  ZT_OP op;
};
ZT_FN const ZT_OP& op_of(const Scalars& x) { return x.op; }
ZT_FN zt_u32 noise_of(const Scalars& x, zt_i64 i) { return zt_noise(x.key, x.first + (zt_u32)i); }
#endif

struct ZtUpdate {
  const ZtPiece* pieces;  // null: the one piece and its scalars below
  const Scalars* groups;
  zt_i64 count, tiles;
  ZtPiece piece;
  Scalars scalars;
};

typedef ZtStored<kStoredFloat32> Wide;
typedef ZtStored<ZT_STATE == kStateBFloat16 ? kStoredBFloat16 : kStoredFloat32> State;
typedef ZtStored<ZT_GRADIENT> Gradient;
typedef ZtStored<ZT_OUT> Out;

ZT_FN void store_state(void* state, zt_i64 i, float x, zt_u32 noise16) {
  if (ZT_STATE == kStateFloat32) return Wide::store(state, i, x);
  zt_u16* at = (zt_u16*)state + i;
  ZT_ACCESS(at, 2, true);
  *at = zt_to_bf16_at_random(x, noise16);
}

// `shift`: where the state's sixteen bits are in the noise of an element.
ZT_FN void store_state4(void* state, zt_i64 i, const float* x, const zt_u32* noise, int shift) {
  if (ZT_STATE == kStateFloat32) return Wide::store4(state, i, x);
  uint2* at = (uint2*)((zt_u16*)state + i);
  ZT_ACCESS(at, 8, true);
  zt_u32 half[kVector];
  ZT_UNROLL
  for (int k = 0; k < kVector; ++k) half[k] = zt_to_bf16_at_random(x[k], (noise[k] >> shift) & 0xffffu);
  uint2 four;
  four.x = half[0] | (half[1] << 16), four.y = half[2] | (half[3] << 16);
  *at = four;
}

ZT_FN void update_whole_tile(const ZtPiece& s, const Scalars& x, zt_i64 begin, int thread) {
  float p[kUnroll][kVector], g[kUnroll][kVector], a[kUnroll][kVector], b[kUnroll][kVector];
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    Gradient::load4(s.g, i, g[u]);
    Wide::load4(s.p, i, p[u]);
    State::load4(s.a, i, a[u]);
    if (ZT_OP::kStates > 1) State::load4(s.b, i, b[u]);
  }
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    const zt_i64 i = begin + zt_slot(u, thread);
    zt_u32 noise[kVector];
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k) {
      op_of(x).apply(p[u][k], g[u][k], a[u][k], b[u][k]);
      noise[k] = noise_of(x, i + k);
    }
    Wide::store4(s.p, i, p[u]);
    store_state4(s.a, i, a[u], noise, 0);
    if (ZT_OP::kStates > 1) store_state4(s.b, i, b[u], noise, 16);
    Out::store4(s.out, i, p[u]);
  }
}

ZT_FN void update_elements(const ZtPiece& s, const Scalars& x, zt_i64 begin, zt_i64 end, int thread) {
  for (zt_i64 i = begin + thread; i < end; i += kThreads) {
    float p = Wide::load(s.p, i), a = State::load(s.a, i), b = 0.0f;
    if (ZT_OP::kStates > 1) b = State::load(s.b, i);
    op_of(x).apply(p, Gradient::load(s.g, i), a, b);
    const zt_u32 noise = noise_of(x, i);
    Wide::store(s.p, i, p);
    store_state(s.a, i, a, noise & 0xffffu);
    if (ZT_OP::kStates > 1) store_state(s.b, i, b, noise >> 16);
    Out::store(s.out, i, p);
  }
}

// How many elements of a state stand before the first four that may be accessed at once.
ZT_FN int state_head(const void* state) {
  return (int)((0 - (unsigned long long)state / State::kBytes) & (kVector - 1));
}

// Whether all tensors have as many elements before the first aligned one as the parameter has.
ZT_FN bool alike(const ZtPiece& s, int head) {
  bool same = state_head(s.a) == head && zt_head<ZT_GRADIENT>(s.g) == head;
  if (ZT_OP::kStates > 1) same = same && state_head(s.b) == head;
  if (ZT_OUT != kStoredNone) same = same && zt_head<ZT_OUT == kStoredNone ? 0 : ZT_OUT>(s.out) == head;
  return same;
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_update(const ZtUpdate launch) {
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
