// Sum of squares in double, in the order of zt_sums.h: first over the elements, then over the sums. Nothing is atomic.
//
// ZT_TYPE says how elements are stored. In a chunk every lane has one owner: a thread owns the lanes that one 16-byte access
// covers, 4 of fp32 or 8 of 16-bit. One pass finds infinities and NaN too: squares of floats are finite in double.
#include "zt_sums.h"
#include "zt_tile.h"

struct ZtSquareSum {
  const void* x;
  double* sums;  // one per chunk
  zt_i64 n;
};

typedef ZtStored<ZT_TYPE> Stored;

enum {
  kOwned = Stored::kPer16,               // lanes per thread
  kOwners = kLanes / kOwned,             // threads per chunk
  kChunks = kThreads / kOwners,          // chunks at a time per block
  kRows = kElementsPerChunk / kLanes,
  kRowsAhead = 8,                        // rows that are loaded before the first is used
  kStride = kLanes + 1                   // in shared memory: folding threads stay out of each other's banks
};

ZT_FN void add_squares(const float* row, double* lane) {
  ZT_UNROLL
  for (int k = 0; k < kOwned; ++k) lane[k] += (double)row[k] * (double)row[k];
}

// `first` is the thread's first element of row 0, an aligned one. AHEAD rows are loaded before the first of them is used.
template <int AHEAD, bool SHIFTED>
ZT_FN void whole_chunk(const void* x, zt_i64 first, int wraps, double* lane) {
#pragma unroll 1
  for (int r = 0; r < kRows; r += AHEAD) {
    float row[AHEAD][kOwned];
    ZT_UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      const zt_i64 i = first + (r + u) * kLanes;
      if (SHIFTED && u == AHEAD - 1 && r + AHEAD == kRows && wraps) {
        ZT_UNROLL
        for (int k = 0; k < kOwned; ++k) row[u][k] = k < kOwned - wraps ? Stored::load(x, i + k) : 0.0f;
      } else {
        Stored::load16(x, i, row[u]);
      }
    }
    ZT_UNROLL
    for (int u = 0; u < AHEAD; ++u) add_squares(row[u], lane);
  }
}

// A chunk that does not begin at a multiple of 16 bytes. The last `wraps` lanes of a row's last thread begin in the head, before
// its row 0, and its last row would reach as far into the next chunk.
ZT_FN void shifted_chunk(const void* x, zt_i64 first, int wraps, double* lane) {
  ZT_UNROLL
  for (int k = 0; k < kOwned; ++k)
    if (k >= kOwned - wraps) {
      const float one = Stored::load(x, first + k - kLanes);
      lane[k] = (double)one * (double)one;
    }
  whole_chunk<kRowsAhead / 2, true>(x, first, wraps, lane);
}

// Element by element, the lanes of the same thread; nothing beyond n.
ZT_FN void part_of_chunk(const void* x, zt_i64 begin, int first_lane, zt_i64 n, double* lane) {
#pragma unroll 1
  for (int r = 0; r < kRows; ++r)
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) {
      const zt_i64 i = begin + r * kLanes + (first_lane + k) % kLanes;
      const float one = i < n ? Stored::load(x, i) : 0.0f;
      lane[k] += (double)one * (double)one;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_square_sum(const ZtSquareSum launch) {
  __shared__ double lanes[kChunks * kStride];
  const zt_i64 chunks = (launch.n + kElementsPerChunk - 1) / kElementsPerChunk;
  // Elements before the first at a multiple of 16 bytes. The lanes of a thread begin so many further on, and those of the last
  // thread go round: they hold the head, and one row less of what follows it. Every lane still adds in the order of its elements.
  const int head = (int)((0 - (unsigned long long)launch.x / Stored::kBytes) & (kOwned - 1));
  const int own = threadIdx.x / kOwners, lane = threadIdx.x % kOwners * kOwned + head;
  const int wraps = lane + kOwned > kLanes ? head : 0;
  for (zt_i64 base = (zt_i64)blockIdx.x * kChunks; base < chunks; base += (zt_i64)gridDim.x * kChunks) {
    double sum[kOwned];
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) sum[k] = 0.0;
    const zt_i64 begin = (base + own) * kElementsPerChunk;
    if (begin + kElementsPerChunk > launch.n) {
      if (begin < launch.n) part_of_chunk(launch.x, begin, lane, launch.n, sum);
    } else if (head) {
      shifted_chunk(launch.x, begin + lane, wraps, sum);
    } else {
      whole_chunk<kRowsAhead, false>(launch.x, begin + lane, 0, sum);
    }
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) lanes[own * kStride + (lane + k) % kLanes] = sum[k];
    __syncthreads();
    if (threadIdx.x < kChunks && base + threadIdx.x < chunks) {
      zt_fold(lanes + threadIdx.x * kStride);
      ZT_ACCESS(launch.sums + base + threadIdx.x, 8, true);
      launch.sums[base + threadIdx.x] = lanes[threadIdx.x * kStride];
    }
    __syncthreads();  // the lanes are read before the next chunks overwrite them
  }
}

// One level of sums over sums: x are doubles.
extern "C" __global__ void __launch_bounds__(kThreads) zt_sum(const ZtSquareSum launch) {
  __shared__ double lanes[kThreads / kLanes * kStride];
  const int own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const double* x = (const double*)launch.x;
  const zt_i64 chunks = (launch.n + kSumsPerChunk - 1) / kSumsPerChunk;
  const zt_i64 chunk = (zt_i64)blockIdx.x * (kThreads / kLanes) + own;
  const zt_i64 end = zt_least(launch.n, (chunk + 1) * kSumsPerChunk);
  double sum = 0.0;
  for (zt_i64 i = chunk * kSumsPerChunk + lane; i < end; i += kLanes) {
    ZT_ACCESS(x + i, 8, false);
    sum += x[i];
  }
  lanes[own * kStride + lane] = sum;
  __syncthreads();
  if (lane == 0 && chunk < chunks) {
    zt_fold(lanes + own * kStride);
    ZT_ACCESS(launch.sums + chunk, 8, true);
    launch.sums[chunk] = lanes[own * kStride];
  }
}
