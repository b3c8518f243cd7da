// One kernel as a library: ZT_SOURCE is its file, ZT_ENTRY its name.
#include "cuda_on_cpu.h"

#include ZT_SOURCE

static void call() { ZT_ENTRY(arguments_of(ZT_ENTRY)); }

extern "C" void emulate(const Launch* launch) { run_grid(launch, ZT_ENTRY, call); }
