// LAMB over a table of flat tensors, in two passes with |p| and |direction| between them; ZT_PASS says which one is compiled.
//
//   1  zt_lamb_moments   16 bytes read, 8 written: the moments, and per tile the sums of p^2 and direction^2
//   2  zt_lamb_squares   one block per tensor adds the sums of its tiles
//   3  zt_lamb_apply     12 bytes read, 4 written: the direction once more, and the step
//
// A thread adds its own elements in double, 256 threads are folded in halves, tiles are added in 256 lanes and folded likewise:
// the order does not depend on the grid, nor on addresses: which thread owns an element is fixed, so the first pass has no head to
// peel off and reads tensors that are not aligned element by element. ZT_GRADIENT and ZT_OUT as in update.cu.
#include "zt_lamb.h"
#include "zt_tile.h"

struct ZtLambLaunch {
  const ZtPiece* pieces;  // a, b are the moments
  const ZtLamb* groups;   // scalars of each group
  const float* ratio;     // per piece
  double* tile_squares;   // (tiles, 2)
  double* squares;        // (2, count)
  zt_i64 count, tiles;
};

typedef ZtStored<kStoredFloat32> Wide;
typedef ZtStored<ZT_GRADIENT> Gradient;
typedef ZtStored<ZT_OUT> Out;

#if ZT_PASS != 3

// Both sums of all threads end in [0] and [kThreads].
__device__ void fold_threads(double* shared, double p, double d) {
  shared[threadIdx.x] = p;
  shared[kThreads + threadIdx.x] = d;
  __syncthreads();
  for (unsigned half = kThreads / 2; half; half /= 2) {
    if (threadIdx.x < half) {
      shared[threadIdx.x] += shared[threadIdx.x + half];
      shared[kThreads + threadIdx.x] += shared[kThreads + threadIdx.x + half];
    }
    __syncthreads();
  }
}

#endif
#if ZT_PASS == 1

ZT_FN void moments_of_four(const ZtLamb& op, const float* p, const float* g, float* m, float* v, int have, double& pp,
                           double& dd) {
  ZT_UNROLL
  for (int k = 0; k < kVector; ++k)
    if (k < have) {
      op.moments(g[k], m[k], v[k]);
      const float d = op.direction(p[k], m[k], v[k]);
      pp += (double)p[k] * (double)p[k];
      dd += (double)d * (double)d;
    }
}

ZT_FN int elements_left(zt_i64 n, zt_i64 i) { return n - i >= kVector ? (int)kVector : n > i ? (int)(n - i) : 0; }

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_lamb_moments(const ZtLambLaunch launch) {
  __shared__ double shared[2 * kThreads];
  zt_i64 tile = zt_share(launch.tiles, blockIdx.x, gridDim.x);
  const zt_i64 end = zt_share(launch.tiles, blockIdx.x + 1, gridDim.x);
  for (zt_i64 index = zt_piece_of(launch.pieces, launch.count, tile); tile < end; ++index) {
    const ZtPiece s = launch.pieces[index];
    const ZtLamb op = launch.groups[s.group];
    const bool aligned = zt_aligned<0>(s.p) && zt_aligned<0>(s.a) && zt_aligned<0>(s.b) && zt_aligned<ZT_GRADIENT>(s.g);
    const zt_i64 last = zt_least(end, s.tile + zt_tiles(s.n));
    for (; tile < last; ++tile) {
      const zt_i64 begin = (tile - s.tile) * kTile;
      float p[kUnroll][kVector], g[kUnroll][kVector], m[kUnroll][kVector], v[kUnroll][kVector];
      double pp = 0.0, dd = 0.0;
      if (aligned && begin + kTile <= s.n) {
        ZT_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const zt_i64 i = begin + zt_slot(u, threadIdx.x);
          Gradient::load4(s.g, i, g[u]);
          Wide::load4(s.p, i, p[u]);
          Wide::load4(s.a, i, m[u]);
          Wide::load4(s.b, i, v[u]);
        }
        ZT_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const zt_i64 i = begin + zt_slot(u, threadIdx.x);
          moments_of_four(op, p[u], g[u], m[u], v[u], kVector, pp, dd);
          Wide::store4(s.a, i, m[u]);
          Wide::store4(s.b, i, v[u]);
        }
      } else {
        ZT_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const zt_i64 i = begin + zt_slot(u, threadIdx.x);
          const int have = elements_left(s.n, i);
          ZT_UNROLL
          for (int k = 0; k < kVector; ++k)
            if (k < have) {
              g[u][k] = Gradient::load(s.g, i + k), p[u][k] = Wide::load(s.p, i + k);
              m[u][k] = Wide::load(s.a, i + k), v[u][k] = Wide::load(s.b, i + k);
            }
          moments_of_four(op, p[u], g[u], m[u], v[u], have, pp, dd);
          ZT_UNROLL
          for (int k = 0; k < kVector; ++k)
            if (k < have) Wide::store(s.a, i + k, m[u][k]), Wide::store(s.b, i + k, v[u][k]);
        }
      }
      fold_threads(shared, pp, dd);
      if (threadIdx.x == 0) {
        ZT_ACCESS(launch.tile_squares + 2 * tile, 16, true);
        launch.tile_squares[2 * tile] = shared[0];
        launch.tile_squares[2 * tile + 1] = shared[kThreads];
      }
      __syncthreads();  // read before the next tile writes
    }
  }
}

#elif ZT_PASS == 2

extern "C" __global__ void __launch_bounds__(kThreads) zt_lamb_squares(const ZtLambLaunch launch) {
  __shared__ double shared[2 * kThreads];
  for (zt_i64 index = blockIdx.x; index < launch.count; index += gridDim.x) {
    const zt_i64 first = launch.pieces[index].tile, last = first + zt_tiles(launch.pieces[index].n);
    double pp = 0.0, dd = 0.0;
    for (zt_i64 tile = first + threadIdx.x; tile < last; tile += kThreads) {
      ZT_ACCESS(launch.tile_squares + 2 * tile, 16, false);
      pp += launch.tile_squares[2 * tile];
      dd += launch.tile_squares[2 * tile + 1];
    }
    fold_threads(shared, pp, dd);
    if (threadIdx.x == 0) {
      ZT_ACCESS(launch.squares + index, 8, true);
      ZT_ACCESS(launch.squares + launch.count + index, 8, true);
      launch.squares[index] = shared[0];
      launch.squares[launch.count + index] = shared[kThreads];
    }
    __syncthreads();
  }
}

#else

ZT_FN void apply_elements(const ZtPiece& s, const ZtLamb& op, float ratio, zt_i64 begin, zt_i64 end) {
  for (zt_i64 i = begin + threadIdx.x; i < end; i += kThreads) {
    const float before = Wide::load(s.p, i);
    const float p = op.step(before, op.direction(before, Wide::load(s.a, i), Wide::load(s.b, i)), ratio);
    Wide::store(s.p, i, p);
    Out::store(s.out, i, p);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_lamb_apply(const ZtLambLaunch launch) {
  int tile = (int)zt_share(launch.tiles, blockIdx.x, gridDim.x);
  const int end = (int)zt_share(launch.tiles, blockIdx.x + 1, gridDim.x);
  for (zt_i64 index = zt_piece_of(launch.pieces, launch.count, tile); tile < end; ++index) {
    const ZtPiece s = launch.pieces[index];
    const ZtLamb op = launch.groups[s.group];
    ZT_ACCESS(launch.ratio + index, 4, false);
    const float ratio = launch.ratio[index];
    bool whole = zt_head<0>(s.a) == zt_head<0>(s.p) && zt_head<0>(s.b) == zt_head<0>(s.p);
    if (ZT_OUT != kStoredNone) whole = whole && zt_head<ZT_OUT == kStoredNone ? 0 : ZT_OUT>(s.out) == zt_head<0>(s.p);
    const int head = whole ? zt_head<0>(s.p) : 0;
    const int last = (int)zt_least(end, s.tile + zt_tiles(s.n));
    if (tile == s.tile) apply_elements(s, op, ratio, 0, zt_least(head, s.n));
    for (; tile < last; ++tile) {
      const zt_i64 begin = (tile - s.tile) * kTile + head;
      if (whole && begin + kTile <= s.n) {
        float p[kUnroll][kVector], m[kUnroll][kVector], v[kUnroll][kVector];
        ZT_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const zt_i64 i = begin + zt_slot(u, threadIdx.x);
          Wide::load4(s.p, i, p[u]);
          Wide::load4(s.a, i, m[u]);
          Wide::load4(s.b, i, v[u]);
        }
        ZT_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const zt_i64 i = begin + zt_slot(u, threadIdx.x);
          ZT_UNROLL
          for (int k = 0; k < kVector; ++k)
            p[u][k] = op.step(p[u][k], op.direction(p[u][k], m[u][k], v[u][k]), ratio);
          Wide::store4(s.p, i, p[u]);
          Out::store4(s.out, i, p[u]);
        }
      } else {
        apply_elements(s, op, ratio, begin, zt_least(s.n, begin + kTile));
      }
    }
  }
}

#endif
