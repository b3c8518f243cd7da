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

ZT_FN void whole_chunk(const void* x, zt_i64 first, double* lane) {
#pragma unroll 1
  for (int r = 0; r < kRows; r += kRowsAhead) {
    float row[kRowsAhead][kOwned];
    ZT_UNROLL
    for (int u = 0; u < kRowsAhead; ++u) Stored::load16(x, first + (r + u) * kLanes, row[u]);
    ZT_UNROLL
    for (int u = 0; u < kRowsAhead; ++u) add_squares(row[u], lane);
  }
}

ZT_FN void part_of_chunk(const void* x, zt_i64 first, zt_i64 n, double* lane) {
#pragma unroll 1
  for (int r = 0; r < kRows; ++r)
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) {
      const zt_i64 i = first + r * kLanes + k;
      const float one = i < n ? Stored::load(x, i) : 0.0f;
      lane[k] += (double)one * (double)one;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, ZT_BLOCKS) zt_square_sum(const ZtSquareSum launch) {
  __shared__ double lanes[kChunks * kStride];
  const zt_i64 chunks = (launch.n + kElementsPerChunk - 1) / kElementsPerChunk;
  const int own = threadIdx.x / kOwners, lane = threadIdx.x % kOwners * kOwned;
  const bool aligned = ((zt_i64)launch.x & 15) == 0;
  for (zt_i64 base = (zt_i64)blockIdx.x * kChunks; base < chunks; base += (zt_i64)gridDim.x * kChunks) {
    double sum[kOwned];
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) sum[k] = 0.0;
    const zt_i64 begin = (base + own) * kElementsPerChunk;
    if (aligned && begin + kElementsPerChunk <= launch.n)
      whole_chunk(launch.x, begin + lane, sum);
    else if (begin < launch.n)
      part_of_chunk(launch.x, begin + lane, launch.n, sum);
    ZT_UNROLL
    for (int k = 0; k < kOwned; ++k) lanes[own * kStride + lane + k] = sum[k];
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
