// Large blocks of torch's CPU tensors: each a mapping of its own. Freed ones wait for the next tensor of their size, as
// long as all blocks together have at most the bytes that have lived at one time, and a few more.
//
// From glibc, a large block is either a mapping, whose pages the kernel clears in page faults at each use, or a part
// of the heap, where smaller blocks settle in the holes between large ones. What is kept here is never cut, so it
// costs its bytes and no more.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <unordered_map>

#define ZT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPage = 4096;  // blocks begin at one
constexpr size_t kLargePage = 2 << 20;
constexpr size_t kGrain = 1 << 16;  // sizes are rounded up to it, so that like ones fit each other

struct Block {
  char* start;
  size_t bytes;
};

// What the process shares. Never destroyed: tensors may outlive everything.
struct Shared {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  c10::Allocator* base = nullptr;         // torch's own, for smaller blocks
  c10::DeleterFnPtr free_base = nullptr;
  size_t least = 0, extra = 0;            // bytes of a block that is mapped; and above the peak, of all blocks
  size_t kept_bytes = 0, lent_bytes = 0;
  size_t peak = 0;                        // of lent_bytes
  std::deque<Block> kept;                 // the longest ago first
  std::unordered_map<void*, size_t> lent; // start -> bytes
};

Shared& shared() {
  static Shared* const it = new Shared;
  return *it;
}

struct Lock {
  Lock() { pthread_mutex_lock(&shared().mutex); }
  ~Lock() { pthread_mutex_unlock(&shared().mutex); }
};

// Gives kept blocks back to the kernel, the longest ago first, until at most `most` bytes are left.
void shrink(size_t most) {
  Shared& all = shared();
  while (all.kept_bytes > most) {
    const Block block = all.kept.front();
    all.kept.pop_front();
    all.kept_bytes -= block.bytes;
    munmap(block.start, block.bytes);
  }
}

char* map(size_t bytes) {
  const size_t slack = bytes >= kLargePage ? kLargePage : 0;
  void* found = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(found);
  if (slack) {
    const size_t before = -reinterpret_cast<uintptr_t>(start) % kLargePage;
    if (before) munmap(start, before);
    munmap(start + before + bytes, slack - before);
    start += before;
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE);  // where the kernel has none, small pages
#endif
  }
  return start;
}

// Returns a block of `bytes`, the one that was freed last where there is one; nullptr where the kernel has no room.
char* take(size_t bytes) {
  Shared& all = shared();
  const Lock lock;
  char* start = nullptr;
  const size_t peak = std::max(all.peak, all.lent_bytes + bytes);
  for (auto block = all.kept.rbegin(); block != all.kept.rend(); ++block) {
    if (block->bytes != bytes) continue;
    start = block->start;
    all.kept_bytes -= bytes;
    all.kept.erase(std::next(block).base());
    break;
  }
  if (!start) {
    shrink(peak + all.extra - all.lent_bytes - bytes);
    start = map(bytes);
  }
  if (!start) {
    shrink(0);
    start = map(bytes);
  }
  if (start) {
    all.lent[start] = bytes;
    all.lent_bytes += bytes;
    all.peak = peak;
  }
  return start;
}

// Takes a block back; returns whether it came from here.
bool give_back(void* start) {
  if (reinterpret_cast<uintptr_t>(start) % kPage) return false;  // without the lock: most are of other allocators
  Shared& all = shared();
  const Lock lock;
  const auto found = all.lent.find(start);
  if (found == all.lent.end()) return false;
  c10::profiledCPUMemoryReporter().Delete(start);
  const size_t bytes = found->second;
  all.lent.erase(found);
  all.lent_bytes -= bytes;
  all.kept.push_back({static_cast<char*>(start), bytes});
  all.kept_bytes += bytes;
  return true;
}

struct Blocks final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Shared& all = shared();
    char* start = nullptr;
    if (bytes >= all.least) start = take((bytes + kGrain - 1) / kGrain * kGrain);
    if (!start) return all.base->allocate(bytes);  // which says what is missing
    c10::profiledCPUMemoryReporter().New(start, bytes);
    return {start, start, &free_any, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }

 private:
  static void free_any(void* start) {
    if (!give_back(start)) shared().free_base(start);
  }
};

}  // namespace

// Lets torch take blocks of `least` bytes and more from here. Freed ones are kept as long as all blocks together have
// at most `extra` bytes more than have lived at one time since.
ZT_EXPORT void zt_blocks_keep(int64_t least, int64_t extra) {
  Shared& all = shared();
  {
    const Lock lock;
    all.least = least;
    all.extra = extra;
    all.peak = all.lent_bytes;
    shrink(all.extra);
  }
  if (all.base) return;
  all.base = c10::GetCPUAllocator();
  all.free_base = all.base->raw_deleter();
  pthread_atfork([] { pthread_mutex_lock(&shared().mutex); }, [] { pthread_mutex_unlock(&shared().mutex); },
                 [] { pthread_mutex_unlock(&shared().mutex); });
  c10::SetCPUAllocator(new Blocks, 255);
}

// Gives all kept blocks back to the kernel; returns their bytes.
ZT_EXPORT int64_t zt_blocks_drop() {
  const Lock lock;
  const int64_t bytes = shared().kept_bytes;
  shrink(0);
  shared().peak = shared().lent_bytes;
  return bytes;
}
