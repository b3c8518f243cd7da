// The order in which squares are added, the same on every processor: chunks of 32 lanes, then sums of chunks, again in lanes.
//
//   level 0    chunk c: lane j adds the squares of elements 2048 c + j, 2048 c + j + 32, ... in double, where they are exact
//   level 1..  chunk c: lane j adds the sums 1024 c + j, 1024 c + j + 32, ... of the level below, until one number is left
//
// and a chunk's lanes are folded in halves: 16 onto 16, 8 onto 8, down to one.
#ifndef ZT_SUMS_H
#define ZT_SUMS_H

#include "zt_common.h"

enum { kLanes = 32, kElementsPerChunk = 2048, kSumsPerChunk = 1024 };

// Leaves the sum of all lanes in lane[0].
ZT_FN void zt_fold(double* lane) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
}

#endif
