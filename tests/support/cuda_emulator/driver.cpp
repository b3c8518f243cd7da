// A CUDA driver whose devices are this processor. An image is the path of a library made from kernel.cpp, or what `compiled` said is it.
//
// Calls must come in the order, with the context and with the handles that a real driver asks for; anything else gets the error code
// that a real driver gives. Kernels may touch only what was allowed by `allow` on their device; anything else is a fault.
#include <dlfcn.h>
#include <elf.h>
#include <string.h>

#include <mutex>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "launch.h"

namespace {

enum { kDevices = 4, kMachineCuda = 190 };

struct Kernel {  // what a library made from kernel.cpp says by itself
  void (*emulate)(const Launch*);
  const char* entry;
  long arguments, threads;
};
struct Module {
  int device;
  std::vector<void*> libraries;  // a source with two kernels is two libraries of one image
};
struct Function {
  int device;
  Kernel kernel;
};
struct Stream {
  int device;
};
struct Image {
  std::string content, path;
  int arch;
  bool ptx;
};
struct Past {
  int device;
  const void* stream;
  unsigned blocks;
};

std::recursive_mutex busy;
int devices = 1, archs[kDevices] = {90, 90, 90, 90};
char contexts[kDevices];
bool initialised, retained[kDevices];
std::vector<Module*> modules;
std::vector<Function*> functions;
std::vector<Stream*> streams;
std::vector<Image> images;
std::vector<Past> past;
std::vector<Range> ranges;
char first_fault[256];
long wide, expected_arguments = -1;
int refused_status, refusals, loaded;
thread_local std::vector<int> current;  // devices whose contexts are pushed

template <class T>
bool known(const std::vector<T*>& all, const void* handle) {
  for (T* one : all)
    if (one == handle) return true;
  return false;
}

void fault(const char* what) {
  if (!first_fault[0]) strncpy(first_fault, what, sizeof first_fault - 1);
}

// How long an image is: of machine code its section table comes last, PTX ends with a zero.
size_t length_of(const char* image) {
  if (memcmp(image, ELFMAG, SELFMAG)) return strlen(image) + 1;
  const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
  size_t end = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
  const size_t segments = head->e_phoff + (size_t)head->e_phnum * head->e_phentsize;
  return segments > end ? segments : end;
}

// The libraries that emulate an image, or the error of a driver that cannot run it there.
int emulated_by(const char* image, int device, std::vector<std::string>& paths) {
  if (image[0] == '/' && image[1] != '/') {  // PTX begins with a comment
    paths.push_back(image);
    return CUDA_SUCCESS;
  }
  const bool machine_code = !memcmp(image, ELFMAG, SELFMAG);
  if (machine_code ? ((const Elf64_Ehdr*)image)->e_machine != kMachineCuda : !strstr(image, ".version")) return CUDA_ERROR_INVALID_IMAGE;
  const size_t length = length_of(image);
  for (const Image& one : images) {
    if (one.content.size() != length || memcmp(one.content.data(), image, length)) continue;
    const bool same_major = one.arch / 10 == archs[device] / 10;
    if (one.arch > archs[device] || (!one.ptx && !same_major)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    paths.push_back(one.path);
  }
  return paths.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

Kernel kernel_of(void* library) {
  auto entry = (const char* (*)())dlsym(library, "entry");
  auto arguments = (long (*)())dlsym(library, "arguments_size"), threads = (long (*)())dlsym(library, "threads");
  if (!entry || !arguments || !threads) return {};
  return {(void (*)(const Launch*))dlsym(library, "emulate"), entry(), arguments(), threads()};
}

CUresult answer(int status) { return (CUresult)status; }

}  // namespace

typedef std::lock_guard<std::recursive_mutex> Busy;

extern "C" {

// --- what tests ask of it ---------------------------------------------------------------------------------------------

void reset(int count, const int* architectures) {
  devices = count;
  memcpy(archs, architectures, count * sizeof *archs);
  memset(retained, 0, sizeof retained);
  initialised = false;
  modules.clear(), functions.clear(), streams.clear(), images.clear();
  current.clear();
  refusals = 0, loaded = 0;
}
void allow_on(unsigned long begin, unsigned long end, long writable, long device) { ranges.push_back({begin, end, writable, device}); }
void allow(unsigned long begin, unsigned long end, long writable) { allow_on(begin, end, writable, -1); }
void forget() {
  ranges.clear(), past.clear();
  first_fault[0] = 0;
  wide = 0;
}
void compiled(const char* image, long length, const char* path, int arch, int ptx) {
  if (ptx && image[length - 1]) fault("PTX without a zero at its end");
  if (length_of(image) != (size_t)length) fault("an image whose length is not what it says by itself");
  images.push_back({std::string(image, length), path, arch, ptx != 0});
}
void* new_stream(int device) {
  streams.push_back(new Stream{device});
  return streams.back();
}
void refuse_loads(int status, int times) { refused_status = status, refusals = times; }
void expect_arguments(long bytes) { expected_arguments = bytes; }
const char* fault() { return first_fault; }
int launch_count() { return (int)past.size(); }
int wide_accesses() { return (int)wide; }
int blocks_of_last() { return past.empty() ? 0 : (int)past.back().blocks; }
int device_of_last() { return past.empty() ? -1 : past.back().device; }
const void* stream_of_last() { return past.empty() ? nullptr : past.back().stream; }
int contexts_pushed() { return (int)current.size(); }
int modules_loaded() { return loaded; }

// --- the driver -------------------------------------------------------------------------------------------------------

CUresult cuInit(unsigned int flags) {
  initialised = flags == 0;
  return answer(initialised ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuGetErrorString(CUresult status, const char** text) {
  *text = (int)status == CUDA_ERROR_INVALID_IMAGE       ? "device kernel image is invalid"
          : (int)status == CUDA_ERROR_NOT_FOUND         ? "named symbol not found"
          : (int)status == CUDA_ERROR_OUT_OF_MEMORY     ? "out of memory"
          : (int)status == CUDA_ERROR_NO_BINARY_FOR_GPU ? "no kernel image is available for execution on the device"
                                                        : nullptr;
  return answer(*text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialised) return answer(CUDA_ERROR_NOT_INITIALIZED);
  if (ordinal < 0 || ordinal >= devices) return answer(CUDA_ERROR_INVALID_DEVICE);
  *device = 7 + ordinal;  // a handle is no number of a device
  return answer(CUDA_SUCCESS);
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (device < 7 || device >= 7 + devices) return answer(CUDA_ERROR_INVALID_DEVICE);
  retained[device - 7] = true;
  *context = (CUcontext)&contexts[device - 7];
  return answer(CUDA_SUCCESS);
}
CUresult cuCtxPushCurrent(CUcontext context) {
  const long device = (char*)context - contexts;
  if (device < 0 || device >= devices || !retained[device]) return answer(CUDA_ERROR_INVALID_CONTEXT);
  current.push_back((int)device);
  return answer(CUDA_SUCCESS);
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (current.empty()) return answer(CUDA_ERROR_INVALID_CONTEXT);
  *context = (CUcontext)&contexts[current.back()];
  current.pop_back();
  return answer(CUDA_SUCCESS);
}
CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  Busy lock(busy);
  if (current.empty()) return answer(CUDA_ERROR_INVALID_CONTEXT);
  if (refusals > 0) return --refusals, answer(refused_status);
  std::vector<std::string> paths;
  if (const int status = emulated_by((const char*)image, current.back(), paths)) return answer(status);
  Module* module = new Module{current.back(), {}};
  for (const std::string& path : paths)
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) module->libraries.push_back(library);
  if (module->libraries.empty()) return delete module, answer(CUDA_ERROR_INVALID_IMAGE);
  modules.push_back(module);
  ++loaded;
  *out = (CUmodule)modules.back();
  return answer(CUDA_SUCCESS);
}
CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  Busy lock(busy);
  if (!known(modules, handle)) return answer(CUDA_ERROR_INVALID_HANDLE);
  const Module* module = (const Module*)handle;
  for (void* library : module->libraries) {
    const Kernel kernel = kernel_of(library);
    if (!kernel.emulate || strcmp(kernel.entry, name)) continue;
    functions.push_back(new Function{module->device, kernel});
    *out = (CUfunction)functions.back();
    return answer(CUDA_SUCCESS);
  }
  return answer(CUDA_ERROR_NOT_FOUND);
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  if (!known(functions, handle)) return answer(CUDA_ERROR_INVALID_HANDLE);
  *value = (int)attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 40 : 0;
  return answer((int)attribute == CU_FUNC_ATTRIBUTE_NUM_REGS || (int)attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? CUDA_SUCCESS
                                                                                                                    : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, size_t shared) {
  if (!known(functions, handle)) return answer(CUDA_ERROR_INVALID_HANDLE);
  *blocks = 4;
  return answer(threads == ((Function*)handle)->kernel.threads && !shared ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuLaunchKernel(CUfunction handle, unsigned int x, unsigned int y, unsigned int z, unsigned int threads, unsigned int ty,
                        unsigned int tz, unsigned int shared, CUstream stream, void** parameters, void** extra) {
  Busy lock(busy);
  if (current.empty()) return answer(CUDA_ERROR_INVALID_CONTEXT);
  if (!known(functions, handle)) return answer(CUDA_ERROR_INVALID_HANDLE);
  const Function* function = (const Function*)handle;
  if (function->device != current.back()) return answer(CUDA_ERROR_INVALID_HANDLE);
  if (stream && (!known(streams, stream) || ((Stream*)stream)->device != current.back())) return answer(CUDA_ERROR_INVALID_HANDLE);
  if (!x || x > 2147483647u || y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra) return answer(CUDA_ERROR_INVALID_VALUE);
  if (threads != (unsigned)function->kernel.threads || !parameters || !parameters[0]) return answer(CUDA_ERROR_INVALID_VALUE);
  if (expected_arguments >= 0 && expected_arguments != function->kernel.arguments) fault("arguments of another size than the kernel's");
  const std::string copied((const char*)parameters[0], function->kernel.arguments);  // as a driver does: the caller's may go away
  std::vector<Range> here;
  for (const Range& range : ranges)
    if (range.device < 0 || range.device == current.back()) here.push_back(range);
  const Launch launch = {copied.data(), x, threads, here.data(), (long)here.size(), first_fault, &wide};
  function->kernel.emulate(&launch);
  past.push_back({current.back(), stream, x});
  return answer(CUDA_SUCCESS);
}
}
