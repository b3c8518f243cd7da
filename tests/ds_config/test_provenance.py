"""Where a value came from: an enum for code, a text for reports."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from zero_trial.ds_config.batch import reconcile
from zero_trial.ds_config.config_report import config_report, entries_of, report_json
from zero_trial.ds_config.overlay import overlay
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.schema.config_source import open_source
from zero_trial.schema.document import Document, Location, Provenance, ValueSource


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
    read = {entry.key: entry.source.provenance for entry in entries_of(json.loads(report_json(config)))}
    assert read == {entry.key: entry.source.provenance for entry in entries}


def test_batch_sizes_that_are_derived_or_from_a_hyperparameter():
    how = reconcile(read_ds_config({}), 2, {"global_batch_size": 8}).batch.how
    assert [source.provenance for source in how.values()] == [
        Provenance.HYPERPARAMETER,
        Provenance.DERIVED,
        Provenance.DERIVED,
    ]


@pytest.mark.parametrize(
    ("text", "provenance"),
    [
        ("default (null in a.json:3)", Provenance.DEFAULT),
        ("auto: hyperparameter lr (a.json:3)", Provenance.AUTO),
        ("auto: left to zero_trial", Provenance.OPEN),
        ("hyperparameter global_batch_size", Provenance.HYPERPARAMETER),
        ("derived: 2 x 2 x 2 ranks", Provenance.DERIVED),
        ("written as fp32_allreduce (a.json:3)", Provenance.REWRITTEN),
        ("const.yaml:9 hyperparameters.ds_config", Provenance.OVERLAY),
        ("PipelineModule(num_stages=2)", Provenance.MODEL),
        ("ds_config.json:3", Provenance.GIVEN),
        ("given", Provenance.GIVEN),
    ],
)
def test_the_text_of_an_old_report_has_its_provenance(text: str, provenance: Provenance):
    source = ValueSource(text)
    assert source == text and source.provenance is provenance and copy.deepcopy(source).provenance is provenance
