"""The top of an experiment."""

from __future__ import annotations

import pytest

from tests.experiment.written import completed, judge, refused, section

OWN = "Settings of your own belong under data: or hyperparameters:."


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ("entrypoint: model_def:Trial", None),
        ("entrypoint: [python3, -m, x]", None),
        ("trainer: deepspeed", "trainer: unknown property. Write hyperparameters.trainer."),
        (
            "zero_optimization: {stage: 3}",
            "zero_optimization: unknown property. Write hyperparameters.ds_config.zero_optimization.",
        ),
        ("entrypoint: null", "entrypoint: managed experiments require entrypoint"),
        ("entrypoint: ''", "entrypoint: managed experiments require entrypoint"),
        ("entrypoint: []", "entrypoint: managed experiments require entrypoint"),
        ("entrypoint: 3", "entrypoint: is neither a string nor a list of strings"),
        ("entrypoint: [python3, 3]", "entrypoint: is neither a string nor a list of strings"),
        ("name: 3", "name: 3 is not a string"),
        ("name: null", None),
        ("description: x", None),
        ("description: [x]", 'description: ["x"] is not a string'),
        ("labels: [a, b]", None),
        ("labels: a", 'labels: "a" is not a list'),
        ("labels: [1]", "labels[0]: 1 is not a string"),
        ("{workspace: w, project: p}", None),
        ("{workspace: '', project: ''}", None),
        ("{workspace: w, project: ''}", "<config>: workspace and project must either both be set or neither"),
        ("workspace: w", "<config>: workspace and project must either both be set or neither"),
        ("data: {a: [1, {b: null}]}", None),
        ("data: [1]", "data: [1] is not a map"),
        ("checkpoint_policy: all", None),
        ("checkpoint_policy: worst", 'checkpoint_policy: "worst" is not one of best, all, none'),
        ("checkpoint_policy: true", "checkpoint_policy: true is not one of best, all, none"),
        ("min_validation_period: {epochs: 1}", None),
        ("min_validation_period: {batches: 0}", None),
        ("min_validation_period: null", None),
        (
            "min_validation_period: 100",
            'min_validation_period: a length object must have one attribute named "batches", "records", or "epochs"',
        ),
        (
            "min_checkpoint_period: {batches: -1}",
            'min_checkpoint_period: a length object must have one attribute named "batches", "records", or "epochs"',
        ),
        ("perform_initial_validation: true", None),
        ("perform_initial_validation: 1", "perform_initial_validation: 1 is neither true nor false"),
        ("scheduling_unit: 1", None),
        ("scheduling_unit: 0", "scheduling_unit: 0 is less than 1"),
        ("records_per_epoch: 60000", None),
        ("records_per_epoch: many", 'records_per_epoch: "many" is not an integer'),
        ("max_restarts: 0", None),
        ("max_restarts: -1", "max_restarts: -1 is less than 0"),
        ("max_restarts: 99999999999999999999", "max_restarts: 99999999999999999999 is more than 9223372036854775807"),
        ("preemption_timeout: 60", None),
        ("preemption_timeout: 0", "preemption_timeout: 0 is less than 1"),
        ("debug: true", None),
        ("debug: 2", "debug: 2 is neither true nor false"),
        ("internal: {native: [x]}", "internal: is for the master's own use. Remove it."),
        ("lr: 0.1", f"lr: unknown property. {OWN}"),
        ("ds_config: {}", f"ds_config: unknown property. {OWN}"),
        ("hyperparameter: {}", 'hyperparameter: unknown property. Did you mean "hyperparameters"?'),
        ("zero_trial: {}", f"zero_trial: unknown property. {OWN}"),
    ],
)
def test_the_top(changes: str, fault: str | None):
    if fault is not None and fault.startswith("<config>"):
        assert fault in refused(changes)
    else:
        judge(changes, fault)


def test_all_faults_are_reported_together():
    assert len(refused("{max_restarts: -1, lr: 3, searcher: null, resources: {slots_per_trial: x}}")) == 4


def test_every_key_is_there_afterwards():
    config = completed("{}").config
    assert set(config) >= {"description", "integrations", "pbs", "workspace"}
    assert not set(config) & {"internal", "data_layer", "retention_policy", "security", "tensorboard_storage"}
    assert section("{}", "checkpoint_policy") == "best"
    assert section("{}", "min_checkpoint_period") == {"batches": 0}
    assert (section("{}", "max_restarts"), section("{}", "scheduling_unit")) == (5, 100)
    assert section("{}", "preemption_timeout") == 3600


def test_a_grid_without_end():
    axis = "{type: double, minval: 0, maxval: 1, count: 100000}"
    (message,) = refused(f"searcher: {{name: grid, metric: loss}}\nhyperparameters: {{a: {axis}, b: {axis}}}")
    assert message.startswith("<config>.hyperparameters: the grid has too many points: got 10000000000")
