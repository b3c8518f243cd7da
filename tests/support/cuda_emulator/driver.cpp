// A CUDA driver whose one device is this processor. An image is the path of a library made from kernel.cpp.
//
// Kernels may touch only what was allowed by `allow`, and the calls before must have been those that a real driver asks for; anything
// else is a fault, or the error code that a real driver gives.
#include <dlfcn.h>
#include <string.h>

#include <vector>

struct Range {
  unsigned long begin, end;
  long writable;
};

struct Launch {
  const void* arguments;
  unsigned blocks, threads;
  const Range* ranges;
  long count;
  char* fault;
  long* wide;
};

static std::vector<Range> ranges;
static char first_fault[256];
static int depth, launches, capture_mode;
static long wide;
static unsigned last_blocks;
static bool initialised;
static int context;
enum { kHandle = 7 };  // of device 0

enum { kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201, kNotFound = 500, kCaptureUnsupported = 900 };
enum { kRelaxed = 2 };

extern "C" {

void allow(unsigned long begin, unsigned long end, long writable) { ranges.push_back({begin, end, writable}); }
void forget() {
  ranges.clear();
  first_fault[0] = 0;
  launches = 0;
  wide = 0;
}
const char* fault() { return first_fault; }
int launch_count() { return launches; }
int wide_accesses() { return (int)wide; }
int blocks_of_last() { return (int)last_blocks; }
int contexts_pushed() { return depth; }
int mode_of_captures() { return capture_mode; }

int cuInit(unsigned flags) {
  initialised = flags == 0;
  return kSuccess;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == kInvalidImage ? "device kernel image is invalid" : status == kNotFound ? "named symbol not found" : nullptr;
  return *text ? kSuccess : kInvalidValue;
}
int cuDeviceGet(int* device, int ordinal) {
  if (!initialised) return kNotInitialized;
  if (ordinal != 0) return kInvalidDevice;
  *device = kHandle;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** out, int device) {
  if (device != kHandle) return kInvalidDevice;
  *out = &context;
  return kSuccess;
}
int cuCtxPushCurrent_v2(void* pushed) {
  if (pushed != &context) return kInvalidContext;
  ++depth;
  return kSuccess;
}
int cuCtxPopCurrent_v2(void** out) {
  if (!depth) return kInvalidContext;
  --depth;
  *out = &context;
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return kSuccess;
}
int cuModuleLoadData(void** out, const char* image) {
  if (!depth) return kInvalidContext;
  if (capture_mode != kRelaxed) return kCaptureUnsupported;
  if (image[0] != '/') return kInvalidImage;
  *out = dlopen(image, RTLD_NOW | RTLD_LOCAL);
  return *out ? kSuccess : kInvalidImage;
}
int cuModuleGetFunction(void** out, void* module, const char* name) {
  if (!strncmp(name, "zt_", 3)) *out = dlsym(module, "emulate");
  else *out = nullptr;
  return *out ? kSuccess : kNotFound;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz, unsigned shared,
                   void* stream, void** arguments, void** extra) {
  if (!depth) return kInvalidContext;
  if (!x || y != 1 || z != 1 || !threads || ty != 1 || tz != 1 || shared || extra || stream) return kInvalidValue;
  const Launch launch = {arguments[0], x, threads, ranges.data(), (long)ranges.size(), first_fault, &wide};
  ((void (*)(const Launch*))function)(&launch);
  ++launches;
  last_blocks = x;
  return kSuccess;
}
}
