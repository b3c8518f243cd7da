"""What must hold between keys."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.key_rules import cross_faults
from zero_trial.ds_config.overlay import overlay
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.document import Document, Location

Z, P = "zero_optimization", "pipeline"
GOOD: list[dict[str, Any]] = [
    {},
    {"fp16.enabled": True, "bf16.enabled": False},
    {"data_types.param_dtype": "bf16", "bf16.enabled": True},
    {f"{Z}.mics_shard_size": 2, "mesh.shard": 2},
    {f"{Z}.reshard_after": "step", f"{Z}.stage": 3},
    {f"{Z}.offload_optimizer.device": "nvme", f"{Z}.offload_optimizer.nvme_path": "x"},
    {f"{P}.schedule": "interleaved", f"{P}.chunks_per_rank": 4},
    {f"{P}.schedule": "zb_v", f"{P}.chunks_per_rank": 2},
    {f"{P}.zero_policy": "free", f"{Z}.stage": 3, f"{Z}.reduce_every": "boundary"},
    {f"{P}.zero_policy": "hold", f"{Z}.stage": 3, f"{Z}.reshard_after": "step", f"{Z}.reduce_every": "micro"},
]
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"fp16.enabled": True, "bf16.enabled": True},
        "fp16.enabled: fp16 and bf16 are both enabled. Keep bf16: set fp16.enabled to false.",
    ),
    (
        {"torch_autocast.enabled": True, "bf16.enabled": True},
        "torch_autocast.enabled: torch_autocast and bf16 are both enabled.",
    ),
    (
        {"data_types.param_dtype": "bf16"},
        'data_types.param_dtype: not the dtype of the precision mode: got "bf16", expected "fp32". Remove it, or set',
    ),
    (
        {f"{Z}.mics_shard_size": 2, "mesh.shard": 4},
        f"{Z}.mics_shard_size: differs from mesh.shard: got 2, expected 4. Keep mesh.shard.",
    ),
    ({f"{Z}.mics_shard_size": 0}, f"{Z}.mics_shard_size: not a size: got 0"),
    (
        {"bf16.bf16_optimizer_states": True, "data_types.optimizer_states": "fp32"},
        "bf16.bf16_optimizer_states: contradicts data_types.optimizer_states: got true, expected",
    ),
    (
        {"data_types.optimizer_states": "8bit"},
        "data_types.optimizer_states: zero_trial's own optimizers store no 8-bit states: got",
    ),
    ({f"{Z}.offload_optimizer.device": "nvme"}, f"{Z}.offload_optimizer.device: nvme needs a folder."),
    (
        {f"{Z}.reshard_after": "step", f"{Z}.stage": 2},
        f'{Z}.reshard_after: parameters are never freed at ZeRO stage 2: got "step".',
    ),
    (
        {f"{P}.chunks_per_rank": 2},
        f"{P}.chunks_per_rank: the schedule 1f1b has a fixed number of chunks per rank: got 2, expected 1. Remove it, "
        f"or set {P}.schedule to interleaved or looped_bfs.",
    ),
    (
        {f"{P}.schedule": "zb_v", f"{P}.chunks_per_rank": 1},
        f"{P}.chunks_per_rank: the schedule zb_v has a fixed number of chunks per rank: got 1, expected 2.",
    ),
    (
        {f"{P}.zero_policy": "free", f"{Z}.stage": 2},
        f'{P}.zero_policy: parameters are never freed at ZeRO stage 2: got "free".',
    ),
    ({f"{P}.zero_policy": "micro", f"{Z}.stage": 1}, f"{P}.zero_policy: full gradients live at ZeRO stage 1"),
    (
        {f"{P}.zero_policy": "micro", f"{Z}.stage": 2, f"{Z}.reduce_every": "boundary"},
        f'{P}.zero_policy: contradicts {Z}.reduce_every: got "micro", expected "boundary".',
    ),
    (
        {f"{P}.zero_policy": "hold", f"{Z}.stage": 3, f"{Z}.reshard_after": "forward"},
        f'{P}.zero_policy: contradicts {Z}.reshard_after: got "hold", expected "free".',
    ),
]


@pytest.mark.parametrize("values", GOOD)
def test_what_goes_together(values: dict[str, Any]):
    assert cross_faults(values, Document({})) == []


@pytest.mark.parametrize(("values", "message"), BAD)
def test_what_does_not(values: dict[str, Any], message: str):
    (fault,) = cross_faults(values, Document({}))
    assert str(fault).startswith(message)


@pytest.mark.parametrize(
    ("still_auto", "given"),
    [
        ("bf16.enabled", {"data_types": {"param_dtype": "bf16"}}),
        ("zero_optimization.stage", {"zero_optimization": {"reshard_after": "forward"}}),
        ("zero_optimization.stage", {"pipeline": {"zero_policy": "micro"}}),
        ("pipeline.schedule", {"pipeline": {"chunks_per_rank": 2}}),
    ],
)
def test_an_auto_that_is_still_to_be_filled_contradicts_nothing(still_auto: str, given: dict[str, Any]):
    section, key = still_auto.split(".")
    open_auto = {"train_batch_size": 4, **given, section: {**given.get(section, {}), key: "auto"}}
    assert read_ds_config(open_auto, allow_open=True).raw[section][key] == "auto"
    with pytest.raises(ConfigError):
        read_ds_config({"train_batch_size": 4, **given})


def rated(scheduler: str, optimizer: Any = 0.022, **params: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {} if optimizer is None else {"lr": optimizer}},
        "scheduler": {"type": scheduler, "params": params},
    }


@pytest.mark.parametrize(
    ("config", "peak"),
    [
        (rated("WarmupLR", warmup_max_lr=0.001), "warmup_max_lr, which is 0.001"),
        (rated("WarmupDecayLR", total_num_steps=10), "warmup_max_lr, which is 0.001"),
        (rated("WarmupDecayLR", total_num_steps=10, warmup_max_lr=None), "warmup_max_lr, which is 0.001"),
        (rated("WarmupLR", warmup_max_lr=[0.001, 0.003]), "warmup_max_lr, which is [0.001, 0.003]"),
        (rated("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.01), "cycle_max_lr, which is 0.01"),
    ],
)
def test_a_learning_rate_that_the_scheduler_replaces_is_said(config: dict[str, Any], peak: str):
    (warning,) = read_ds_config(config).warnings
    assert "optimizer.params.lr" in warning and "got 0.022" in warning and peak in warning


@pytest.mark.parametrize(
    "config",
    [
        rated("WarmupLR"),
        rated("WarmupLR", warmup_max_lr="auto"),
        rated("WarmupLR", warmup_max_lr=[0.022, 0.022]),
        rated("WarmupLR", warmup_max_lr=[0.022, 0.03]),
        rated("WarmupDecayLR", total_num_steps=10, warmup_max_lr=0.022),
        rated("WarmupDecayLR", None, total_num_steps=10),
        rated("WarmupCosineLR", total_num_steps=10),
        rated("StepLR", step_size=3),
    ],
)
def test_a_learning_rate_that_is_used_is_not_said(config: dict[str, Any]):
    assert not read_ds_config(config).warnings


@pytest.mark.parametrize(
    ("params", "unused"),
    [
        ({"total_num_steps": 10}, ["muon_lr", "adam_lr"]),
        ({"total_num_steps": 10, "warmup_max_lr": 0.02}, ["adam_lr"]),
        ({"total_num_steps": 10, "warmup_max_lr": [0.02, 0.0003]}, []),
    ],
)
def test_both_rates_of_muon_are_looked_at(params: dict[str, Any], unused: list[str]):
    config = rated("WarmupDecayLR", **params)
    config["optimizer"] = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.0003}}
    warnings = read_ds_config(config).warnings
    assert [f"optimizer.params.{name}" in line for name, line in zip(unused, warnings, strict=True)] == [True] * len(
        unused
    )
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    assert not read_ds_config(config).warnings


@pytest.mark.parametrize("given", [None, "auto"])
def test_a_trial_of_a_sweep_over_a_rate_that_is_not_used_is_not_trained(given: Any):
    """All of its trials would train at the scheduler's rate, and one of them would win."""
    config, point = rated("WarmupDecayLR", given, total_num_steps=10), {"lr": 0.022}
    with pytest.raises(InvalidHP, match=r"the scheduler WarmupDecayLR sets it: got 0.022"):
        read_ds_config(config, hyperparameters=point, search=True)
    config["scheduler"]["params"]["warmup_max_lr"] = "auto"
    both = read_ds_config(config, hyperparameters=point, search=True)
    assert both.optimizer.params["lr"] == both.scheduler.params["warmup_max_lr"] == 0.022


def test_an_overlaid_rate_that_is_not_used_is_refused():
    base = Document.of(rated("WarmupLR", warmup_max_lr=0.001))
    over = Document.of({"optimizer": {"params": {"lr": 0.03}}}, Location(prefix="hyperparameters.ds_config"))
    with pytest.raises(ConfigError, match=r"hyperparameters.ds_config.optimizer.params.lr"):
        read_ds_config(overlay(base, over), hyperparameters={})
