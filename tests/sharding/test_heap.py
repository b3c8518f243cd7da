"""Freed buffers stay with the process: reviving one does not fault its pages in again."""

from __future__ import annotations

import multiprocessing
import resource
import sys

import pytest
import torch
from torch import nn

from tests.sharding.parts import mesh_for
from zero_trial.precision import dtype_policy
from zero_trial.sharding.grouping import ShardingSettings
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.param_group import give_freed_memory_back, keep_freed_memory
from zero_trial.sharding.plan import plan_for_stage

PAGES = (8 << 20) // resource.getpagesize()


def faults_of_reviving(keep: bool) -> int:
    """Minor page faults of freeing and reviving an 8 MiB storage forty times."""
    if keep:
        keep_freed_memory()
    buffer = torch.zeros(2 << 20)
    storage = buffer.untyped_storage()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        storage.resize_(0)
        storage.resize_(8 << 20)
        buffer.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is what is tuned")
def test_reviving_a_buffer_costs_no_page_faults() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        kept = pool.apply(faults_of_reviving, (True,))
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    # the first few may fault, until the block has found its place in the heap; if all did it would be 40 * PAGES
    assert kept < 20 * PAGES


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def resident_before_and_after() -> tuple[int, int]:
    """64 MiB in freed blocks between which something small lives on."""
    keep_freed_memory()
    blocks = [torch.ones(1 << 20) for _ in range(32)]
    del blocks[::2]
    before = resident()
    give_freed_memory_back()
    return before, resident()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is what is tuned")
def test_pages_between_living_blocks_go_back() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, after = pool.apply(resident_before_and_after)
    assert before - after > 48 << 20


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_allocator_is_set_only_where_host_memory_is_freed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process; on a GPU torch's own allocator keeps what a group frees."""
    calls: list[str] = []
    monkeypatch.setattr("zero_trial.sharding.model.keep_freed_memory", lambda: calls.append(device))
    model = nn.Linear(300, 300, device=device)
    ShardedModel(
        model, [list(model.parameters())], plan_for_stage(3), mesh_for(3), dtype_policy("fp32"), ShardingSettings()
    )
    assert calls == ["cpu"] * (device == "cpu")
