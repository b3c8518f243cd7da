"""The most by which this process grows, without what its heap keeps: zero_trial leaves the
allocator alone, so a test of live memory trims the heap before each look."""

from __future__ import annotations

import ctypes

from benchmarks.loading import OwnPeak


class LivePeak(OwnPeak):
    """The most by which this process's memory grows inside a block, as ``what`` of
    /proc/self/status, sampled about every millisecond; freed tensors do not count."""

    def __init__(self, what: str = "RssAnon") -> None:
        super().__init__(what)
        self._trim = ctypes.CDLL(None).malloc_trim

    def now(self) -> float:
        self._trim(0)
        return super().now()
