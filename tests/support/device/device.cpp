// The stand-in device as torch sees it: an arena of memory that host code may not touch, the guard
// with its streams and events, pinned memory, and empty tensors. What work is, when it runs and
// what it may use is decided in Python (scheduler.py), which is called back from here.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kPage = 4096;
constexpr size_t kArena = size_t(1) << 36;  // reserved, not used
constexpr int64_t kAnyStream = -1;
constexpr size_t kUnit = 512;               // what an allocation is rounded to where it is counted

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

thread_local int64_t current_stream = 0;
char last_operator[256] = "none yet";

// Pages of one range of addresses. A freed block waits until it is released (by Python, once no
// work can use it any more), and goes to an allocation of the same stream only; once the host has
// waited for the whole device, to one of any stream.
struct Arena {
  char* base = nullptr;
  size_t top = 0;
  std::mutex mutex;
  std::map<std::pair<int64_t, size_t>, std::vector<char*>> free_blocks;

  char* take(int64_t stream, size_t bytes) {
    std::lock_guard<std::mutex> held(mutex);
    for (int64_t owner : {stream, kAnyStream}) {
      auto kept = free_blocks.find({owner, bytes});
      if (kept == free_blocks.end() || kept->second.empty()) continue;
      char* block = kept->second.back();
      kept->second.pop_back();
      return block;
    }
    TORCH_CHECK(top + bytes <= kArena, "standin: out of memory");
    char* block = base + top;
    top += bytes;
    return block;
  }
  void release(char* block, int64_t stream, size_t bytes) {
    std::lock_guard<std::mutex> held(mutex);
    free_blocks[{stream, bytes}].push_back(block);
  }
  void share() {
    std::lock_guard<std::mutex> held(mutex);
    std::map<std::pair<int64_t, size_t>, std::vector<char*>> shared;
    for (auto& [key, kept] : free_blocks) {
      auto& all = shared[{kAnyStream, key.second}];
      all.insert(all.end(), kept.begin(), kept.end());
    }
    free_blocks.swap(shared);
  }
  bool holds(const void* address) const { return address >= base && address < base + kArena; }
};

Arena device_memory, pinned_memory;
std::atomic<int> opened{0};

struct Entry {  // of the log that Python reads: what was allocated and freed, in order
  int64_t kind, address, bytes, stream;
};
struct Block {
  int64_t bytes, stream;
};
std::mutex log_mutex;
std::vector<Entry> entries;
std::unordered_map<void*, Block> blocks;  // live ones
std::atomic<int64_t> live{0}, peak{0};

void protect(int rights) {
  if (device_memory.top) mprotect(device_memory.base, device_memory.top, rights);
}

void free_device(void* address) {
  std::lock_guard<std::mutex> held(log_mutex);
  auto found = blocks.find(address);
  if (found == blocks.end()) return;
  live -= int64_t(rounded(found->second.bytes, kUnit));
  entries.push_back({1, int64_t(address), found->second.bytes, found->second.stream});
  blocks.erase(found);
}

void free_pinned(void*) {}  // address space is not reused, so that a late copy finds what it needs

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, 0);
    if (!bytes) return {nullptr, nullptr, &free_device, device};
    char* block = device_memory.take(current_stream, rounded(bytes, kPage));
    if (opened) mprotect(block, rounded(bytes, kPage), PROT_READ | PROT_WRITE);
    std::lock_guard<std::mutex> held(log_mutex);
    blocks[block] = {int64_t(bytes), current_stream};
    entries.push_back({0, int64_t(block), int64_t(bytes), current_stream});
    live += int64_t(rounded(bytes, kUnit));
    if (live > peak) peak.store(live);
    return {block, block, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "standin: host code copies device memory");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* block = bytes ? pinned_memory.take(0, rounded(bytes, kPage)) : nullptr;
    return {block, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* into, const void* source, std::size_t bytes) const override {
    default_copy_data(into, source, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// What Python does for the guard; a result other than 0 is an error whose text it has left here.
using Call = int (*)(int64_t, int64_t);
struct Calls {
  Call record, block, query_event, wait_event, wait_stream, use_on_stream;
} calls;
std::string error_text;

void ask(Call call, int64_t a, int64_t b) {
  if (call && call(a, b) < 0) TORCH_CHECK(false, error_text);
}

std::atomic<int64_t> stream_count{0}, event_count{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream stream_of(int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++stream_count); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(++stream_count); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++event_count);
    ask(calls.record, int64_t(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) ask(calls.block, int64_t(event), stream.id());
  }
  bool queryEvent(void* event) const override { return !event || calls.query_event(int64_t(event), 0); }
  void synchronizeEvent(void* event) const override {
    if (event) ask(calls.wait_event, int64_t(event), 0);
  }
  void synchronizeStream(const c10::Stream& stream) const override { ask(calls.wait_stream, stream.id(), 0); }
  void synchronizeDevice(const c10::DeviceIndex) const override { ask(calls.wait_stream, -1, 0); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get()) ask(calls.use_on_stream, int64_t(data.get()), stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    std::lock_guard<std::mutex> held(log_mutex);
    if (event) entries.push_back({2, int64_t(event), 0, 0});
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1e-3; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    TORCH_CHECK(!bytes || !storage.nbytes(), "standin: storage is resized to and from 0 bytes only");
    storage.set_data_ptr_noswap(device_allocator.allocate(bytes));
    storage.set_nbytes(bytes);
  }
  at::Device getDeviceFromPtr(void*) const override { return c10::Device(kType, 0); }
};

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
}

// A host access to the arena: says whose memory it is, then goes on as without this handler
// (faulthandler prints where in Python the access is).
struct sigaction before;

void refuse(int number, siginfo_t* info, void* context) {
  if (device_memory.holds(info->si_addr)) {
    char text[512];
    int length = snprintf(text, sizeof text,
                          "standin: host code touches device memory (address %p); the device's last operator was %s\n",
                          info->si_addr, last_operator);
    if (write(2, text, length) < 0) _exit(3);
  }
  sigaction(number, &before, nullptr);  // the access is made again, and gets the handler from before
  (void)context;
}

}  // namespace

extern "C" {

void standin_open(const Calls* given) {
  calls = *given;
  for (Arena* arena : {&device_memory, &pinned_memory}) {
    int rights = arena == &device_memory ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* made = mmap(nullptr, kArena, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "standin: no address space");
    arena->base = static_cast<char*>(made);
  }
  struct sigaction action = {};
  action.sa_sigaction = &refuse;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
  c10::SetAllocator(kType, &device_allocator);
  static Guard guard;
  c10::impl::device_guard_impl_registry[size_t(kType)].store(&guard);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

// Nothing calls Python from here on: the interpreter is about to end.
void standin_close() { calls = {}; }

void* standin_base() { return device_memory.base; }
int64_t standin_arena_bytes() { return kArena; }
int64_t standin_stream() { return current_stream; }
void standin_set_stream(int64_t stream) { current_stream = stream; }
int64_t standin_new_stream() { return ++stream_count; }
int64_t standin_new_event() { return ++event_count; }
int64_t standin_live() { return live; }
int64_t standin_peak() { return peak; }
void standin_reset_peak() { peak.store(live); }
void standin_error(const char* text) { error_text = text; }
void standin_operator(const char* name) { snprintf(last_operator, sizeof last_operator, "%s", name); }
void standin_unlock() {
  if (opened++ == 0) protect(PROT_READ | PROT_WRITE);
}
void standin_lock() {
  if (--opened == 0) protect(PROT_NONE);
}
void standin_release(void* block, int64_t stream, int64_t bytes) {
  device_memory.release(static_cast<char*>(block), stream, rounded(bytes, kPage));
}
// The host has waited for the whole device: what was freed can go to any stream.
void standin_share() { device_memory.share(); }
int64_t standin_log(Entry* into, int64_t most) {
  std::lock_guard<std::mutex> held(log_mutex);
  int64_t count = std::min<int64_t>(most, entries.size());
  std::copy(entries.begin(), entries.begin() + count, into);
  entries.erase(entries.begin(), entries.begin() + count);
  return count;
}
}
