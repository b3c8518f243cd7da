// Flat buffers into flat buffers, with a cast: copied, or added where ZT_ADD is 1. Sums are made in fp32 and rounded once.
//
// ZT_FROM and ZT_INTO say how elements are stored. Bytes per element: one of each, and the target once more where it is added to.
#include "zt_tile.h"

struct ZtCopy {
  const ZtPiece* pieces;  // p is the target, g the source
  zt_i64 count, tiles;
};

typedef ZtStored<ZT_FROM> From;
typedef ZtStored<ZT_INTO> Into;

ZT_FN void copy_whole_tile(const ZtPiece& s, zt_i64 begin, int thread) {
  float x[kUnroll][kVector], y[kUnroll][kVector];
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    From::load4(s.g, begin + zt_slot(u, thread), x[u]);
    if (ZT_ADD) Into::load4(s.p, begin + zt_slot(u, thread), y[u]);
  }
  ZT_UNROLL
  for (int u = 0; u < kUnroll; ++u) {
    ZT_UNROLL
    for (int k = 0; k < kVector; ++k)
      if (ZT_ADD) x[u][k] = zt_add(y[u][k], x[u][k]);
    Into::store4(s.p, begin + zt_slot(u, thread), x[u]);
  }
}

ZT_FN void copy_elements(const ZtPiece& s, zt_i64 begin, zt_i64 end, int thread) {
  for (zt_i64 i = begin + thread; i < end; i += kThreads) {
    const float x = From::load(s.g, i);
    Into::store(s.p, i, ZT_ADD ? zt_add(Into::load(s.p, i), x) : x);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_copy(const ZtCopy launch) {
  int tile = (int)zt_share(launch.tiles, blockIdx.x, gridDim.x);
  const int end = (int)zt_share(launch.tiles, blockIdx.x + 1, gridDim.x);
  for (zt_i64 index = zt_piece_of(launch.pieces, launch.count, tile); tile < end; ++index) {
    const ZtPiece s = launch.pieces[index];
    const bool whole = zt_head<ZT_FROM>(s.g) == zt_head<ZT_INTO>(s.p);
    const int head = whole ? zt_head<ZT_INTO>(s.p) : 0;
    const int last = (int)zt_least(end, s.tile + zt_tiles(s.n));
    if (tile == s.tile) copy_elements(s, 0, zt_least(head, s.n), threadIdx.x);
    for (; tile < last; ++tile) {
      const zt_i64 begin = (tile - s.tile) * kTile + head;
      if (whole && begin + kTile <= s.n)
        copy_whole_tile(s, begin, threadIdx.x);
      else
        copy_elements(s, begin, zt_least(s.n, begin + kTile), threadIdx.x);
    }
  }
}
