"""The arguments of DeepSpeed's scripts: both names, one meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from zero_trial.engine.compat import add_config_arguments, config_of, hints_of
from zero_trial.errors import ConfigError


@pytest.mark.parametrize("option", ["--deepspeed_config", "--zero_trial_config"])
def test_either_name_gives_the_file(option: str, tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    parser = add_config_arguments(argparse.ArgumentParser())
    assert config_of(parser.parse_args(["--deepspeed", option, str(path)])) == path


def test_nothing_given_is_none():
    assert config_of(add_config_arguments(argparse.ArgumentParser()).parse_args([])) is None
    assert config_of(None) is None


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"--deepspeed_config: there is no such file: got nowhere\.json"):
        config_of(argparse.Namespace(deepspeed_config="nowhere.json"))


def test_training_arguments_are_understood():
    args = argparse.Namespace(
        learning_rate=3e-5,
        adam_beta1=0.9,
        adam_beta2=0.98,
        bf16=True,
        output_dir="x",
        weight_decay=0.0,
        per_device_train_batch_size=4,
        train_batch_size=4,
        max_steps=-1,
        warmup_steps=0,
        warmup_ratio=0.1,
    )
    assert hints_of(args) == {
        "learning_rate": 3e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "bf16": True,
        "weight_decay": 0.0,
        "per_device_train_batch_size": 4,
        "warmup_ratio": 0.1,
    }


def test_a_plain_script_s_arguments():
    """``train_batch_size`` alone is the global one, as in ds_config; no warm-up is a warm-up of no steps."""
    args = argparse.Namespace(lr=0.1, train_batch_size=32, warmup_steps=0, max_steps=10, model=object())
    assert hints_of(args) == {"lr": 0.1, "train_batch_size": 32, "warmup_steps": 0, "max_steps": 10}
    assert hints_of(None) == {}
