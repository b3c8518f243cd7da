// One optimizer step over one flat tensor or a table of them: every element is read once and written once.
//
// ZT_OP is the element's arithmetic (zt_optimizers.h), ZT_GRADIENT how gradients are stored, ZT_OUT how the rounded copy of the
// parameter is (-1: there is none). Bytes per element with fp32 states: 8 for the parameter, 8 per state, the gradient, the copy.
#include "zt_optimizers.h"
#include "zt_tile.h"

struct ZtUpdate {
  const ZtPiece* pieces;   // null: the one piece and op below
  const ZT_OP* groups;     // scalars of each group
  const float* found_inf;  // null, or the step is skipped where it is not 0
  const float* factor;     // null, or multiplies the gradients on top of the op's multiplier
  zt_i64 count, tiles;
  ZtPiece piece;
  ZT_OP op;
};

typedef ZtStored<kStoredFloat32> Wide;
typedef ZtStored<ZT_GRADIENT> Gradient;
typedef ZtStored<ZT_OUT> Out;

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

// Whether all tensors have as many elements before the first aligned one as the parameter has.
ZT_FN bool alike(const ZtPiece& s, int head) {
  bool same = zt_head<0>(s.a) == head && zt_head<ZT_GRADIENT>(s.g) == head;
  if (ZT_OP::kStates > 1) same = same && zt_head<0>(s.b) == head;
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
    ZT_OP op = launch.op;
    if (launch.pieces) {
      s = launch.pieces[index];
      op = launch.groups[s.group];
    }
    op.multiplier = zt_mul(op.multiplier, factor);
    const bool whole = alike(s, zt_head<0>(s.p));
    const int head = whole ? zt_head<0>(s.p) : 0;
    const int last = (int)zt_least(end, s.tile + zt_tiles(s.n));
    if (tile == s.tile) update_elements(s, op, 0, zt_least(head, s.n), threadIdx.x);
    for (; tile < last; ++tile) {
      const zt_i64 begin = (tile - s.tile) * kTile + head;
      if (whole && begin + kTile <= s.n)
        update_whole_tile(s, op, begin, threadIdx.x);
      else
        update_elements(s, op, begin, zt_least(s.n, begin + kTile), threadIdx.x);
    }
  }
}
