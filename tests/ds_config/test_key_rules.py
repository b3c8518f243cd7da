"""What must hold between keys, and what fills "auto"."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.key_rules import contradictions, cross_faults, resolve_auto
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
    ({"fp16.enabled": True, "bf16.enabled": True}, "fp16.enabled: fp16 and bf16 are both enabled. Keep bf16: set fp16.enabled to false."),
    ({"torch_autocast.enabled": True, "bf16.enabled": True}, "torch_autocast.enabled: torch_autocast and bf16 are both enabled."),
    (
        {"data_types.param_dtype": "bf16"},
        'data_types.param_dtype: not the dtype of the precision mode: got "bf16", expected "fp32". Remove it, or set',
    ),
    ({f"{Z}.mics_shard_size": 2, "mesh.shard": 4}, f"{Z}.mics_shard_size: differs from mesh.shard: got 2, expected 4. Keep mesh.shard."),
    ({f"{Z}.mics_shard_size": 0}, f"{Z}.mics_shard_size: not a size: got 0"),
    (
        {"bf16.bf16_optimizer_states": True, "data_types.optimizer_states": "fp32"},
        "bf16.bf16_optimizer_states: contradicts data_types.optimizer_states: got true, expected",
    ),
    ({"data_types.optimizer_states": "8bit"}, "data_types.optimizer_states: zero_trial's own optimizers do not support 8-bit states: got"),
    ({f"{Z}.offload_optimizer.device": "nvme"}, f"{Z}.offload_optimizer.device: nvme needs a folder."),
    ({f"{Z}.reshard_after": "step", f"{Z}.stage": 2}, f'{Z}.reshard_after: parameters are never freed at ZeRO stage 2: got "step".'),
    (
        {f"{P}.chunks_per_rank": 2},
        f"{P}.chunks_per_rank: the schedule 1f1b has a fixed number of chunks per rank: got 2, expected 1. Remove it, "
        f"or set {P}.schedule to interleaved or looped_bfs.",
    ),
    (
        {f"{P}.schedule": "zb_v", f"{P}.chunks_per_rank": 1},
        f"{P}.chunks_per_rank: the schedule zb_v has a fixed number of chunks per rank: got 1, expected 2.",
    ),
    ({f"{P}.zero_policy": "free", f"{Z}.stage": 2}, f'{P}.zero_policy: parameters are never freed at ZeRO stage 2: got "free".'),
    ({f"{P}.zero_policy": "micro", f"{Z}.stage": 1}, f"{P}.zero_policy: full gradients live at ZeRO stage 1"),
    (
        {f"{P}.zero_policy": "micro", f"{Z}.stage": 2, f"{Z}.reduce_every": "boundary"},
        f'{P}.zero_policy: contradicts {Z}.reduce_every: got "micro", expected "boundary".',
    ),
    (
        {f"{P}.zero_policy": "hold", f"{Z}.stage": 3, f"{Z}.reshard_after": "forward"},
        f'{P}.zero_policy: contradicts {Z}.reshard_after: got "hold", expected "free".',
    ),
]  # fmt: skip


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
        (rated("WarmupDecayLR", total_num_steps=10, warmup_max_lr=None), "warmup_max_lr, which is 0.001"),
        (rated("WarmupLR", warmup_max_lr=[0.001, 0.003]), "warmup_max_lr, which is [0.001, 0.003]"),
        (rated("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.01), "cycle_max_lr, which is 0.01"),
        (rated("WarmupLR"), ""),
        (rated("WarmupLR", warmup_max_lr="auto"), ""),
        (rated("WarmupLR", warmup_max_lr=[0.022, 0.03]), ""),
        (rated("WarmupDecayLR", total_num_steps=10, warmup_max_lr=0.022), ""),
        (rated("WarmupDecayLR", None, total_num_steps=10), ""),
        (rated("WarmupCosineLR", total_num_steps=10), ""),
        (rated("StepLR", step_size=3), ""),
    ],
)
def test_a_learning_rate_that_the_scheduler_replaces_is_said(config: dict[str, Any], peak: str):
    warnings = read_ds_config(config).warnings
    assert len(warnings) == bool(peak)
    for warning in warnings:
        assert "optimizer.params.lr" in warning and "got 0.022" in warning and peak in warning


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
    assert all(f"optimizer.params.{name}" in line for name, line in zip(unused, warnings, strict=True))
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


# --- "auto" ---

HF_FILE: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
        "gather_16bit_weights_on_model_save": "auto", "overlap_comm": "auto", "sub_group_size": "auto"},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-3,
    "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "weight_decay": 0.1, "warmup_ratio": 0.1,
    "num_training_steps": 95, "fp16": False, "bf16": True, "hidden_size": 64, "zero3_save_16bit_model": True,
}  # fmt: skip


def test_a_hugging_face_file_is_filled():
    document, faults = resolve_auto(Document.of(HF_FILE), ARGUMENTS)
    assert faults == []
    assert document.value == {
        "train_batch_size": None, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 95}},
        "fp16": {"enabled": False}, "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 4096, "prefetch_bucket_size": 3686, "param_persistence_threshold": 640,
            "gather_16bit_weights_on_model_save": True, "overlap_comm": None, "sub_group_size": None},
    }  # fmt: skip
    assert document.at(("optimizer", "params", "lr")).source() == "auto: hyperparameter learning_rate"
    assert document.at(("zero_optimization", "reduce_bucket_size")).source() == "auto: hidden², hidden size 64"
    assert document.at(("train_batch_size",)).source() == "auto: left to zero_trial"


def test_what_has_no_source_is_named_with_the_way_to_set_it():
    _, faults = resolve_auto(Document.of(HF_FILE), {})
    asked = {
        "gradient_clipping": ("a number", "max_grad_norm"),
        "optimizer.params.lr": ("a number", "learning_rate"),
        "optimizer.params.betas": ("two numbers, such as [0.9, 0.999]", "betas"),
        "optimizer.params.eps": ("a number", "adam_epsilon"),
        "optimizer.params.weight_decay": ("a number", "weight_decay"),
        "scheduler.params.warmup_max_lr": ("a number", "warmup_max_lr"),
        "scheduler.params.warmup_num_steps": ("a number", "warmup_steps"),
        "scheduler.params.total_num_steps": ("a number", "max_steps"),
        "fp16.enabled": ("true or false", "fp16"),
        "bf16.enabled": ("true or false", "bf16"),
    }
    assert [str(fault) for fault in faults] == [
        f'{key}: "auto" has no source. Set {what}, or the hyperparameter {name} in the trial, or args.{name} in a script.'
        for key, (what, name) in asked.items()
    ]


def test_autos_that_are_not_filled():
    """A stage is never guessed; and "auto" may be a value of the key."""
    _, faults = resolve_auto(Document.of({"optimizer": {"type": "auto"}, "zero_optimization": {"stage": "auto"}}), {})
    assert "Set a string" in str(faults[0]) and "zero_stage" in str(faults[1])
    document, faults = resolve_auto(Document.of({"zero_optimization": {"stage": "auto"}}), {"zero_stage": 2})
    assert document.value == {"zero_optimization": {"stage": 2}} and not faults
    own = {"zero_optimization": {"reduce_every": "auto"}, "data_types": {"keep_in_fp32_modules": "auto"}}
    own |= {"autotuning": {"arg_mappings": {"x": "auto"}}}  # type: ignore[dict-item]
    document, faults = resolve_auto(Document.of(own), {})
    assert document.value == own and not faults


def test_missing_keys_are_filled_only_on_request():
    hints = {"lr": 0.1, "global_batch_size": 8, "bf16": True, "max_grad_norm": 2.0}
    bare = Document.of({"optimizer": {"type": "SGD"}})
    assert resolve_auto(bare, hints)[0].value == bare.value
    filled = resolve_auto(bare, hints, fill=True)[0]
    assert filled.value == {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_batch_size": 8, "gradient_clipping": 2.0, "bf16": {"enabled": True}
    }  # fmt: skip
    assert filled.at(("train_batch_size",)).source() == "hyperparameter global_batch_size"
    assert "optimizer" not in resolve_auto(Document.of({}), hints, fill=True)[0].value


def test_contradictions():
    config = Document.of({"train_batch_size": 6, "optimizer": {"params": {"lr": 0.1}}, "gradient_clipping": "auto"})
    faults = contradictions(config, {"global_batch_size": 8, "lr": 0.1, "max_grad_norm": 3.0})
    assert [str(fault) for fault in faults] == [
        'train_batch_size: contradicts hyperparameter global_batch_size: got 6, expected 8. Set one of them, or write "auto" in ds_config.'
    ]
    assert contradictions(config, {}) == []
    assert contradictions(Document.of({"train_batch_size": "x"}), {"global_batch_size": 8}) == []  # the reader's fault
