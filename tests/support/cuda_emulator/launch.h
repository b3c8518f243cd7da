// What the emulated driver and a kernel's library say to each other.
#pragma once

struct Range {
  unsigned long begin, end;
  long writable;
  long device;  // -1: any
};

struct Launch {
  const void* arguments;
  unsigned blocks, threads;
  const Range* ranges;
  long count;
  char* fault;  // 256 characters; the first fault is written here
  long* wide;   // counts accesses of more than 4 bytes
};
