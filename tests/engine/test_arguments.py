"""The arguments of DeepSpeed's scripts: both names, one meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from zero_trial.engine.arguments import add_config_arguments, config_of
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
