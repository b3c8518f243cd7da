"""Every honoured key has a test that fails if the key is ignored; here are those that have no better home.

``wire`` is where the engine takes a ds_config's values from; what it does with them is tested where it is done.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.exercised import EXERCISED, IGNORE, ROOT, honoured, passes_all_the_same
from zero_trial.config.reader import read_ds_config
from zero_trial.engine import watch
from zero_trial.engine.wiring import mesh_shape, wire
from zero_trial.errors import ConfigError

FP16 = {"fp16": {"enabled": True}}


def test_no_honoured_key_is_without_a_test():
    """If this fails for a key that became honoured: name its test in exercised.py, and run that file for the key."""
    assert set(honoured()) - set(EXERCISED) == set()
    assert set(EXERCISED) - set(honoured()) == set(), "these are honoured no more"


@cache
def functions_of(path: Path) -> dict[str, str]:
    """The test functions of a file with their sources, decorators included."""
    text = path.read_text("utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node) for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("key", EXERCISED)
def test_every_named_test_exists_and_its_file_speaks_of_the_key(key: str):
    file, name = EXERCISED[key].split("::")
    path = ROOT / "tests" / file
    assert name in functions_of(path)
    row_names = {key.rpartition(".")[2], *honoured_aliases(key)}
    assert any(word in path.read_text("utf-8") or word in support() for word in row_names)


@cache
def support() -> str:
    """Helpers that tests share."""
    return "".join(path.read_text("utf-8") for path in sorted((ROOT / "tests" / "support").glob("*.py")))


def honoured_aliases(key: str) -> tuple[str, ...]:
    from zero_trial.config.table import TABLE

    return TABLE[key].aliases


def wired(config: dict[str, Any]) -> Any:
    return wire(read_ds_config(config), 2)


WIRED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    # key: value, what else is in the configuration, what of the wiring becomes what
    "train_batch_size": (12, {}, lambda wiring: wiring.batch.micro_batch_size == 6),
    "train_micro_batch_size_per_gpu": (
        3,
        {"train_batch_size": None},
        lambda wiring: wiring.batch.train_batch_size == 6,
    ),
    "gradient_accumulation_steps": (4, {}, lambda wiring: wiring.batch.micro_batch_size == 1),
    "gradient_clipping": (0.25, {}, lambda wiring: wiring.clip == 0.25),
    "fp16.initial_scale_power": (3, FP16, lambda wiring: wiring.policy.loss_scale.scale == 8),
    "fp16.loss_scale_window": (7, FP16, lambda wiring: wiring.policy.loss_scale.window == 7),
    "fp16.hysteresis": (5, FP16, lambda wiring: wiring.policy.loss_scale.hysteresis == 5),
    "fp16.consecutive_hysteresis": (True, FP16, lambda wiring: wiring.policy.loss_scale.consecutive_hysteresis is True),
    "fp16.min_loss_scale": (4.0, FP16, lambda wiring: wiring.policy.loss_scale.min_scale == 4),
    "zero_optimization.reduce_bucket_size": (99, {}, lambda wiring: wiring.sharding.limits.bucket == 99),
    "zero_optimization.overlap_comm": (False, {}, lambda wiring: wiring.sharding.overlap is False),
    "zero_optimization.prefetch_bucket_size": (99, {}, lambda wiring: 99 in vars(wiring.sharding.live).values()),
    "zero_optimization.param_persistence_threshold": (99, {}, lambda wiring: wiring.sharding.limits.persistence == 99),
    "zero_optimization.model_persistence_threshold": (
        99,
        {},
        lambda wiring: wiring.sharding.limits.model_persistence == 99,
    ),
    "zero_optimization.max_live_parameters": (99, {}, lambda wiring: 99 in vars(wiring.sharding.live).values()),
    "zero_optimization.max_reuse_distance": (99, {}, lambda wiring: 99 in vars(wiring.sharding.live).values()),
    "zero_optimization.module_granularity_threshold": (
        99,
        {},
        lambda wiring: wiring.sharding.limits.smallest_unit == 99,
    ),
    "zero_optimization.leaf_module.classes": (["Block"], {}, lambda wiring: wiring.sharding.leaf.classes == ("Block",)),
    "zero_optimization.leaf_module.names": (["body"], {}, lambda wiring: wiring.sharding.leaf.names == ("body",)),
    "zero_optimization.leaf_module.name_suffixes": (["mlp"], {}, lambda wiring: "mlp" in str(wiring.sharding.leaf)),
}


def with_key(key: str, value: Any, around: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 8,
        **{name: dict(part) if isinstance(part, dict) else part for name, part in around.items()},
    }
    section = config
    *above, name = key.split(".")
    for part in above:
        section = section.setdefault(part, {})
    section[name] = value
    return config


@pytest.mark.parametrize("key", WIRED)
def test_a_key_changes_what_is_wired(key: str):
    value, around, becomes = WIRED[key]
    assert becomes(wired(with_key(key, value, around)))
    without = {"train_batch_size": 8, **around} if key != "train_micro_batch_size_per_gpu" else {"train_batch_size": 8}
    assert not becomes(wired(without))


def test_overlap_that_is_asked_for_defers_the_wait():
    overlap = [
        wired(with_key("zero_optimization.overlap_comm", value, {})).defer_publish for value in (True, False, None)
    ]
    assert overlap == [True, False, False]


@pytest.mark.parametrize(
    ("key", "value", "around", "shape"),
    [
        ("mesh.shard", 2, {"zero_optimization": {"stage": 2}}, (1, 4, 2, 1)),
        ("mesh.replica", 2, {"zero_optimization": {"stage": 2}}, (1, 2, 4, 1)),
        ("mesh.model", 2, {"zero_optimization": {"stage": 2}}, (1, 1, 4, 2)),
        ("zero_optimization.mics_shard_size", 2, {"zero_optimization": {"stage": 2}}, (1, 4, 2, 1)),
    ],
)
def test_a_key_changes_the_mesh(key: str, value: int, around: dict[str, Any], shape: tuple[int, ...]):
    found = mesh_shape(read_ds_config(with_key(key, value, around)), 8)
    assert (found.pipe, found.replica, found.shard, found.model) == shape
    plain = mesh_shape(read_ds_config(around), 8)
    assert (plain.pipe, plain.replica, plain.shard, plain.model) == (1, 1, 8, 1)


@pytest.mark.parametrize("asked", [True, False])
def test_the_device_is_waited_for(asked: bool, monkeypatch: pytest.MonkeyPatch):
    """timers.throughput.synchronized; on a CPU there is nothing to wait for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    config = read_ds_config({"timers": {"throughput": {"synchronized": asked}}})
    for kind in ("cuda", "cpu"):
        watch._synchronizer(SimpleNamespace(config=config, device=torch.device(kind)))()  # type: ignore[arg-type]
    assert waited == ([torch.device("cuda")] if asked else [])


def test_the_dtype_of_parameters_is_that_of_the_precision_mode():
    with pytest.raises(ConfigError, match=r"data_types.param_dtype: not the dtype of the precision mode"):
        read_ds_config({"data_types": {"param_dtype": "bf16"}})
    assert read_ds_config({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}}).bf16.enabled


def test_ignoring_a_key_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The machinery itself: a key that is ignored makes its test fail, and a test about something else does not mind."""
    assert not passes_all_the_same("gradient_clipping", tmp_path)
    monkeypatch.setitem(EXERCISED, "gradient_clipping", "config/test_rules.py::test_what_goes_together")
    assert passes_all_the_same("gradient_clipping", tmp_path)
    assert "IGNORED_KEY" in IGNORE
