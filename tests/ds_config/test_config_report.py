"""The resolved configuration, as a table, as JSON, and as a ds_config that gives the same again."""

from __future__ import annotations

import json
from pathlib import Path

from zero_trial.ds_config.batch import reconcile
from zero_trial.ds_config.config_report import (
    clipping_line,
    config_report,
    entries_of,
    filled_line,
    render_report,
    report_json,
    resolved_ds_config,
    short_report,
)
from zero_trial.ds_config.overlay import overlay
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import TABLE
from zero_trial.schema.config_source import open_source
from zero_trial.schema.document import Document, Location, Provenance

TEXT = """{"train_micro_batch_size_per_gpu": 4,
 "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
 "zero_optimization": {"stage": 2, "round_robin_gradients": true, "reduce_scatter": true, "stage3_max_live_parameters": "auto"},
 "pipeline": {"seed_layers": true}
}"""


def test_what_was_given_and_what_needs_a_word():
    assert render_report(read_ds_config(TEXT, name="ds.json")) == (
        "train_micro_batch_size_per_gpu           4            ds.json:1\n"
        'optimizer.type                           "Adam"       ds.json:2\n'
        "optimizer.params                         {lr: 0.001}  ds.json:2\n"
        "gradient_clipping                        1.0          default                               0.0 before DeepSpeed 0.19.8\n"
        "bf16.check_grad_overflow                 true         default                               false before DeepSpeed 0.19.8\n"
        "zero_optimization.stage                  2            ds.json:3\n"
        "zero_optimization.reduce_scatter         true         ds.json:3\n"
        "zero_optimization.max_live_parameters    1000000000   auto: left to zero_trial (ds.json:3)\n"
        "zero_optimization.round_robin_gradients  true         ds.json:3                             "
        f"no effect: {TABLE['zero_optimization.round_robin_gradients'].meaning}\n"
        "pipeline.seed_layers                     true         ds.json:4                             "
        f"no effect: {TABLE['pipeline.seed_layers'].meaning}"
    )


def test_the_short_form():
    """What a person has to know who did not write it."""
    zero = {"stage": 2, "round_robin_gradients": True}
    source = {"fp16": {"enabled": False, "hysteresis": 3}, "zero_optimization": zero, "gradient_clipping": "auto"}
    config = read_ds_config(source, hyperparameters={"max_grad_norm": 0.5, "global_batch_size": 8})
    text = short_report(config_report(config), width=10_000)
    defaults, filled, idle = text.splitlines()
    assert defaults.startswith("ds_config, defaults: ") and 'checkpoint.tag_validation "Warn"' in defaults
    assert "stage" not in defaults and "fp16" not in defaults and " false" not in defaults
    assert filled == (
        "ds_config, filled in: train_batch_size 8 (hyperparameter global_batch_size), "
        "gradient_clipping 0.5 (auto: hyperparameter max_grad_norm)"
    )
    assert idle.startswith("ds_config, without effect: zero_optimization.round_robin_gradients (given; no effect: ")
    assert all(len(line) <= 80 for line in short_report(config_report(config), width=80).splitlines())
    assert short_report([]) == ""


def test_lines_of_what_auto_became_and_of_the_default_that_clips():
    params = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "gradient_clipping": "auto"}
    config = read_ds_config(params | {"train_batch_size": "auto"}, hints={"learning_rate": 0.5, "max_grad_norm": 1.0})
    filled = (
        "optimizer.params.lr 0.5 (hyperparameter learning_rate), gradient_clipping 1.0 (hyperparameter max_grad_norm)"
    )
    assert filled_line(config) == f"ds_config, filled in: {filled}"
    assert filled_line(read_ds_config({"train_batch_size": 4})) == ""
    assert clipping_line(read_ds_config({"train_batch_size": 4})).startswith("gradient_clipping 1.0 by default")
    for written in (0.0, 1.0, 2.0):
        assert clipping_line(read_ds_config({"train_batch_size": 4, "gradient_clipping": written})) == ""
    assert clipping_line(read_ds_config({"train_batch_size": 4}, hyperparameters={"max_grad_norm": 1.0})) == ""


def test_every_way_a_value_comes_about(tmp_path: Path):
    file = tmp_path / "ds_config.json"
    text = '{"gradient_clipping": "auto", "fp32_allreduce": true, "zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}'
    file.write_text(text)
    over = Document.of({"zero_optimization.stage": 2}, Location("const.yaml", 9, prefix="hyperparameters.ds_config"))
    hints = {"max_grad_norm": 1.0, "train_batch_size": 8}
    config = read_ds_config(overlay(open_source(file), over), hyperparameters=hints)
    found = {key: config.source(key).provenance for key in config.sources}
    assert found["gradient_clipping"] is Provenance.AUTO
    assert found["communication_data_type"] is Provenance.REWRITTEN
    assert found["zero_optimization.stage"] is Provenance.OVERLAY
    assert found["zero_optimization.reduce_bucket_size"] is Provenance.GIVEN
    assert found["steps_per_print"] is Provenance.DEFAULT
    assert config.source("no.such.key").provenance is Provenance.DEFAULT
    entries = config_report(config)
    body = json.loads(report_json(config, reconcile(config, 2).rows))
    assert {"train_batch_size", "ranks"} <= {row["name"] for row in body["batch"]}
    read = [(entry.key, entry.source, entry.remark, entry.source.provenance) for entry in entries_of(body)]
    assert read == [(entry.key, entry.source, entry.remark, entry.source.provenance) for entry in entries]


def test_what_is_still_auto_stays_so():
    params = {"lr": "auto", "eps": 1e-6}
    config = read_ds_config({"optimizer": {"type": "AdamW", "params": params}}, allow_open=True)
    assert resolved_ds_config(config)["optimizer"]["params"] == params
    assert "filled in from args.learning_rate of a script" in render_report(config)
