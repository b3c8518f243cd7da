// LAMB over many tensors in one call: tiles of all tensors are cut over threads, and their sums added in an order of their own.
//
// Per tensor the sums of its tiles go into 256 lanes, tile t into lane t mod 256, and these are folded in halves, as in
// csrc/cuda/lamb.cu: neither threads nor instruction set change a bit.
#include "call.h"

#include <stdlib.h>

namespace {

long tiles_of(const ZtCall& c) { return ((long)c.n + kLambTile - 1) / kLambTile; }

// Calls `work(call, its scalars, tile of the tensor, tile of all)` for every tile of every tensor.
template <class Work>
void over_tiles(const ZtCall* calls, long count, Work work) {
  long tiles = 0, elements = 0;
  for (long c = 0; c < count; ++c) tiles += tiles_of(calls[c]), elements += (long)calls[c].n;
  const int threads = useful_threads(count ? (long)calls[0].threads : 1, elements);
  const FloatMode callers;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const Adopted mode(callers);
    const long begin = tiles * t / threads, end = tiles * (t + 1) / threads;
    long first = 0;  // tile of all at which tensor c begins
    for (long c = 0; c < count && first < end; first += tiles_of(calls[c]), ++c) {
      if (first + tiles_of(calls[c]) <= begin) continue;
      const ZtLamb op = scalars_of<ZtLamb>(calls[c]);
      const long from = begin > first ? begin - first : 0;
      for (long tile = from; tile < least(tiles_of(calls[c]), end - first); ++tile) work(calls[c], op, tile, first + tile);
    }
  }
}

// The sum of every second number of x, `n` of them.
double sum_of_tiles(const double* x, long n) {
  double lane[kLambLanes] = {0.0};
  for (long t = 0; t < n; ++t) lane[t % kLambLanes] += x[2 * t];
  for (int half = kLambLanes / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

}  // namespace

// Moments of all tensors in place; squares (2, count) become the sums of p^2 and of direction^2. Returns 0, or
// 1 without memory, and then nothing has been changed.
ZT_EXPORT int zt_lamb_moments(const ZtCall* calls, long count, double* squares) {
  long tiles = 0;
  for (long c = 0; c < count; ++c) tiles += tiles_of(calls[c]);
  double* sums = (double*)malloc(sizeof(double) * 2 * (tiles + 1));
  if (!sums) return 1;
  over_tiles(calls, count, [sums](const ZtCall& c, const ZtLamb& op, long tile, long at) {
    const long begin = tile * kLambTile;
    kernels((int)c.isa)->lamb_moments(shard_of(c), op, begin, least((long)c.n, begin + kLambTile), sums + 2 * at);
  });
  long first = 0;
  for (long c = 0; c < count; first += tiles_of(calls[c]), ++c) {
    const long n = tiles_of(calls[c]);
    squares[c] = sum_of_tiles(sums + 2 * first, n);
    squares[count + c] = sum_of_tiles(sums + 2 * first + 1, n);
  }
  free(sums);
  return 0;
}

// p -= lr ratio direction of all tensors; `multiplier` holds the ratio.
ZT_EXPORT void zt_lamb_apply(const ZtCall* calls, long count) {
  over_tiles(calls, count, [](const ZtCall& c, const ZtLamb& op, long tile, long) {
    const long begin = tile * kLambTile;
    const long end = least((long)c.n, begin + kLambTile);
    kernels((int)c.isa)->lamb_apply(shard_of(c), op, op.multiplier, begin, end);
  });
}
