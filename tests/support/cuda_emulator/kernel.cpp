// One kernel as a library: ZT_SOURCE is its file, ZT_ENTRY its name.
#include "cuda_on_cpu.h"

#include ZT_SOURCE

#define ZT_TEXT(x) #x
#define ZT_NAME(x) ZT_TEXT(x)

template <class Arguments>
static long size_of(void (*)(Arguments)) {
  return sizeof(Arguments);
}

static void call() { ZT_ENTRY(arguments_of(ZT_ENTRY)); }

extern "C" void emulate(const Launch* launch) { run_grid(launch, ZT_ENTRY, call); }
extern "C" const char* entry() { return ZT_NAME(ZT_ENTRY); }
extern "C" long arguments_size() { return size_of(ZT_ENTRY); }
extern "C" long threads() { return kThreads; }
