"""Keys of a ds_config whose only effect is a setting that the engine takes: each changes it."""

from __future__ import annotations

import copy
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero_trial
from tests.support.pool import Pools
from zero_trial.comm import build_mesh
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine import observe
from zero_trial.engine.observe import Monitor, build_writers
from zero_trial.engine.resolved_config import mesh_shape, resolve_config

FP16 = {"fp16": {"enabled": True}}


# key, value, what else is given, an attribute of the resolved configuration, its value
WIRED: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    ("train_batch_size", 12, {}, "batch.micro_batch_size", 6),
    ("train_micro_batch_size_per_gpu", 3, {"train_batch_size": None}, "batch.train_batch_size", 6),
    ("gradient_accumulation_steps", 4, {}, "batch.micro_batch_size", 1),
    ("gradient_clipping", 0.25, {}, "clip", 0.25),
    ("fp16.initial_scale_power", 3, FP16, "policy.loss_scale.scale", 8),
    ("fp16.loss_scale_window", 7, FP16, "policy.loss_scale.window", 7),
    ("fp16.hysteresis", 5, FP16, "policy.loss_scale.hysteresis", 5),
    ("fp16.consecutive_hysteresis", True, FP16, "policy.loss_scale.consecutive_hysteresis", True),
    ("fp16.min_loss_scale", 4.0, FP16, "policy.loss_scale.min_scale", 4),
    ("zero_optimization.reduce_bucket_size", 99, {}, "sharding.limits.bucket", 99),
    ("zero_optimization.overlap_comm", False, {}, "sharding.overlap", False),
    ("zero_optimization.param_persistence_threshold", 99, {}, "sharding.limits.persistence", 99),
    ("zero_optimization.model_persistence_threshold", 99, {}, "sharding.limits.model_persistence", 99),
    ("zero_optimization.module_granularity_threshold", 99, {}, "sharding.limits.smallest_group", 99),
    ("zero_optimization.leaf_module.classes", ["Block"], {}, "sharding.leaf.classes", ("Block",)),
    ("zero_optimization.leaf_module.names", ["body"], {}, "sharding.leaf.names", ("body",)),
]
LIVE = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")


def with_key(key: str, value: Any, around: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy({"train_batch_size": 8, **around})
    section = config
    *above, name = key.split(".")
    for part in above:
        section = section.setdefault(part, {})
    section[name] = value
    return config


@pytest.mark.parametrize(("key", "value", "around", "attribute", "becomes"), WIRED, ids=lambda each: str(each)[:40])
def test_a_key_changes_what_is_wired(key: str, value: Any, around: dict[str, Any], attribute: str, becomes: Any):
    found = attrgetter(attribute)
    assert found(resolve_config(read_ds_config(with_key(key, value, around)), 2)) == becomes
    assert found(resolve_config(read_ds_config({**around, "train_batch_size": 8}), 2)) != becomes


@pytest.mark.parametrize("key", LIVE)
def test_a_limit_of_what_is_gathered(key: str):
    plain = {"train_batch_size": 8}
    limited = resolve_config(read_ds_config(with_key(f"zero_optimization.{key}", 99, plain)), 2).sharding.live
    assert 99 in vars(limited).values()
    assert 99 not in vars(resolve_config(read_ds_config(plain), 2).sharding.live).values()


def test_keys_that_change_the_mesh():
    stage = {"zero_optimization": {"stage": 2}}
    for key, expected in (
        ("", (1, 1, 8, 1)),
        ("mesh.shard", (1, 4, 2, 1)),
        ("mesh.replica", (1, 2, 4, 1)),
        ("mesh.model", (1, 1, 4, 2)),
        ("mesh.pipe", (2, 1, 4, 1)),
        ("pipeline.stages", (2, 1, 4, 1)),
        ("zero_optimization.mics_shard_size", (1, 4, 2, 1)),
    ):
        found = mesh_shape(read_ds_config(with_key(key, 2, stage) if key else stage), 8)
        assert (found.pipe, found.replica, found.shard, found.model) == expected, key


@pytest.mark.parametrize("asked", [True, False])
def test_the_device_is_waited_for(asked: bool, monkeypatch: pytest.MonkeyPatch):
    """timers.throughput.synchronized; on a CPU there is nothing to wait for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    config = read_ds_config({"steps_per_print": 1, "timers": {"throughput": {"synchronized": asked}}})
    monkeypatch.setattr(observe, "progress_line", lambda *_: "")
    for kind in ("cuda", "cpu"):
        engine = SimpleNamespace(
            global_samples=4, global_steps=1, train_batch_size=lambda: 4, get_mfu=lambda rate: None
        )
        observe.PeriodicLines(config, torch.device(kind), None).after_step(engine)  # type: ignore[arg-type]
    assert waited == ([torch.device("cuda")] if asked else [])


def test_the_mesh_waits_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch):
    """comm_timeout_seconds; what happens when it is over is tested with ranks that do not come."""
    timeouts: list[float] = []

    def build(shape: Any, timeout: float, **rest: Any) -> Any:
        timeouts.append(timeout)
        return build_mesh(shape, timeout=timeout, **rest)

    monkeypatch.setattr(import_module("zero_trial.engine.start"), "build_mesh", build)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    zero_trial.initialize(model=torch.nn.Linear(1, 1), config={**config, "comm_timeout_seconds": 17})
    zero_trial.initialize(model=torch.nn.Linear(1, 1), config=config)
    assert timeouts == [17.0, 300.0]


def transports_of(transport: str) -> str:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "comm_transport": transport}
    engine, *_ = zero_trial.initialize(model=torch.nn.Linear(1, 1), config=config)
    return engine.mesh.data.transport_name


def test_ranks_share_memory_by_default(ranks: Pools):
    """comm_transport."""
    assert ranks(2).run(transports_of, "auto") == ["shared memory"] * 2
    assert ranks(2).run(transports_of, "gloo") == ["gloo"] * 2


def test_tensorboard_files_lie_in_the_folder_of_the_job(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    Monitor(build_writers(read_ds_config({"tensorboard": section}), 0)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
