"""Reading a ds_config: every row of the table is exercised, and all faults of a source come
together."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ds_config.samples import nested, other_value
from zero_trial.ds_config.config_report import config_report
from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.keys_training import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS, TORCH_SCHEDULERS
from zero_trial.ds_config.reader import Canonical, read_ds_config
from zero_trial.ds_config.table import FIELDS, TABLE, DsConfig
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.document import Document, Location
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


LEAVES_GPU = "ratio: 0.3 has no effect on a GPU: all of the optimizer's state is offloaded"


@pytest.mark.parametrize(
    ("name", "section", "warning"),
    [
        ("offload_optimizer", {"device": "cpu", "ratio": 0.3}, LEAVES_GPU),
        ("offload_optimizer", {"device": "nvme", "ratio": 0.3}, f"{LEAVES_GPU}; ranks on the CPU honor it"),
        ("offload_optimizer", {"device": "none", "ratio": 0.3}, ""),
        ("offload_optimizer", {"device": "nvme"}, ""),
        ("offload_optimizer", {}, "nvme_path: nothing is offloaded, because offload_optimizer has no device"),
        ("offload_param", {}, "nvme_path: nothing is offloaded, because offload_param has no device"),
        ("offload_param", {"device": "none"}, ""),
    ],
)  # fmt: skip
def test_what_has_no_effect_where_it_stands_is_a_warning(name: str, section: dict[str, Any], warning: str):
    section = {"nvme_path": "/mnt/nvme", **section}
    config = read_ds_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, name: section}})
    assert len(config.warnings) == bool(warning)
    assert all(text.startswith(f"zero_optimization.{name}.{warning}") for text in config.warnings)


def test_nothing_is_the_default():
    assert read_ds_config({}) == DsConfig(sources=read_ds_config({}).sources)
    assert read_ds_config('{"steps_per_print": Infinity}').steps_per_print is None
    assert read_ds_config({"zero_optimization": {"mics_shard_size": -1}}).zero_optimization.mics_shard_size is None


def given_twice(row: Key, alias: str, value: Any) -> dict[str, Any]:
    both = section = nested(f"{row.parent}.{alias}" if row.parent else alias, value)
    for part in row.parent.split(".") if row.parent else ():
        section = section[part]
    section[row.name] = value
    return both


@pytest.mark.parametrize("parent", sorted({row.parent for row in LEAVES}))
def test_every_key_is_answered(parent: str):
    """Honored: the value arrives. Refused: an error that names the key. Else: the report says why
    it has no effect. Under every alias it is the same key, and null is its default."""
    for row in (row for row in LEAVES if row.parent == parent):
        value = other_value(row)
        if row.support is Support.REFUSED:
            with pytest.raises(ConfigError) as error:
                read_ds_config(merged(row.path, value))
            assert row.path in str(error.value) and row.meaning in str(error.value) and row.instead in str(error.value)
        elif row.support is not Support.MAPPED:
            read = read_ds_config(merged(row.path, value))
            assert read.sources[row.path] == "given"
            if row.path in FIELDS:
                assert value_at(read, row.path) == row.type.read(value).value != row.default
            (entry,) = (entry for entry in config_report(read) if entry.key == row.path)
            idle = row.support in (Support.NO_EFFECT, Support.NOT_YET)
            assert entry.remark == (f"{row.support.value}: {row.meaning}" if idle else "")
        for alias in row.aliases if row.support is not Support.MAPPED else ():
            if row.support is not Support.REFUSED:
                aliased = nested(f"{row.parent}.{alias}" if row.parent else alias, value)
                assert read_ds_config(aliased).sources[row.path] == "given"
            with pytest.raises(ConfigError, match="the same key as"):
                read_ds_config(given_twice(row, alias, value))
        if not row.required:
            read = read_ds_config(nested(row.path, None))
            if row.path in FIELDS and "offload_" not in row.path:
                assert value_at(read, row.path) == row.default


@pytest.mark.parametrize("parent", sorted({row.parent for row in ROWS}))
def test_every_key_refuses_what_is_not_of_its_kind_and_slips_of_its_name(parent: str):
    for row in (row for row in ROWS if row.parent == parent):
        if not isinstance(row.type, Opaque):
            wrong: Any = 3.5 if row.is_section or isinstance(row.type, MapOf) else {"x": 1}
            with pytest.raises(ConfigError) as error:
                read_ds_config(merged(row.path, wrong))
            assert row.path in str(error.value) and "expected" in str(error.value)
        if not row.is_section:
            name = row.name[:-1] + "xq" if len(row.name) > 5 else row.name + "xq"
            path = f"{row.parent}.{name}" if row.parent else name
            with pytest.raises(ConfigError, match="unknown key") as error:
                read_ds_config(nested(path, other_value(row)))
            assert path in str(error.value)


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


def test_hints_only_fill_autos_and_the_input_is_left_alone():
    mine = {"gradient_clipping": "auto", "zero_optimization": {"stage": "auto", "stage3_max_live_parameters": "auto"}}
    before = json.dumps(mine)
    config = read_ds_config(mine, hints={"max_grad_norm": 0.5, "global_batch_size": 8, "zero_stage": 2})
    assert config.gradient_clipping == 0.5 and config.train_batch_size is None
    assert json.dumps(mine) == before


# --- one spelling per key ---


def run(value: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    result = Canonical(Document.of(value))
    return result.value, [str(fault) for fault in result.faults], result.notes


def test_lines_follow_their_keys():
    places = {
        ("zero_optimization", "stage3_max_live_parameters"): Location("f", 3),
        ("optimizer", "params", "lr"): Location("f", 9),
    }
    value = {"zero_optimization": {"stage3_max_live_parameters": 5}, "optimizer": {"params": {"lr": 1}}}
    document = Canonical(Document(value, places)).document
    assert document.at(("zero_optimization", "max_live_parameters")).line == 3
    assert document.at(("optimizer", "params", "lr")).line == 9


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (
            {"zero_optimisation": {}},
            'zero_optimisation: unknown key. Did you mean "zero_optimization"? (DeepSpeed would ignore this and train without ZeRO.)',
        ),
        ({"qqq": 1}, "qqq: unknown key. (DeepSpeed would ignore this.)"),
        ({"fp16": {"qqq": 1}}, "fp16.qqq: unknown key"),
        ({"pipeline": {"seed_layer": True}}, 'pipeline.seed_layer: unknown key. Did you mean "seed_layers"? (DeepSpeed would ignore this.)'),
        ({"fp16": True}, 'fp16: not a section: got true, expected an object. Write {"enabled": true}.'),
        ({"pipeline": 3}, "pipeline: not a section: got 3, expected an object"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16: the same section as bf16. Keep one of them."),
        ({"zero_optimization": {"cpu_offload": 3}}, "zero_optimization.cpu_offload: wrong value: got 3, expected true or false"),
        ({"amp": True}, "amp: not a section"),
        ({"amp": {"enabled": 3}}, "amp.enabled: wrong value"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device: the same key as zero_optimization.cpu_offload. Keep device and remove the other.",
        ),
    ],
)  # fmt: skip
def test_faults_of_spelling(value: dict[str, Any], fault: str):
    assert run(value)[1][0].startswith(fault)


def test_what_is_left_out():
    """null, and an automatic switch of Apex; an empty section stays."""
    assert run({"train_batch_size": None, "optimizer": {}, "fp16": None}) == ({"optimizer": {}}, [], [])
    assert run({"amp": {"enabled": "auto", "opt_level": "auto"}}) == ({}, [], [])
    old = {"bfloat16": {"enabled": True}, "zero_optimization": {"stage3_max_live_parameters": 5, "cpu_offload": False}}
    new = {"bf16": {"enabled": True}, "zero_optimization": {"max_live_parameters": 5}}
    assert run(old) == (new, [], ["bfloat16: read as bf16."])


def test_limits_that_trl_writes_beside_the_section_are_not_read():
    beside = {"zero_optimization.reduce_bucket_size": 9, "zero_optimization.stage3_prefetch_bucket_size": 8.1}
    value, faults, notes = run({"zero_optimization": {"stage": 3, "reduce_bucket_size": 4}} | beside)
    assert value == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 4}}
    assert faults == []
    assert [note.partition(":")[0] for note in notes] == list(beside)
    assert len(run({"zero_optimization.stage": 3})[1]) == 1


# --- arguments of optimizers and schedulers ---


def read(section: str, name: str, given: dict[str, Any]) -> SimpleNamespace:
    """The name, the arguments, the faults and the warnings."""
    try:
        config = read_ds_config({section: {"type": name, "params": given}})
    except ConfigError as error:
        return SimpleNamespace(faults=error.faults or (error,))
    found = getattr(config, section)
    return SimpleNamespace(name=found.type, values=found.params, faults=(), warnings=list(config.warnings))


def test_known_names_are_strict_and_any_case():
    found = read("optimizer", "ADAMW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0})
    assert (found.name, found.values) == ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0})
    assert not found.faults and not found.warnings
    assert read("scheduler", "warmuplr", {"warmup_num_steps": 5}).name == "WarmupLR"


OPTIMIZER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("Adam", {"lrr": 1}, 'params.lrr: Adam has no such parameter. Did you mean "lr"?'),
    ("Lion", {"eps": 1}, "params.eps: Lion has no such parameter. It takes betas, lr, set_grad_none, weight_decay."),
    ("Adam", {"betas": [0.9, 1.0]}, "params.betas: wrong value: got [0.9, 1.0], expected a list of 2 numbers"),
    ("OneBitLamb", {"eps_inside_sqrt": True}, "params.eps_inside_sqrt: eps is added outside the square root: got true"),
    ("SGD", {"lr": "fast"}, 'params.lr: wrong value: got "fast", expected a number of at least 0'),
    ("SGD", {"max_grad_norm": 2}, "params.max_grad_norm: gradient clipping is not a parameter of the optimizer"),
    ("Admaw", {}, 'type: no such optimizer: got "Admaw". Did you mean "AdamW"?'),
    ("sgd", {}, 'type: no such optimizer: got "sgd". Did you mean "SGD"?'),
    ("MuAdam", {}, "type: MuAdam is not supported: it "),
    ("musgd", {}, "type: musgd is not supported: it "),
    ("LBFGS", {}, "type: LBFGS is not supported: it "),
]
SCHEDULER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupDecayLR", {}, "params.total_num_steps: missing: WarmupDecayLR requires it: expected a positive integer. Add"),
    ("WarmUpLr2", {}, 'type: no such scheduler: got "WarmUpLr2". Did you mean "WarmupLR"?'),
    ("WarmupLR", {"warmup_type": "cubic"}, 'params.warmup_type: wrong value: got "cubic", expected one of "log", "lin'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "name", "given", "fault"),
    [*(("optimizer", *row) for row in OPTIMIZER_FAULTS), *(("scheduler", *row) for row in SCHEDULER_FAULTS)],
)
def test_faults_of_arguments(section: str, name: str, given: dict[str, Any], fault: str):
    (found,) = read(section, name, given).faults
    assert str(found).startswith(f"{section}.{fault}")


def test_torchs_own_classes_take_what_torch_takes():
    found = read("optimizer", "SGD", {"lr": "1e-2", "momentum": 0.9, "nesterov": True, "dampening": "0", "x": [1, 2]})
    assert found.values == {"lr": 0.01, "momentum": 0.9, "nesterov": True, "dampening": "0", "x": (1, 2)}
    assert found.warnings == ["optimizer.params.lr: '1e-2' is a string, read as a number. Write 0.01."]
    assert read("scheduler", "StepLR", {"step_size": "3e0"}).values == {"step_size": 3.0}


def test_names_that_are_not_in_the_table_or_trained_as_another():
    found = read("optimizer", "Zyx", {})
    unknown = 'optimizer.type: "Zyx" is unknown here; it is looked up in torch when the engine is built.'
    assert not found.faults and found.warnings == [unknown]
    assert not read("optimizer", "muon", {}).warnings
    found = read("optimizer", "OneBitAdam", {"freeze_step": 10, "lr": 1e-3})
    assert not found.faults
    assert found.warnings == ["optimizer.type: gradients are not compressed; AdamW is used."]


def test_defaults_are_of_their_kind_and_torch_has_the_classes_that_are_left_to_it():
    for param in (param for named in (*OPTIMIZERS.values(), *SCHEDULERS.values()) for param in named.params.values()):
        if param.default is not None:
            assert param.type.read(param.default).value == param.default
        assert not (param.required and param.default is not None)
    assert [name for name in TORCH_OPTIMIZERS if name != "Muon" and not hasattr(torch.optim, name)] == []
    assert [name for name in TORCH_SCHEDULERS if not hasattr(torch.optim.lr_scheduler, name)] == []


# --- when a value asks for something ---


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        (None, False),
        (1, False),  # the default
        (-1, False),  # harmless
        (2, True),
        ({"enabled": False, "x": 1}, False),
        ({"enabled": True}, True),
        ({"enabled": "auto"}, True),
        ({"a": {"enabled": False}, "b": {"enabled": False}}, False),
        ({"a": {"enabled": False}, "b": {"shared": {"enabled": True}}}, True),
        ({"a": {"shared_parameters": {"enabled": False}, "different_groups": {"wq1": {"params": {"bits": 4}}}}}, False),
        ({"a": {"shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {"bits": 4}}}}}, True),
        ({"mode": "fixed"}, True),
        ({}, False),
    ],
)
def test_asking(value: Any, asks: bool):
    assert Key("k", Opaque(), Support.REFUSED, "why", default=1, harmless=(-1,)).asks(value) is asks
    row = Key("k", Opaque(), Support.SUPPORTED, "why", harmless=(False, -1))
    assert row.is_harmless(False) and row.is_harmless(-1)
    assert not row.is_harmless(0) and not row.is_harmless(-1.0) and not row.is_harmless(True)
