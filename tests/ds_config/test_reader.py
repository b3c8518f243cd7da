"""Reading a ds_config: every row of the table is exercised, and all faults of a source come
together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ds_config.samples import nested, other_value
from zero_trial.ds_config.config_report import config_report
from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import FIELDS, TABLE, DsConfig
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.types import MapOf, Opaque

ROWS = list(TABLE.values())
LEAVES = [row for row in ROWS if not row.is_section]

# Keys that need another key beside them; without it they are a fault of their own, tested in
# test_rules.
NEEDS: dict[str, dict[str, Any]] = {
    "data_types.param_dtype": {"bf16": {"enabled": True}},
    "zero_optimization.reshard_after": {"zero_optimization": {"stage": 3}},
    "pipeline.chunks_per_rank": {"pipeline": {"schedule": "interleaved"}},
}


def merged(path: str, value: Any) -> dict[str, Any]:
    config = nested(path, value)
    for section, inner in NEEDS.get(path, {}).items():
        config[section] = {**inner, **config.get(section, {})}
    return config


def value_at(config: DsConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("device", "ratio", "words"),
    [
        ("cpu", 0.3, "all of the optimizer's state leaves it"),
        ("nvme", 0.3, "all of the optimizer's state leaves it; where ranks compute on the CPU it is honored"),
        ("cpu", 1.0, None),
        ("none", 0.3, None),
    ],
)
def test_a_ratio_that_a_gpu_does_not_honor_is_a_warning(device: str, ratio: float, words: str | None):
    section = {"device": device, "ratio": ratio, "nvme_path": "."}
    config = read_ds_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": section}})
    where = "zero_optimization.offload_optimizer.ratio"
    assert config.warnings == ((f"{where}: 0.3 has no effect on a GPU: {words}",) if words else ())


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize(("device", "warns"), [({}, True), ({"device": "none"}, False), ({"device": "nvme"}, False)])
def test_a_folder_without_a_device_is_a_warning(name: str, device: dict[str, str], warns: bool):
    section = {"nvme_path": "/mnt/nvme", **device}
    config = read_ds_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, name: section}})
    line = f"zero_optimization.{name}.nvme_path: nothing is offloaded, because {name} has no device"
    assert [warning.split(";")[0] for warning in config.warnings] == [line] * warns


def test_nothing_is_the_default():
    assert read_ds_config({}) == DsConfig(sources=read_ds_config({}).sources)


ANSWERED = [row for row in LEAVES if row.support is not Support.MAPPED]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row.path)
def test_every_key_is_answered(row: Key):
    """Honoured: the value arrives. Refused: an error that names the key. Else: the report says why
    it has no effect."""
    value = other_value(row)
    config = merged(row.path, value)
    if row.support is Support.REFUSED:
        with pytest.raises(ConfigError) as error:
            read_ds_config(config)
        assert row.path in str(error.value) and row.meaning in str(error.value) and row.instead in str(error.value)
        return
    read = read_ds_config(config)
    assert read.sources[row.path] == "given"
    if row.path in FIELDS:
        inside = row.type.read(value).value
        assert value_at(read, row.path) == inside != row.default
    entry = next(entry for entry in config_report(read) if entry.key == row.path)
    if row.support in (Support.NO_EFFECT, Support.NOT_YET):
        assert entry.remark == f"{row.support.value}: {row.meaning}"
    else:
        assert entry.remark == ""


@pytest.mark.parametrize("row", [row for row in ANSWERED if row.aliases], ids=lambda row: row.path)
def test_every_alias_is_the_same_key(row: Key):
    value = other_value(row)
    for alias in row.aliases:
        path = f"{row.parent}.{alias}" if row.parent else alias
        if row.support is not Support.REFUSED:
            read = read_ds_config(nested(path, value))
            assert read.sources[row.path] == "given"
        with pytest.raises(ConfigError, match="the same key as"):
            both = nested(path, value)
            section = both
            for part in row.parent.split(".") if row.parent else ():
                section = section[part]
            section[row.name] = value
            read_ds_config(both)


@pytest.mark.parametrize("row", [row for row in ROWS if not isinstance(row.type, Opaque)], ids=lambda row: row.path)
def test_every_key_refuses_what_is_not_of_its_kind(row: Key):
    wrong: Any = 3.5 if row.is_section or isinstance(row.type, MapOf) else {"x": 1}
    config = merged(row.path, wrong)
    with pytest.raises(ConfigError) as error:
        read_ds_config(config)
    assert row.path in str(error.value)
    assert "expected" in str(error.value)


@pytest.mark.parametrize("row", LEAVES, ids=lambda row: row.path)
def test_every_key_misspelled_is_an_error_that_names_it(row: Key):
    name = row.name[:-1] + "xq" if len(row.name) > 5 else row.name + "xq"
    path = f"{row.parent}.{name}" if row.parent else name
    with pytest.raises(ConfigError, match="unknown key") as error:
        read_ds_config(nested(path, other_value(row)))
    assert path in str(error.value)


@pytest.mark.parametrize("row", [row for row in LEAVES if not row.required], ids=lambda row: row.path)
def test_null_is_the_default(row: Key):
    read = read_ds_config(nested(row.path, None))
    if row.path in FIELDS and "offload_" not in row.path:
        assert value_at(read, row.path) == row.default


def test_all_faults_come_together(tmp_path: Path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        """{
  "zero_optimisation": {"stage": 2},
  "train_batch_size": "32",
  "gradient_clipping": "auto",
  "fp16": {"enabled": 1, "loss_scal": 0},
  "optimizer": {"type": "Adam", "params": {"lr": "fast", "max_grad_norm": 1.0}}
}"""
    )
    with pytest.raises(ConfigError) as error:
        read_ds_config(path)
    assert str(error.value) == (
        "7 faults:\n"
        '  ds_config.json:2 zero_optimisation: unknown key. Did you mean "zero_optimization"? '
        "(DeepSpeed would ignore this and train without ZeRO.)\n"
        '  ds_config.json:5 fp16.loss_scal: unknown key. Did you mean "loss_scale"?\n'
        '  ds_config.json:4 gradient_clipping: "auto" has no source. Set a number, '
        "or the hyperparameter max_grad_norm in the trial, or args.max_grad_norm in a script.\n"
        '  ds_config.json:3 train_batch_size: wrong value: got "32", expected a positive integer. Write 32 without quotes.\n'
        "  ds_config.json:5 fp16.enabled: wrong value: got 1, expected true or false. Write true.\n"
        '  ds_config.json:6 optimizer.params.lr: wrong value: got "fast", expected a number of at least 0.\n'
        "  ds_config.json:6 optimizer.params.max_grad_norm: gradient clipping is not a parameter of the optimizer: got 1.0. "
        'Remove it and set "gradient_clipping": 1.0 at the top level.'
    )


def test_old_spellings_are_translated_and_said():
    config = read_ds_config({"bfloat16": {"enabled": True}, "zero_optimization": True, "fp32_allreduce": True})
    assert config.bf16.enabled and config.zero_optimization.stage == 1 and config.communication_data_type == "fp32"
    assert config.sources["zero_optimization.stage"] == "written as zero_optimization: true"
    assert config.sources["communication_data_type"] == "written as fp32_allreduce"
    assert config.warnings == (
        "bfloat16: read as bf16.",
        'fp32_allreduce: an old spelling. Write communication_data_type: "fp32".',
    )


def test_values_that_mean_none():
    assert read_ds_config('{"steps_per_print": Infinity}').steps_per_print is None
    assert read_ds_config({"zero_optimization": {"mics_shard_size": -1}}).zero_optimization.mics_shard_size is None


def test_hyperparameters_fill_and_must_agree():
    config = read_ds_config({"optimizer": {"type": "SGD"}}, hyperparameters={"lr": 0.1, "global_batch_size": 8})
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.1}
    assert config.train_batch_size == 8
    assert config.sources["train_batch_size"] == "hyperparameter global_batch_size"
    clash = {"train_batch_size": 6}
    with pytest.raises(
        ConfigError, match=r"train_batch_size: contradicts hyperparameter global_batch_size: got 6, expected 8"
    ) as error:
        read_ds_config(clash, hyperparameters={"global_batch_size": 8})
    assert not isinstance(error.value, InvalidHP)
    with pytest.raises(InvalidHP):
        read_ds_config(clash, hyperparameters={"global_batch_size": 8}, search=True)
    with pytest.raises(InvalidHP):
        read_ds_config({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, hyperparameters={}, search=True)


def test_hints_only_fill_autos():
    config = read_ds_config({"gradient_clipping": "auto"}, hints={"max_grad_norm": 0.5, "global_batch_size": 8})
    assert config.gradient_clipping == 0.5 and config.train_batch_size is None


def test_the_input_is_left_alone():
    mine = {"zero_optimization": {"stage": "auto", "stage3_max_live_parameters": "auto"}, "bfloat16": {"enabled": True}}
    before = json.dumps(mine)
    read_ds_config(mine, hints={"zero_stage": 2})
    assert json.dumps(mine) == before
