"""Resident memory of ranks that build and load a model in shards, beside the formula."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zero_trial
from benchmarks.loading import OwnPeak, Stack, acts, start, status, width_of, write_file
from tests.support.pool import Pools
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory
from zero_trial.comm.shm.transport import SharedTransport
from zero_trial.sharding.heap import FreedBytes, give_freed_memory_back, mapped_data
from zero_trial.sharding.init import read_first_values

MEGABYTES = 48.0
GROUP = MEGABYTES / 16
SHARD = MEGABYTES / 2  # of parameters, and as much of gradients
# On top: shared memory through which a parameter is gathered, one that is whole while it is cut
# (half a group each), what may wait until it is given back (FreedBytes), and the heap's own.
SLACK = 2 * GROUP / 2 + 16.8 + 4


def grown(case: str, folder: Path) -> float:
    """Megabytes by which a rank grows at most."""
    start(case)
    gc.collect()
    give_freed_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for act in acts(case, width_of(MEGABYTES), folder):
        engine = act()
    peak = status("VmHWM") - before
    engine.destroy()
    return peak


@pytest.mark.parametrize("case", ["weights-3", "init-3", "meta-3"])
def test_a_rank_grows_by_its_shards_and_a_group(case: str, ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    limit = 2 * SHARD + GROUP + SLACK
    if case == "weights-3":  # gradients have no memory yet, and what is read goes to its place
        limit = 1.15 * (SHARD + GROUP) + 4  # of the heap
    for peak in ranks(2).run(grown, case, tmp_path):
        assert peak <= limit


def file_pages_after(folder: Path) -> tuple[float, bool]:
    """Megabytes of file pages by which a rank grows while a model that is cut gets the values of a
    file that rank 0 maps, as from_pretrained does it; whether it has them."""
    with zero_trial.zero.Init():
        model = Stack(width_of(MEGABYTES))
    give_freed_memory_back()
    before = status("RssFile")
    values = load_file(folder / "model.safetensors")
    for part, module in model.named_modules():
        with zero_trial.zero.GatheredParameters(module.parameters(recurse=False), modifier_rank=0), torch.no_grad():
            for name, param in module.named_parameters(part, recurse=False) if dist.get_rank() == 0 else ():
                param.copy_(values[name])
    grown = status("RssFile") - before
    named = model.named_parameters()
    return grown, all(torch.equal(read_first_values(param), values[name]) for name, param in named)


def test_a_file_that_rank_0_maps_does_not_stay_in_memory(ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    first, second = ranks(2).run(file_pages_after, tmp_path)
    assert first[1] and second[1]
    assert first[0] <= 16.8 + 4, "what waits for the next call, and libraries"
    assert second[0] <= 4


def test_only_large_mappings_of_data_are_paged_out() -> None:
    lines = [
        "10000000-10200000 rw-p 00000000 08:01 11                                 /models/a model.safetensors",
        "20000000-20200000 r--s 00001000 08:01 12                                 /models/b",
        "30000000-30200000 rw-s 00000000 08:01 13                                 /nvme/swap",
        "40000000-40200000 r--p 00000000 08:01 14                                 /lib/libtorch.so",
        "40200000-40400000 r-xp 00200000 08:01 14                                 /lib/libtorch.so",
        "50000000-50001000 r--p 00000000 08:01 15                                 /models/small",
        "60000000-60200000 rw-p 00000000 00:00 0",
        "70000000-70200000 rw-p 00000000 00:00 0                                  [heap]",
    ]
    assert list(mapped_data(lines)) == [(0x10000000, 0x10200000), (0x20000000, 0x20200000)]


def pages_of_messages() -> int:
    """Bytes of this rank's messages that are in memory after initialize(), where rank 1 reads none
    of the first values before rank 0 has freed what it could."""
    key, store = "first values were freed", dist.distributed_c10d._get_default_store()
    free, acknowledge = FreedBytes.give_back, SharedMemory.acknowledge

    def told(self: FreedBytes) -> None:
        free(self)
        store.set(key, "1")

    def late(self: SharedMemory, handle: SegmentHandle, reader: int) -> None:
        store.wait([key])
        acknowledge(self, handle, reader)

    held_up = (FreedBytes, "give_back", told) if dist.get_rank() == 0 else (SharedMemory, "acknowledge", late)
    with mock.patch.object(*held_up):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        engine = zero_trial.initialize(model=nn.Linear(1000, 600, bias=False), config=config)[0]
    transport = engine.mesh.data._host_transport
    assert isinstance(transport, SharedTransport)
    found = sum(os.fstat(segment.descriptor).st_blocks * 512 for segment in transport._memory.segments)
    engine.destroy()
    if dist.get_rank() == 0:
        store.delete_key(key)
    return found


def test_messages_with_first_values_do_not_stay(ranks: Pools) -> None:
    assert max(ranks(2).run(pages_of_messages)) < 1 << 20, "of 2.4 MB"


def growth_of_saving(folder: Path, stage: int) -> tuple[float, float]:
    """Megabytes by which a rank's own memory grows while it writes the weights, and while rank 0
    gets them."""
    for act in acts(f"weights-{stage}", width_of(MEGABYTES), folder):
        engine = act()
    found = []
    for save in (lambda: engine.save_16bit_model(folder / "saved"), engine._zero3_consolidated_16bit_state_dict):
        with OwnPeak() as peak:
            kept = save()
        found.append(peak.megabytes)
        del kept
    engine.destroy()
    return found[0], found[1]


def test_weights_are_written_group_by_group(ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    first, second = ranks(2).run(growth_of_saving, tmp_path, 3)
    # a group, what may wait until it is given back, and the heap's own
    assert max(first[0], second[0], second[1]) <= GROUP + 16.8 + 4
    assert first[1] <= MEGABYTES + GROUP + 16.8 + 4
    written, expected = (load_file(tmp_path / place) for place in ("saved/model.safetensors", "model.safetensors"))
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
