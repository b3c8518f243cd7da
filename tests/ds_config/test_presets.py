"""Presets: the ZeRO section of a ds_config by one word."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.overlay import preset_names, read_preset, with_hyperparameters
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document

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
BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}


def test_the_names():
    assert preset_names() == tuple(sorted(WHAT))


@pytest.mark.parametrize("name", WHAT)
def test_each_takes_the_place_of_the_whole_section(name: str):
    config = read_ds_config(with_hyperparameters(Document.of(BASE), {"trainer": name}))
    zero = config.zero_optimization
    devices = [section.device if section else None for section in (zero.offload_optimizer, zero.offload_param)]
    assert (zero.stage, *(device if device != "none" else None for device in devices)) == WHAT[name]
    assert config.optimizer.type == "AdamW"
    assert not config.warnings


def test_a_fault_names_the_preset():
    document = with_hyperparameters(Document.of(BASE), {"trainer": "zero_3"})
    assert document.at(("zero_optimization", "stage")).spot().startswith("preset zero_3")


@pytest.mark.parametrize(("given", "near"), [("zero3", "zero_3"), ("deepspeed_ofload", "deepspeed_offload"), (3, None)])
def test_another_name_is_refused(given: Any, near: str | None):
    with pytest.raises(ConfigError) as caught:
        read_preset(given, "hyperparameters.trainer")
    assert "hyperparameters.trainer" in str(caught.value)
    assert near is None or f"Did you mean {near}?" in str(caught.value)
