// Reads and writes of files that go on while their caller does something else: through io_uring or Linux's own
// asynchronous I/O, by system calls, without liburing and libaio.
//
// A disk has `threads` workers, each with a ring of its own of `depth` requests. A transfer is cut into requests of
// `block` bytes in one queue that all workers take from. Callers may be many threads; workers hold no interpreter lock.
// Nothing here checks its arguments: the caller has.
#include <stdint.h>

#define ZT_EXPORT extern "C" __attribute__((visibility("default")))

// `bytes` at `address` from or to `offset` of a descriptor.
struct ZtDiskPart {
  int64_t descriptor, address, bytes, offset;
};

// What became of a transfer: an errno, kEnd or 0, and of the request that failed its offset, the bytes done and the bytes asked for.
struct ZtDiskOutcome {
  int64_t error, offset, done, wanted;
};

enum { kEnd = -1 };  // the file ended before the request did

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>)
#define ZT_DISK 1
#endif
#endif

#ifdef ZT_DISK
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace {

// The kernel's interface to io_uring. Its header is not used: it may be absent, or older than the kernel that the library
// runs on, without the operations of Linux 5.6.
enum : uint8_t { kRead = 22, kWrite = 23 };
enum : uint32_t { kSingleMap = 1, kGetEvents = 1 };
enum : uint64_t { kSqRing = 0, kCqRing = 0x8000000, kSqes = 0x10000000 };

struct UringEntry {
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t descriptor;
  uint64_t offset, address;
  uint32_t bytes, rw_flags;
  uint64_t user_data, rest[3];
};

struct UringCompletion {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};

struct UringParams {
  uint32_t sq_entries, cq_entries, flags, thread_cpu, thread_idle, features, rest[4];
  struct {
    uint32_t head, tail, mask, entries, flags, dropped, array, rest[3];
  } sq;
  struct {
    uint32_t head, tail, mask, entries, overflow, completions, rest[4];
  } cq;
};

static_assert(sizeof(UringEntry) == 64 && sizeof(UringCompletion) == 16 && sizeof(UringParams) == 120, "as the kernel has them");

// Outlives the disk as long as somebody has a transfer of it.
struct Signals {
  std::mutex mutex;
  std::condition_variable work, done;
};

struct Transfer {
  std::shared_ptr<Signals> signals;
  long pending = 0;  // requests; under the mutex
  ZtDiskOutcome outcome = {0, 0, 0, 0};
};

struct Request {
  Transfer* transfer;
  int descriptor;
  char* memory;
  int64_t done, wanted, offset;
  bool write;
};

struct Completion {
  Request* request;
  int64_t result;  // bytes, or -errno
};

struct Disk;

// One worker and its way to the kernel. Both calls return a number, or -errno.
struct Ring {
  Disk* disk = nullptr;
  pthread_t worker;
  virtual ~Ring() {}
  virtual const char* name() = 0;
  virtual int open(unsigned depth) = 0;
  virtual long submit(Request** requests, long count) = 0;
  virtual long reap(Completion* into, long most, long least) = 0;
};

struct UringRing final : Ring {
  int ring = -1;
  unsigned *sq_tail = nullptr, *sq_mask = nullptr, *sq_array = nullptr, *cq_head = nullptr, *cq_tail = nullptr, *cq_mask = nullptr;
  UringEntry* entries = nullptr;
  UringCompletion* completions = nullptr;
  void *sq = MAP_FAILED, *cq = MAP_FAILED, *sqes = MAP_FAILED;
  size_t sq_bytes = 0, cq_bytes = 0, sqe_bytes = 0;

  ~UringRing() override {
    if (sqes != MAP_FAILED) munmap(sqes, sqe_bytes);
    if (cq != MAP_FAILED && cq != sq) munmap(cq, cq_bytes);
    if (sq != MAP_FAILED) munmap(sq, sq_bytes);
    if (ring >= 0) close(ring);
  }

  const char* name() override { return "io_uring"; }

  void* map(size_t bytes, uint64_t offset) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, (off_t)offset); }

  int open(unsigned depth) override {
    UringParams params;
    memset(&params, 0, sizeof params);
    ring = (int)syscall(__NR_io_uring_setup, depth, &params);
    if (ring < 0) return -errno;
    sq_bytes = params.sq.array + params.sq_entries * sizeof(unsigned);
    cq_bytes = params.cq.completions + params.cq_entries * sizeof(UringCompletion);
    sqe_bytes = params.sq_entries * sizeof(UringEntry);
    const bool single = params.features & kSingleMap;
    if (single && cq_bytes > sq_bytes) sq_bytes = cq_bytes;
    sq = map(sq_bytes, kSqRing);
    if (sq == MAP_FAILED) return -errno;
    cq = single ? sq : map(cq_bytes, kCqRing);
    if (cq == MAP_FAILED) return -errno;
    sqes = map(sqe_bytes, kSqes);
    if (sqes == MAP_FAILED) return -errno;
    char *s = (char*)sq, *c = (char*)cq;
    sq_tail = (unsigned*)(s + params.sq.tail);
    sq_mask = (unsigned*)(s + params.sq.mask);
    sq_array = (unsigned*)(s + params.sq.array);
    cq_head = (unsigned*)(c + params.cq.head);
    cq_tail = (unsigned*)(c + params.cq.tail);
    cq_mask = (unsigned*)(c + params.cq.mask);
    entries = (UringEntry*)sqes;
    completions = (UringCompletion*)(c + params.cq.completions);
    return 0;
  }

  long submit(Request** requests, long count) override {
    const unsigned tail = *sq_tail;  // written by this thread alone
    for (long i = 0; i < count; ++i) {
      const unsigned slot = (tail + (unsigned)i) & *sq_mask;
      const Request& r = *requests[i];
      UringEntry& e = entries[slot];
      memset(&e, 0, sizeof e);
      e.opcode = r.write ? kWrite : kRead;
      e.descriptor = r.descriptor;
      e.address = (uint64_t)(uintptr_t)(r.memory + r.done);
      e.bytes = (uint32_t)(r.wanted - r.done);
      e.offset = (uint64_t)(r.offset + r.done);
      e.user_data = (uint64_t)(uintptr_t)requests[i];
      sq_array[slot] = slot;
    }
    __atomic_store_n(sq_tail, tail + (unsigned)count, __ATOMIC_RELEASE);
    const long taken = syscall(__NR_io_uring_enter, ring, (unsigned)count, 0u, 0u, nullptr, 0);
    const long error = taken < 0 ? -errno : 0;
    // What the kernel did not take is put into the ring again by the next call.
    if (taken < count) __atomic_store_n(sq_tail, tail + (unsigned)(taken < 0 ? 0 : taken), __ATOMIC_RELEASE);
    return error ? error : taken;
  }

  long reap(Completion* into, long most, long least) override {
    for (;;) {
      unsigned head = *cq_head;
      const unsigned tail = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
      if ((long)(tail - head) >= least || least == 0) {
        long found = 0;
        for (; head != tail && found < most; ++head, ++found) {
          const UringCompletion& c = completions[head & *cq_mask];
          into[found] = {(Request*)(uintptr_t)c.user_data, c.result};
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
        return found;
      }
      if (syscall(__NR_io_uring_enter, ring, 0u, (unsigned)least, kGetEvents, nullptr, 0) < 0 && errno != EINTR) return -errno;
    }
  }
};

struct AioRing final : Ring {
  aio_context_t context = 0;
  std::vector<iocb> blocks;
  std::vector<iocb*> free;
  std::vector<io_event> events;

  const char* name() override { return "libaio"; }

  ~AioRing() override {
    if (context) syscall(__NR_io_destroy, context);
  }

  int open(unsigned depth) override {
    if (syscall(__NR_io_setup, depth, &context) < 0) {
      context = 0;
      return -errno;
    }
    blocks.resize(depth);
    events.resize(depth);
    for (iocb& block : blocks) free.push_back(&block);
    return 0;
  }

  long submit(Request** requests, long count) override {
    std::vector<iocb*> now((size_t)count);
    for (long i = 0; i < count; ++i) {
      const Request& r = *requests[i];
      iocb& b = *(now[(size_t)i] = free[free.size() - 1 - (size_t)i]);
      memset(&b, 0, sizeof b);
      b.aio_lio_opcode = r.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
      b.aio_fildes = (uint32_t)r.descriptor;
      b.aio_buf = (uint64_t)(uintptr_t)(r.memory + r.done);
      b.aio_nbytes = (uint64_t)(r.wanted - r.done);
      b.aio_offset = r.offset + r.done;
      b.aio_data = (uint64_t)(uintptr_t)requests[i];
    }
    const long taken = syscall(__NR_io_submit, context, count, now.data());
    if (taken < 0) return -errno;
    free.resize(free.size() - (size_t)taken);
    return taken;
  }

  long reap(Completion* into, long most, long least) override {
    if (most > (long)events.size()) most = (long)events.size();
    long found;
    do found = syscall(__NR_io_getevents, context, least, most, events.data(), nullptr);
    while (found < 0 && errno == EINTR);
    if (found < 0) return -errno;
    for (long i = 0; i < found; ++i) {
      const io_event& e = events[(size_t)i];
      into[i] = {(Request*)(uintptr_t)e.data, e.res};
      free.push_back((iocb*)(uintptr_t)e.obj);
    }
    return found;
  }
};

struct Disk {
  std::shared_ptr<Signals> signals = std::make_shared<Signals>();
  std::deque<Request*> queue;  // under the mutex, with `closing`
  bool closing = false;
  long depth = 1, block = 1;
  bool single = false, overlap = true;
  pid_t owner = 0;
  std::vector<std::unique_ptr<Ring>> rings;

  // Ends the first `count` workers when all that was started is over.
  void end(size_t count) {
    {
      std::lock_guard<std::mutex> held(signals->mutex);
      closing = true;
      signals->work.notify_all();
    }
    for (size_t i = 0; i < count; ++i) pthread_join(rings[i]->worker, nullptr);
  }

  void finish(Request* r, int64_t error) {
    std::lock_guard<std::mutex> held(signals->mutex);
    Transfer& t = *r->transfer;
    if (error && !t.outcome.error) t.outcome = {error, r->offset, r->done, r->wanted};
    if (--t.pending == 0) signals->done.notify_all();
    delete r;
  }

  static void pause() {
    const timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, nullptr);
  }

  void work(Ring* ring) {
    std::vector<Request*> now;  // to be submitted, oldest first
    std::vector<Completion> found((size_t)depth);
    long flying = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> held(signals->mutex);
        while (queue.empty() && now.empty() && !flying && !closing) signals->work.wait(held);
        if (queue.empty() && now.empty() && !flying) return;
        const long share = ((long)queue.size() + (long)rings.size() - 1) / (long)rings.size();
        long take = overlap || !flying ? depth - flying - (long)now.size() : 0;
        for (take = take < share ? take : share; take > 0; --take) {
          now.push_back(queue.front());
          queue.pop_front();
        }
      }
      while (!now.empty()) {
        const long taken = ring->submit(now.data(), single ? 1 : (long)now.size());
        if (taken > 0) {
          flying += taken;
          now.erase(now.begin(), now.begin() + taken);
        } else if (taken == 0 || taken == -EAGAIN || taken == -EBUSY || taken == -EINTR) {
          if (flying) break;  // room comes with what is under way
          pause();
        } else {
          finish(now.front(), -taken);
          now.erase(now.begin());
        }
      }
      if (!flying) continue;
      const long count = ring->reap(found.data(), depth, overlap ? 1 : flying);
      if (count == -EAGAIN || count == -EBUSY) {
        pause();
        continue;
      }
      if (count < 0) {  // requests are under way whose end would never be known
        fprintf(stderr, "zero_trial: %s: the kernel does not say how %ld transfers ended: %s\n", ring->name(), flying, strerror((int)-count));
        abort();
      }
      flying -= count;
      for (long i = 0; i < count; ++i) {
        Request* r = found[(size_t)i].request;
        const int64_t result = found[(size_t)i].result;
        if (result > 0) r->done += result;
        if (r->done == r->wanted)
          finish(r, 0);
        else if (result > 0 || result == -EAGAIN || result == -EINTR)
          now.push_back(r);
        else
          finish(r, result ? -result : kEnd);
      }
    }
  }
};

// Not std::thread, which throws where the system has no more threads: the library is built without exceptions.
extern "C" void* zt_disk_work(void* of) {
  Ring* ring = (Ring*)of;
  ring->disk->work(ring);
  return nullptr;
}

}  // namespace

// `kind`: 1 io_uring, 2 libaio. Null, and an errno in `error`, where the kernel does not permit it.
ZT_EXPORT void* zt_disk_open(int kind, int threads, int depth, long block, int single, int overlap, int* error) {
  std::unique_ptr<Disk> disk(new Disk);
  disk->depth = depth;
  disk->block = block;
  disk->single = single;
  disk->overlap = overlap;
  disk->owner = getpid();
  for (int i = 0; i < threads; ++i) {
    disk->rings.emplace_back(kind == 1 ? (Ring*)new UringRing : (Ring*)new AioRing);
    if ((*error = -disk->rings.back()->open((unsigned)depth))) return nullptr;
  }
  // Signals are for the interpreter's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  size_t started = 0;
  for (; started < disk->rings.size() && !*error; started += !*error) {
    Ring* ring = disk->rings[started].get();
    ring->disk = disk.get();
    *error = pthread_create(&ring->worker, nullptr, zt_disk_work, ring);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (*error) {
    disk->end(started);
    return nullptr;
  }
  return disk.release();
}

// Starts a transfer; the memory must stay until zt_disk_wait has returned 1.
ZT_EXPORT void* zt_disk_start(void* of, const ZtDiskPart* parts, int count, int write) {
  Disk& disk = *(Disk*)of;
  Transfer* transfer = new Transfer;
  transfer->signals = disk.signals;
  std::lock_guard<std::mutex> held(disk.signals->mutex);
  for (int i = 0; i < count; ++i)
    for (int64_t low = 0; low < parts[i].bytes; low += disk.block) {
      const int64_t left = parts[i].bytes - low;
      disk.queue.push_back(new Request{transfer, (int)parts[i].descriptor, (char*)(uintptr_t)parts[i].address + low, 0,
                                       left < disk.block ? left : disk.block, parts[i].offset + low, write != 0});
      ++transfer->pending;
    }
  disk.signals->work.notify_all();
  return transfer;
}

// 1 when the transfer is over, 0 when it is not after so many milliseconds.
ZT_EXPORT int zt_disk_wait(void* of, long milliseconds) {
  Transfer& transfer = *(Transfer*)of;
  std::unique_lock<std::mutex> held(transfer.signals->mutex);
  if (milliseconds > 0)
    transfer.signals->done.wait_for(held, std::chrono::milliseconds(milliseconds), [&] { return transfer.pending == 0; });
  return transfer.pending == 0;
}

// What became of a transfer that is over; it is gone afterwards.
ZT_EXPORT void zt_disk_finish(void* of, ZtDiskOutcome* outcome) {
  Transfer* transfer = (Transfer*)of;
  *outcome = transfer->outcome;
  delete transfer;
}

// Ends the workers when all that was started is over. A forked child has none of them.
ZT_EXPORT void zt_disk_close(void* of) {
  Disk* disk = (Disk*)of;
  if (disk->owner != getpid()) return;
  disk->end(disk->rings.size());
  delete disk;
}

#else

enum { kNotImplemented = 38 };

ZT_EXPORT void* zt_disk_open(int, int, int, long, int, int, int* error) {
  *error = kNotImplemented;
  return nullptr;
}
ZT_EXPORT void* zt_disk_start(void*, const ZtDiskPart*, int, int) { return nullptr; }
ZT_EXPORT int zt_disk_wait(void*, long) { return 1; }
ZT_EXPORT void zt_disk_finish(void*, ZtDiskOutcome* outcome) { *outcome = {kNotImplemented, 0, 0, 0}; }
ZT_EXPORT void zt_disk_close(void*) {}

#endif
