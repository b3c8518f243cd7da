"""Tests for zero_trial/sharding/offload/drives.py: a swap file that is cut over folders."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.ops.disk_io import DiskTuning
from zero_trial.sharding.offload import swap_file
from zero_trial.sharding.offload.drives import STRIPE, StripedFile
from zero_trial.sharding.offload.swap_file import SwapFile, move_into
from zero_trial.sharding.offload.swap_space import BLOCK

WHERE = "zero_optimization.offload_param.nvme_path"


def opened(folder: Path, count: int, nbytes: int = 1 << 16) -> StripedFile:
    folders = [folder / str(number) for number in range(count)]
    for each in folders:
        each.mkdir(exist_ok=True)
    return StripedFile(folders, nbytes, tuning=DiskTuning(), where=WHERE)


def numbers(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [2, 3])
def test_what_is_written_is_read_and_mapped(tmp_path: Path, count: int) -> None:
    """Whole and in parts that begin and end anywhere; what is reserved later, too."""
    file = opened(tmp_path, count)
    sizes = (2 * STRIPE + 5 * BLOCK, 7, STRIPE, 3 * STRIPE)
    offsets = [file.reserve(size) for size in sizes]
    assert offsets == [0, 2 * STRIPE + 5 * BLOCK, 2 * STRIPE + 6 * BLOCK, 3 * STRIPE + 6 * BLOCK]
    whole = numbers(file.files[0].size)[:0].new_zeros(offsets[-1] + sizes[-1])
    for offset, size in zip(offsets, sizes, strict=True):
        buffer = file.buffer(size)
        buffer.copy_(numbers(size))
        whole[offset : offset + size] = buffer
        file.write(offset, buffer).wait()
    for low, high in ((0, len(whole)), (STRIPE - 100, 2 * STRIPE + 77), (3 * STRIPE, 3 * STRIPE + 1)):
        found = file.buffer(high - low)
        transfer = file.read(low, found)
        transfer.wait()
        assert transfer.done() and torch.equal(found, whole[low:high]), (low, high)
    with file.mapped() as area:
        assert torch.equal(area[: len(whole)], whole)
        area[STRIPE - 50 : STRIPE + 50] = 9
    whole[STRIPE - 50 : STRIPE + 50] = 9
    found = file.buffer(len(whole))
    file.read(0, found).wait()
    assert torch.equal(found, whole)
    assert file.bytes_written == sum(sizes)
    written = [each.bytes_written for each in file.files]
    assert max(written) - min(written) <= STRIPE, "the drives have equal parts"
    file.close()
    with pytest.raises(StorageError, match="offloaded state is gone"):
        file.read(0, found)


def test_a_large_reservation_has_few_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel limits how many mappings a process has."""
    monkeypatch.setattr(SwapFile, "_allocate", lambda self, nbytes: None)
    file = StripedFile([tmp_path, tmp_path], 0, tuning=DiskTuning(), where=WHERE)
    file.reserve(1 << 40)
    assert 60 <= len(file._stripes) <= 70


def test_many_reservations_have_few_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as a model has; three such files stay below what the kernel allows."""
    monkeypatch.setattr(SwapFile, "_allocate", lambda self, nbytes: None)
    file = StripedFile([tmp_path, tmp_path], 1 << 40, tuning=DiskTuning(), where=WHERE)
    for _ in range(1 << 12):
        file.reserve(1 << 28)
    assert 3 * len(file._stripes) < 65530 and len(file._stripes) > 1 << 12
    sizes = [each.reserved for each in file.files]
    assert max(sizes) - min(sizes) <= file._step


def test_a_mapping_too_many_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def mmap(self, *args: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(swap_file, "_libc", Full)
    with pytest.raises(StorageError, match=r"vm\.max_map_count"):
        SwapFile(tmp_path, BLOCK).map_range(0, BLOCK)


def test_faults_name_the_drive(tmp_path: Path) -> None:
    file = opened(tmp_path, 2)
    file.reserve(2 * STRIPE)
    buffer, broken = file.buffer(2 * STRIPE), file.files[1]
    file.write(0, buffer).wait()
    for descriptor in (broken._direct, broken._cached):
        if descriptor is not None:
            os.dup2(os.open("/proc/self/cmdline", os.O_RDONLY), descriptor)
    for _ in range(2):
        with pytest.raises(StorageError) as fault:
            file.write(0, buffer).wait()
        assert fault.value.where == str(tmp_path / "1") and f"[Errno {errno.EBADF}]" in str(fault.value)
    with pytest.raises(StorageError) as unmapped, file.mapped():
        pass
    assert unmapped.value.where == str(tmp_path / "1")


def refused(folders: Sequence[Path], nbytes: int) -> ConfigError | DoesNotFit:
    with pytest.raises((ConfigError, DoesNotFit)) as fault:
        StripedFile(folders, nbytes, tuning=DiskTuning(), where=WHERE)
    return fault.value


def test_drives_that_cannot_be_used(tmp_path: Path) -> None:
    missing = refused([tmp_path, tmp_path / "none"], BLOCK)
    assert missing.where == f"{WHERE}[1]" and missing.got == str(tmp_path / "none")
    full = refused([tmp_path, Path("/dev/shm")], 1 << 50)
    assert full.where in (str(tmp_path), "/dev/shm")


def test_values_that_are_moved_into_files_are_the_same(tmp_path: Path) -> None:
    """Also after the files are closed, and where they are written later; small tensors stay."""
    for file in (opened(tmp_path, 2, 32 << 20), SwapFile(tmp_path, 32 << 20)):
        move = move_into(file)
        values = [torch.randn(1 << 20).view(1024, -1), torch.randn(5), torch.randn(3 << 20).bfloat16()]
        moved = [move(value) for value in values]
        file.close()
        assert all(map(torch.equal, moved, values)) and moved[1] is values[1]
        moved[0][5:7] = 3.0
        values[0][5:7] = 3.0
        assert torch.equal(moved[0], values[0])
