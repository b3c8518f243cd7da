"""Engines whose parameters and gradients lie where peers read them: the same bits as through gloo,
no leak."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import TinyLM, make_engine, tokens, train_engine
from tests.support.pool import Pools
from zero_trial.comm.mesh import _HOSTS

STEPS = 4
# Each keeps other things in such buffers.
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1, torch's Adam scales gradients in place": {
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    },
    "stage 2, small buckets": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 3000}},
    "stage 2, bf16, accumulated": {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 9000},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
    },
    "stage 3": {"zero_optimization": {"stage": 3, "param_persistence_threshold": 100}},
    "hybrid": {"zero_optimization": {"stage": 2, "mics_shard_size": 2}},
}


def losses(config: dict[str, Any], transport: str) -> tuple[list[float], int]:
    """The loss trace, and the bytes that peers could read in place meanwhile."""
    engine = make_engine(TinyLM, {"comm_transport": transport, **config})
    found = train_engine(engine, range(STEPS))
    held = homes_bytes()
    engine.destroy()
    return found, held


def homes_bytes() -> int:
    """Bytes of this rank's arena that tensors have."""
    host = _HOSTS.get(dist.group.WORLD)
    return 0 if host is None or host.arena is None else host.arena.in_use


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_same_bits_as_through_gloo(ranks: Pools, name: str) -> None:
    size = 4 if name == "hybrid" else 2
    shared, direct = (ranks(size).run(losses, CONFIGS[name], transport) for transport in ("auto", "gloo"))
    assert [trace for trace, _ in shared] == [trace for trace, _ in direct]
    assert all(held > 0 for _, held in shared)


def engines_come_and_go(stage: int, count: int) -> list[tuple[int, int, int]]:
    """After each engine: bytes of this rank's arena that tensors have, bytes of its pages, and
    descriptors of this process."""
    found = []
    for _ in range(count):
        engine = make_engine(
            TinyLM,
            {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0, "reduce_bucket_size": 9000}},
        )
        train_engine(engine, range(2))
        engine.destroy()
        del engine
        gc.collect()
        arena = _HOSTS[dist.group.WORLD].arena
        assert arena is not None
        arena.trim()
        pages = os.fstat(arena.descriptor).st_blocks * 512
        found.append((arena.in_use, pages, len(os.listdir("/proc/self/fd"))))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_twenty_engines_leave_no_more_than_one(ranks: Pools, stage: int) -> None:
    for rows in ranks(2).run(engines_come_and_go, stage, 20):
        assert len(set(rows[2:])) == 1, rows


def forgotten(stage: int, ending: str) -> tuple[bool, bool, int]:
    """An engine that was not destroyed: whether it and its parameters are gone, and bytes of living
    tensors that peers can read."""
    gc.collect()
    before = homes_bytes()
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0}})
    train_engine(engine, range(2))
    if ending == "in mid-step":
        engine.backward(engine(tokens(2, 4)))
    if ending == "an output is kept by the model":
        engine.module.kept = engine(tokens(2, 4))
    watch, parameter = weakref.ref(engine), weakref.ref(engine.module.embed.weight)
    del engine
    gc.collect()
    return watch() is None, parameter() is None, homes_bytes() - before


@pytest.mark.parametrize("ending", ["after a step", "in mid-step", "an output is kept by the model"])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_was_not_destroyed_goes_too(ranks: Pools, stage: int, ending: str) -> None:
    assert ranks(2).run(forgotten, stage, ending) == [(True, True, 0)] * 2


def workers(stage: int) -> list[int]:
    """Rows from forked workers of a DataLoader, between steps."""
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": stage}})
    train_engine(engine, range(1))
    data = TensorDataset(torch.arange(16))
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a pool's rank may have no children otherwise
    rows = [int(value) for (batch,) in loader for value in batch]
    train_engine(engine, range(1, 3))
    return rows


@pytest.mark.parametrize("stage", [0, 2])
def test_workers_are_forked_from_a_rank(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(workers, stage) == [list(range(16))] * 2
