"""What a master refuses in each section of an experiment, in its words; what it accepts, and how it
completes it, is recorded (test_recorded)."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from zero_trial.experiment.rules import ClusterDefaults, CompletedConfig, InvalidExperiment, complete
from zero_trial.experiment.sections import PERIOD as PERIOD_RULE
from zero_trial.experiment.sections import SEARCHER_LENGTH, Period, PeriodOf
from zero_trial.experiment.space import NESTED_TYPE, NO_COUNT, check_counts
from zero_trial.schema.types import ValidationError

BASE = {
    "name": "e",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
    "hyperparameters": {},
}
CLUSTER = ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/storage"}, experiment_seed=11)


def completed(changes: str, cluster: ClusterDefaults = CLUSTER, **more: Any) -> CompletedConfig:
    """``changes`` is YAML that replaces top-level keys of the small experiment."""
    return complete(yaml.safe_dump(BASE | yaml.safe_load(changes)), cluster, **more)


def section(changes: str, name: str) -> Any:
    return completed(changes).config[name]


def refused(changes: str, **more: Any) -> list[str]:
    """The faults, one line each."""
    with pytest.raises(InvalidExperiment) as error:
        completed(changes, **more)
    assert all("\n" not in message for message in error.value.messages)
    return error.value.messages


def judge(changes: str, fault: str | None) -> None:
    """``fault`` is one of the faults' lines, without "<config>."; None: there are none."""
    if fault is None:
        completed(changes)
    else:
        messages = refused(changes)
        assert f"<config>.{fault}" in messages, messages


OWN = "Settings of your own belong under data: or hyperparameters:."
PERIOD = 'a length object must have one attribute named "batches", "records", or "epochs"'
SINGLE = "name: single, metric: loss"
ASHA = "name: adaptive_asha, metric: loss, max_trials: 8"
REQUIRED = "searcher: max_time and time_metric are required. Write "
AZURE = "checkpoint_storage: exactly one of connection_string or account_url must be set"
SUBDIR = "checkpoint_storage: storage_path must either be a relative directory or a subdirectory of host_path"
SIZE = "resources.shm_size: is not a number of bytes; a cluster also rejects strings such as 4g"
POLICY = "log_policies[0]: a log policy needs a name, or a pattern and an action"

REFUSED = [
    # the top
    ("trainer: deepspeed", "trainer: unknown property. Write hyperparameters.trainer."),
    ("fp16: {}", "fp16: unknown property. Write hyperparameters.ds_config.fp16."),
    ("lr: 0.1", f"lr: unknown property. {OWN}"),
    ("hyperparameter: {}", 'hyperparameter: unknown property. Did you mean "hyperparameters"?'),
    ("internal: {native: [x]}", "internal: is reserved for the master. Remove it."),
    ("entrypoint: []", "entrypoint: managed experiments require entrypoint"),
    ("entrypoint: [python3, 3]", "entrypoint: is neither a string nor a list of strings"),
    ("description: [x]", 'description: ["x"] is not a string'),
    ("labels: [1]", "labels[0]: 1 is not a string"),
    ("data: [1]", "data: [1] is not a map"),
    ("checkpoint_policy: worst", 'checkpoint_policy: "worst" is not one of best, all, none'),
    ("min_validation_period: 100", f"min_validation_period: {PERIOD}"),
    ("min_checkpoint_period: {batches: -1}", f"min_checkpoint_period: {PERIOD}"),
    ("perform_initial_validation: 1", "perform_initial_validation: 1 is neither true nor false"),
    ("max_restarts: -1", "max_restarts: -1 is less than 0"),
    ("max_restarts: 99999999999999999999", "max_restarts: 99999999999999999999 is more than 9223372036854775807"),
    # searcher
    ("searcher: null", "searcher: is a required property"),
    ("searcher: {name: single}", "searcher.metric: is a required property"),
    ("searcher: {metric: loss}", "searcher.name: is a required property"),
    ("searcher: {name: singel, metric: loss}", 'searcher: is not an object where object["name"] is one of single, random, grid or adaptive_asha'),
    (f"searcher: {{{SINGLE}, max_trials: 3}}", "searcher.max_trials: unknown property."),
    (f"searcher: {{{SINGLE}, max_length: 0}}", f"searcher.max_length: {PERIOD}, with a positive integer"),
    (
        f"searcher: {{{SINGLE}, source_trial_id: 4, source_checkpoint_uuid: abc}}",
        "searcher: at most one of source_trial_id or source_checkpoint_uuid may be set",
    ),
    (f"searcher: {{{ASHA}, max_time: 5}}", f"{REQUIRED}max_time: 1000 and time_metric: batches"),
    (f"searcher: {{{ASHA}, max_length: {{records: 5}}}}", f"{REQUIRED}max_time: 5 and time_metric: records instead of max_length"),
    (f"searcher: {{{ASHA}, max_time: 5, time_metric: b, divisor: 1}}", "searcher.divisor: 1 is not more than 1"),
    (f"searcher: {{{ASHA}, bracket_rungs: [0]}}", "searcher.bracket_rungs[0]: 0 is less than 1"),
    ("searcher: {name: pbt, metric: loss}", "searcher.name: pbt was removed. Use adaptive_asha, or random."),
    # checkpoint_storage
    ("checkpoint_storage: {type: s3}", "checkpoint_storage.bucket: is a required property"),
    ("checkpoint_storage: {type: shared_fs, host_path: /a, storage_path: /ab}", SUBDIR),
    ("checkpoint_storage: {type: shared_fs, host_path: /a, storage_path: ../b}", SUBDIR),
    ("checkpoint_storage: {type: s3, bucket: b, prefix: a/../b}", "checkpoint_storage: prefix must not contain .."),
    ("checkpoint_storage: {type: azure, container: c}", AZURE),
    (
        "checkpoint_storage: {type: azure, container: c, connection_string: s, credential: k}",
        "checkpoint_storage: credential and connection_string must not both be set",
    ),
    ("checkpoint_storage: {type: hdfs}", "checkpoint_storage.type: hdfs is no longer supported. Use shared_fs, directory, s3, gcs or azure."),
    ("checkpoint_storage: {type: null}", "checkpoint_storage.type: null is not a storage type"),
    ("checkpoint_storage: {host_path: /a}", "checkpoint_storage.type: is a required property, because host_path is set"),
    ("tensorboard_storage: {type: ftp}", "tensorboard_storage: is not a checkpoint storage"),
    # resources, environment, bind_mounts
    ("resources: {slots: 3}", "resources.slots: is only for commands. Write slots_per_trial."),
    ("resources: {slots_per_trial: 2.5}", "resources.slots_per_trial: 2.5 is not an integer"),
    ("resources: {slots_per_trial: 4, max_slots: 2}", "resources: slots_per_trial must be <= max_slots"),
    ("resources: {shm_size: 1.5g}", SIZE),
    ("resources: {devices: [/dev/a]}", 'resources.devices[0]: "/dev/a" is not a map'),
    ("environment: {environment_variables: [1]}", "environment.environment_variables.cpu[0]: 1 is not a string"),
    ("environment: {proxy_ports: [{proxy_port: 0}]}", "environment.proxy_ports[0].proxy_port: 0 is less than 1"),
    ("environment: {pod_spec: {name: x}}", "environment.pod_spec.name: is not a configurable option"),
    ("environment: {pod_spec: {spec: {containers: [{image: x}]}}}", "environment.pod_spec.spec.containers[0].image: is not configurable"),
    ("environment: {pod_spec: {spec: {containers: x}}}", "environment.pod_spec.spec: is not a valid pod spec"),
    ("bind_mounts: [{host_path: a, container_path: /b}]", "bind_mounts[0].host_path: host_path must be an absolute path"),
    ("bind_mounts: [{host_path: /a, container_path: .}]", 'bind_mounts[0].container_path: container_path must not be "."'),
    # the smaller sections
    ("log_policies: [{pattern: a, action: null}]", POLICY),
    ("log_policies: [{name: a, pattern: b}, {name: a}]", 'log_policies: two policies have the name "a"'),
    (
        "log_policies: [{name: x, action: {type: send_webhook, url: u}}]",
        'log_policies[0].action: {type: "send_webhook", url: "u"} is not one of cancel_retries, exclude_node',
    ),
    ("profiling: {begin_on_batch: 6, end_after_batch: 5}", "profiling: begin_on_batch must be <= end_after_batch"),
    ("reproducibility: {experiment_seed: 4294967296}", "reproducibility.experiment_seed: 4294967296 is more than 4294967295"),
    ("pbs: {sbatch_args: [-x]}", 'pbs.sbatch_args: unknown property. Did you mean "pbsbatch_args"?'),
    # hyperparameters
    ("hyperparameters: 5", "hyperparameters: 5 is not a map"),
    ("hyperparameters: {a: {type: int, minval: 0}}", "hyperparameters.a.maxval: is a required property"),
    ("hyperparameters: {a: {type: int, minval: 3, maxval: 3}}", "hyperparameters.a: minval must be less than maxval"),
    ("hyperparameters: {a: {type: log, base: 0}}", "hyperparameters.a.base: 0 is not more than 0"),
    (
        "hyperparameters: {a: {type: log, base: 10, minval: 0, maxval: 400}}",
        "hyperparameters.a: base to the power of minval or maxval is not a finite number",
    ),
    ("hyperparameters: {a: {type: double, minval: -1.7e+308, maxval: 1.7e+308}}", "hyperparameters.a: the range is not finite"),
    ("hyperparameters: {a: {type: categorical, vals: []}}", "hyperparameters.a.vals: [] is not a list of values"),
    ("hyperparameters: {a: {type: const}}", "hyperparameters.a.val: is a required property"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "fault"), REFUSED)
def test_what_is_refused(changes: str, fault: str):
    judge(changes, fault)


def test_all_faults_are_reported_together():
    assert len(refused("{max_restarts: -1, lr: 3, searcher: null, resources: {slots_per_trial: x}}")) == 4
    (message,) = refused("workspace: w")
    assert message == "<config>: workspace and project must either both be set or neither"


@pytest.mark.parametrize(
    ("ds_config", "accepted"),
    [
        ("{optimizer: {type: Adam, params: {lr: 0.1}}}", False),
        ("{optimizer: {type: {type: categorical, vals: [Adam, Lamb]}}}", False),
        ("{optimizer: {type: const, val: {type: Adam, params: {lr: 0.1}}}}", True),
        ("{type: const, val: {optimizer: {type: Adam}, scheduler: {type: WarmupLR}}}", True),
        ("{optimizer: {type: categorical, vals: [{type: Adam, params: {}}, {type: Lamb}]}}", True),
        ("{optimizer: {type_: {type: categorical, vals: [Adam, Lamb]}}}", True),
    ],
)
def test_the_forms_of_a_ds_config(ds_config: str, accepted: bool):
    if accepted:
        completed(f"hyperparameters: {{ds_config: {ds_config}}}")
        return
    (message,) = refused(f"hyperparameters: {{ds_config: {ds_config}}}")
    assert (
        message.startswith('<config>.hyperparameters.ds_config.optimizer: a nested key "type"')
        and NESTED_TYPE in message
    )


def test_a_nested_type_is_explained():
    (text,) = refused("hyperparameters: {ds_config: {optimizer: {type: Adam, params: {lr: 0.1}}}}")
    assert "Write optimizer: {type_: Adam, ...} for ds_config's type" in text
    assert 'or optimizer: {type: const, val: {type: "Adam", params: ' in text
    (elsewhere,) = refused("hyperparameters: {loss: {type: focal}}")
    assert elsewhere.endswith('Write loss: {type: const, val: {type: "focal"}}')


@pytest.mark.parametrize(
    ("space", "where"),
    [
        ("{a: {b: {type: int, minval: 0, maxval: 1, count: null}}}", "a.b"),
        ("{a: [{type: int, minval: 0, maxval: 1}]}", "a[0]"),
        ("{a: {type: double, minval: 0, maxval: 1, count: 3}, b: {type: categorical, vals: [1]}, c: 3}", None),
    ],
)
def test_a_grid_needs_counts(space: str, where: str | None):
    fault = None if where is None else f"hyperparameters.{where}: {NO_COUNT}"
    judge(f"searcher: {{name: grid, metric: loss}}\nhyperparameters: {space}", fault)
    assert check_counts({"type": "const", "val": {"type": "int"}}, ("x",)) == []


def test_a_grid_without_end():
    axis = "{type: double, minval: 0, maxval: 1, count: 100000}"
    (message,) = refused(f"searcher: {{name: grid, metric: loss}}\nhyperparameters: {{a: {axis}, b: {axis}}}")
    assert message.startswith("<config>.hyperparameters: the grid has too many points: got 10000000000")


def test_a_pattern_must_be_one():
    pytest.importorskip("re2")
    for text in ("(", "(?!a)"):
        (message,) = refused(f"log_policies: [{{pattern: '{text}', name: a}}]")
        assert message.startswith("<config>.log_policies[0]: pattern is not a regular expression in RE2's syntax: ")
    judge(r"log_policies: [{pattern: '\pL(?<n>a)', name: a}]", None)


def test_what_a_completed_section_holds():
    assert section("log_policies: [{name: ECC Error}]", "log_policies") == [
        {"name": "ECC Error"},
        {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    ]
    assert section("resources: {devices: [/dev/a:/dev/b]}", "resources")["devices"][0]["mode"] == "mrw"
    rungs = f"searcher: {{{ASHA}, max_time: 9, time_metric: epochs, bracket_rungs: [1, 3, 2]}}"
    assert section(rungs, "searcher")["bracket_rungs"] == [3, 2, 1]
    pod = "environment: {pod_spec: {batches: 5, spec: {containers: [{security_context: {}}]}}}"
    assert section(pod, "environment")["pod_spec"] == {
        "metadata": {"creationTimestamp": None},
        "spec": {"containers": [{"security_context": {}}]},
        "status": {},
    }


def test_a_cluster_without_storage_needs_the_experiments():
    cluster = ClusterDefaults()
    bucket = completed("checkpoint_storage: {type: gcs, bucket: b}", cluster).config["checkpoint_storage"]["bucket"]
    assert bucket == "b"
    assert "<config>.checkpoint_storage: is a required property" in refused("{}", cluster=cluster)
    kept = section("checkpoint_storage: {save_trial_best: 5}", "checkpoint_storage")
    assert (kept["host_path"], kept["save_trial_best"], kept["save_trial_latest"]) == ("/storage", 5, 1)


@pytest.mark.parametrize(
    ("value", "period"),
    [
        ({"batches": 100}, Period("batches", 100)),
        ({"epochs": 2}, Period("epochs", 2)),
        ({"records": 5e3}, Period("records", 5000)),
        (7, Period("batches", 7)),
        ({"batches": 0}, Period("batches", 0)),
    ],
)
def test_a_period_is_read(value: Any, period: Period):
    assert PeriodOf().read(value).value == period
    assert type(PeriodOf().read(value).value.count) is int


@pytest.mark.parametrize(
    "value", [{"steps": 1}, {}, {"batches": 1, "epochs": 1}, {"batches": -1}, {"batches": "x"}, "x", None, True, 1.5]
)
def test_what_is_no_period(value: Any):
    with pytest.raises(ValidationError, match=r"\{batches: n\}"):
        PeriodOf().read(value)


def test_a_length_is_positive():
    with pytest.raises(ValidationError) as problem:
        PeriodOf(1).read({"batches": 0})
    assert problem.value.fix == "0 is not a positive integer."


@pytest.mark.parametrize(
    ("value", "period", "length"),
    [
        ({"batches": 1}, True, True),
        ({"records": 0}, True, False),
        (5, False, True),
        (0, False, False),
        ({"batches": 1, "epochs": None}, False, False),
        ({"batches": True}, False, False),
    ],
)
def test_lengths_of_a_cluster(value: Any, period: bool, length: bool):
    assert [not rule.check(value, ("x",)) for rule in (PERIOD_RULE, SEARCHER_LENGTH)] == [period, length]
