// Enough of CUDA for g++ to compile the kernels of csrc/cuda and run them thread by thread.
//
// Every thread of a block is a fiber with a stack of its own; __syncthreads() goes back to the scheduler, which runs each fiber up to
// the barrier before any of them goes on. Blocks run one after the other. Every access to a tensor is checked: it must be aligned to
// its size, and lie in memory that the launch was given.
#pragma once

#include <stdio.h>
#include <ucontext.h>

#include "launch.h"

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim, blockDim;

static const Launch* launched;

static void fault(const char* what, const void* pointer, long bytes) {
  if (!launched->fault[0])
    snprintf(launched->fault, 256, "%s: %ld bytes at %p, block %u, thread %u", what, bytes, pointer, blockIdx.x, threadIdx.x);
}

static bool allowed(long i, unsigned long begin, long bytes, bool writes) {
  if (i >= launched->count) return false;
  const Range& range = launched->ranges[i];
  return range.begin <= begin && begin + bytes <= range.end && (!writes || range.writable);
}

static void access_memory(const void* pointer, long bytes, bool writes) {
  const unsigned long begin = (unsigned long)pointer;
  *launched->wide += bytes > 4;
  if (begin % (unsigned long)(bytes > 16 ? 16 : bytes == 12 ? 4 : bytes)) fault("misaligned", pointer, bytes);
  static long recent[8], next;  // where the last accesses were: launches over thousands of tensors would search for long
  for (long i : recent)
    if (allowed(i, begin, bytes, writes)) return;
  for (long i = 0; i < launched->count; ++i)
    if (allowed(i, begin, bytes, writes)) {
      recent[next++ % 8] = i;
      return;
    }
  fault(writes ? "written outside" : "read outside", pointer, bytes);
}
#define ZT_ACCESS(pointer, bytes, writes) access_memory((const void*)(pointer), bytes, writes)

enum { kFibers = 256, kStack = 1 << 16 };
static ucontext_t scheduler, fibers[kFibers];
static char stacks[kFibers][kStack];
static bool finished[kFibers];
static unsigned current;
static void (*body)();

static void __syncthreads() {
  const unsigned own = current;
  swapcontext(&fibers[own], &scheduler);
  threadIdx.x = own;
}

// Every thread of the block takes part: one that does not is found by the scheduler.
static unsigned exchanged[kFibers];
static unsigned __shfl_xor_sync(unsigned, unsigned value, int lane) {
  const unsigned own = current;
  exchanged[own] = value;
  __syncthreads();
  const unsigned other = exchanged[own ^ (unsigned)lane];
  __syncthreads();
  return other;
}

static void fiber_main() {
  body();
  finished[current] = true;
  swapcontext(&fibers[current], &scheduler);
}

static void run_block(unsigned block, unsigned threads) {
  blockIdx.x = block;
  for (unsigned t = 0; t < threads; ++t) {
    finished[t] = false;
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = stacks[t];
    fibers[t].uc_stack.ss_size = kStack;
    fibers[t].uc_link = nullptr;
    makecontext(&fibers[t], fiber_main, 0);
  }
  for (unsigned left = threads; left;) {
    unsigned ended = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (finished[t]) continue;
      current = threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t]);
      ended += finished[t];
    }
    if (ended && ended != left) fault("some threads ended where others wait at a barrier", nullptr, ended);
    left -= ended;
  }
}

template <class Arguments>
static void run_grid(const Launch* launch, void (*)(Arguments), void (*call)()) {
  launched = launch;
  body = call;
  gridDim.x = launch->blocks;
  blockDim.x = launch->threads;
  for (unsigned block = 0; block < launch->blocks; ++block) run_block(block, launch->threads);
}

template <class Arguments>
static const Arguments& arguments_of(void (*)(Arguments)) {
  return *(const Arguments*)launched->arguments;
}
