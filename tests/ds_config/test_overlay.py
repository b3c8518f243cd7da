"""Laying one configuration over another; presets, the ZeRO section by one word."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from zero_trial.ds_config.overlay import overlay, overwrite_ds_config, preset_names, read_preset, with_hyperparameters
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "zero_optimization": {"stage": 1, "stage3_prefetch_bucket_size": 5},
}
TUNED = {"autotuning": {"enabled": True, "arg_mappings": {"a": 1}}}


def test_overrides_nested_and_dotted_change_nothing_in_place():
    base = copy.deepcopy(BASE)
    over = {"zero_optimization": {"stage": 3}, "optimizer.params.lr": 0.2, "optimizer.params.betas": [0.1, 0.2]}
    merged = overwrite_ds_config(base, over)
    assert merged == {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.2, "betas": [0.1, 0.2]}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5},
    }
    merged["optimizer"]["params"]["betas"].append(3)
    merged["zero_optimization"]["stage"] = 0
    assert base == BASE and over["optimizer.params.betas"] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ({"optimizer": {"type_": "Lamb"}}, ("optimizer", "type"), "Lamb"),
        ({"optimizer.type_": "Lamb"}, ("optimizer", "type"), "Lamb"),
        ({"scheduler": {"type_": "WarmupLR"}}, ("scheduler", "type"), "WarmupLR"),
        ({"optimizer.params": {"betas": [0.5, 0.5]}}, ("optimizer", "params", "betas"), [0.5, 0.5]),
        ({"zero_optimization.prefetch_bucket_size": 9}, ("zero_optimization", "prefetch_bucket_size"), 9),
        ({"bf16": {"enabled": True}}, ("bf16", "enabled"), True),
        ({"optimizer": None}, ("optimizer",), None),
        ({"train_batch_size": None}, ("train_batch_size",), None),
        ({"zero_optimization": {}}, ("zero_optimization", "stage"), 1),
        ({"autotuning": {"arg_mappings": {"b": 2}}}, ("autotuning", "arg_mappings"), {"b": 2}),  # laid whole
    ],
)
def test_overrides(overrides: dict[str, Any], path: tuple[str, ...], value: Any):
    assert Document(overwrite_ds_config(BASE | TUNED, overrides)).get(path) == value


def test_another_spelling_in_the_base_gives_way():
    merged = overwrite_ds_config(BASE, {"zero_optimization": {"prefetch_bucket_size": 9}})
    assert merged["zero_optimization"] == {"stage": 1, "prefetch_bucket_size": 9}
    assert overwrite_ds_config({"bfloat16": {"enabled": False}}, {"bf16.enabled": True}) == {
        "bfloat16": {"enabled": True}
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"optimizer": {"params": {"lr": 1}}, "optimizer.params.lr": 2},
            "optimizer.params.lr: set twice in the overr",
        ),
        ({"optimizer": {"type": "A", "type_": "B"}}, "optimizer.type: set twice in the overrides"),
        ({"optimizer.params": None, "optimizer.params.lr": 2}, "optimizer.params.lr: also set inside optimizer.params"),
        (
            {"zero_optimization": 2},
            "zero_optimization: this value would replace a section of the base: got 2, expected an object",
        ),
        (
            {"train_batch_size": {"x": 1}},
            "train_batch_size: this section would replace a plain value of the base: got {x: 1}",
        ),
        ({"train_batch_size.x": 1}, "train_batch_size.x: train_batch_size is not a section in the base: got 8"),
    ],
)
def test_faults(overrides: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        overwrite_ds_config(BASE, overrides)
    assert message in str(error.value)


def test_every_changed_leaf_keeps_its_place():
    over = Document({"zero_optimization": {"stage": 3}, "zero_optimisation": {"x": 1}}, {
        ("zero_optimization", "stage"): Location("const.yaml", 7, "hyperparameters.ds_config"),
        ("zero_optimisation",): Location("const.yaml", 9, "hyperparameters.ds_config"),
    })  # fmt: skip
    merged = overlay(Document(BASE, {("train_batch_size",): Location("ds.json", 2)}, Location("ds.json")), over)
    assert merged.at(("zero_optimization", "stage")).spot() == "const.yaml:7"
    assert merged.at(("zero_optimisation",)).spot() == "const.yaml:9"
    assert merged.at(("train_batch_size",)).spot() == "ds.json:2"
    assert merged.at(("optimizer", "type")).spot() == "ds.json"


# --- presets ---

# name -> stage, device of the optimizer's state, device of the parameters
WHAT = {
    "deepspeed": (2, None, None),
    "deepspeed_offload": (2, "cpu", None),
    "zero_0": (0, None, None),
    "zero_1": (1, None, None),
    "zero_2": (2, None, None),
    "zero_3": (3, None, None),
    "zero_2_offload": (2, "cpu", None),
    "zero_3_offload": (3, "cpu", "cpu"),
    "zero_infinity": (3, "nvme", "nvme"),
}
OWN: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


@pytest.mark.parametrize("name", WHAT)
def test_each_takes_the_place_of_the_whole_section(name: str):
    config = read_ds_config(with_hyperparameters(Document.of(OWN), {"trainer": name}))
    zero = config.zero_optimization
    devices = [section.device if section else None for section in (zero.offload_optimizer, zero.offload_param)]
    assert (zero.stage, *(device if device != "none" else None for device in devices)) == WHAT[name]
    assert config.optimizer.type == "AdamW"
    assert not config.warnings


@pytest.mark.parametrize(("given", "near"), [("zero3", "zero_3"), ("deepspeed_ofload", "deepspeed_offload"), (3, None)])
def test_names_of_presets(given: Any, near: str | None):
    assert preset_names() == tuple(sorted(WHAT))
    document = with_hyperparameters(Document.of(OWN), {"trainer": "zero_3"})
    assert document.at(("zero_optimization", "stage")).spot().startswith("preset zero_3")
    with pytest.raises(ConfigError) as caught:
        read_preset(given, "hyperparameters.trainer")
    assert "hyperparameters.trainer" in str(caught.value)
    assert near is None or f"Did you mean {near}?" in str(caught.value)
