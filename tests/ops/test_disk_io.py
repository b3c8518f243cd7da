"""Tests for zero_trial/ops/disk_io.py; the engines themselves are tested with the swap file that
uses them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from zero_trial.errors import KernelUnavailable
from zero_trial.ops import disk_io
from zero_trial.ops.disk_io import ENGINES, DiskPart, DiskTuning, ThreadEngine, first_that_works, open_engine, report


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_reads_and_writes_at_offsets(tmp_path: Path, name: str) -> None:
    try:
        engine = open_engine(name, DiskTuning(block=1000, depth=2))
    except (OSError, KernelUnavailable) as fault:
        pytest.skip(f"{name}: {fault}")
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    memory = ctypes.create_string_buffer(bytes(range(256)) * 20, 5120)
    for request in engine.start([DiskPart(descriptor, 0, 5120, 100)], ctypes.addressof(memory), True, memory):
        assert request.exception() is None and request.done()
    assert os.pread(descriptor, 6000, 100) == memory.raw
    into = ctypes.create_string_buffer(5120)
    parts = [
        DiskPart(descriptor, 0, 10, 110),
        DiskPart(descriptor, 10, 3000, 200),
        DiskPart(descriptor, 4000, 5120, 5000),
    ]
    (*_, last) = engine.start(parts, ctypes.addressof(into), False, into)
    assert "of 1000 bytes at offset" in str(last.exception()) or "of 120 bytes at offset" in str(last.exception())
    engine.close()
    assert into.raw[:3000] == memory.raw[10:20] + memory.raw[100:3090]


def test_the_first_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, tuning: DiskTuning) -> ThreadEngine:
        if name == "io_uring":
            raise PermissionError(1, "Operation not permitted")
        engine = ThreadEngine(tuning)
        engine.name = name
        return engine

    monkeypatch.setattr(disk_io, "open_engine", opened)
    fault = OSError(22, "Invalid argument")
    engine, refused = first_that_works(ENGINES, DiskTuning(), lambda each: fault if each.name == "libaio" else None)
    assert engine.name == "threads"
    assert refused == {"io_uring": "Operation not permitted", "libaio": "Invalid argument"}
    with pytest.raises(OSError, match="Invalid argument"):
        first_that_works(ENGINES[:2], DiskTuning(), lambda each: fault)


def test_one_works_here() -> None:
    name, refused = report()
    assert name in ENGINES and list(refused) == list(ENGINES[: ENGINES.index(name)])
