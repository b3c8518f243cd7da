"""The smaller sections."""

from __future__ import annotations

import pytest

from tests.experiment.written import completed, judge, section

POLICY = "log_policies[0]: a log policy needs a name, or a pattern and an action"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ("log_policies: []", None),
        ("log_policies: [{name: OOM, pattern: '.*out of memory.*', action: cancel_retries}]", None),
        ("log_policies: [{pattern: ECC, action: exclude_node}, {name: OOM}]", None),
        ("log_policies: [{pattern: ECC, action: {type: exclude_node}}]", None),
        ("log_policies: {name: x}", 'log_policies: {name: "x"} is not a list'),
        ("log_policies: [{name: a, action: null}, {name: b}]", None),
        ("log_policies: [{action: cancel_retries}]", POLICY),
        ("log_policies: [{pattern: a}]", POLICY),
        ("log_policies: [{pattern: a, action: null}]", POLICY),
        ("log_policies: [{name: null, pattern: a}]", POLICY),
        (
            "log_policies: [{pattern: a, action: {type: null}}]",
            "log_policies[0].action: {type: null} is not one of cancel_retries, exclude_node",
        ),
        ("log_policies: [{name: a, pattern: b}, {name: a}]", 'log_policies: two policies have the name "a"'),
        (
            "log_policies: [{name: x, action: reboot}]",
            'log_policies[0].action: "reboot" is not one of cancel_retries, exclude_node',
        ),
        (
            "log_policies: [{name: x, action: {type: send_webhook, url: u}}]",
            'log_policies[0].action: {type: "send_webhook", url: "u"} is not one of cancel_retries, exclude_node',
        ),
        ("log_policies: [{name: x, actions: []}]", 'log_policies[0].actions: unknown property. Did you mean "action"?'),
        ("profiling: {enabled: true}", None),
        ("profiling: {enabled: false, begin_on_batch: 5, end_after_batch: 5, sync_timings: true}", None),
        ("profiling: {enabled: 1}", "profiling.enabled: 1 is neither true nor false"),
        ("profiling: {begin_on_batch: 6, end_after_batch: 5}", "profiling: begin_on_batch must be <= end_after_batch"),
        ("profiling: {begin_on_batch: -1}", "profiling.begin_on_batch: -1 is less than 0"),
        ("profiling: true", "profiling: true is not a map"),
        ("optimizations: {aggregation_frequency: 2, mixed_precision: O1}", None),
        ("optimizations: {aggregation_frequency: 0}", "optimizations.aggregation_frequency: 0 is less than 1"),
        ("optimizations: {mixed_precision: O4}", 'optimizations.mixed_precision: "O4" is not one of O0, O1, O2, O3'),
        ("reproducibility: {experiment_seed: 0}", None),
        ("reproducibility: {experiment_seed: 4294967295}", None),
        ("reproducibility: {experiment_seed: -1}", "reproducibility.experiment_seed: -1 is less than 0"),
        (
            "reproducibility: {experiment_seed: 4294967296}",
            "reproducibility.experiment_seed: 4294967296 is more than 4294967295",
        ),
        ("reproducibility: {seed: 1}", "reproducibility.seed: unknown property."),
        ("retention_policy: {log_retention_days: -1}", None),
        ("retention_policy: {}", "retention_policy.log_retention_days: is a required property"),
        (
            "retention_policy: {log_retention_days: 32768}",
            "retention_policy.log_retention_days: 32768 is more than 32767",
        ),
        ("security: {kerberos: {config_file: /k}}", None),
        ("security: {kerberos: {}}", "security.kerberos.config_file: is a required property"),
        ("data_layer: {type: anything}", None),
        ("data_layer: [a]", 'data_layer: ["a"] is not a map'),
        ("tensorboard_storage: {type: gcs, bucket: b}", None),
        ("tensorboard_storage: {type: ftp}", "tensorboard_storage: is not a checkpoint storage"),
        ("slurm: {slots_per_node: 4, sbatch_args: [-x], gpu_type: tesla}", None),
        ("slurm: {slots_per_node: 0}", "slurm.slots_per_node: 0 is less than 1"),
        ("slurm: {sbatch_args: -x}", 'slurm.sbatch_args: "-x" is not a list'),
        ("pbs: {pbsbatch_args: [-x]}", None),
        ("pbs: {sbatch_args: [-x]}", 'pbs.sbatch_args: unknown property. Did you mean "pbsbatch_args"?'),
        ("integrations: {webhooks: {webhook_id: [1], webhook_name: [a], exclude: true}}", None),
        ("integrations: {pachyderm: {dataset: {repo: r, branch: b}}}", None),
        ("integrations: {webhooks: {webhook_id: 1}}", "integrations.webhooks.webhook_id: 1 is not a list"),
        ("integrations: {slack: {}}", "integrations.slack: unknown property."),
    ],
)
def test_sections(changes: str, fault: str | None):
    judge(changes, fault)


def test_a_pattern_must_be_one():
    from tests.experiment.written import refused

    pytest.importorskip("re2")
    for text in ("(", "(?!a)"):
        (message,) = refused(f"log_policies: [{{pattern: '{text}', name: a}}]")
        assert message.startswith("<config>.log_policies[0]: pattern is not a regular expression in RE2's syntax: ")
    judge(r"log_policies: [{pattern: '\pL(?<n>a)', name: a}]", None)


def test_defaults():
    assert section("{}", "profiling")["enabled"] is False
    assert section("{}", "optimizations")["aggregation_frequency"] == 1
    assert section("{}", "slurm") == section("slurm: {sbatch_args: []}", "slurm") == {}
    assert "retention_policy" not in completed("{}").config


def test_policies_that_a_cluster_always_has():
    assert [policy["name"] for policy in section("log_policies: [{name: mine, pattern: x}]", "log_policies")] == [
        "mine",
        "CUDA OOM",
        "ECC Error",
    ]
    assert section("log_policies: [{name: ECC Error}]", "log_policies")[0] == {"name": "ECC Error"}
    assert len(section("log_policies: [{name: ECC Error}]", "log_policies")) == 2


def test_a_pod_is_completed_and_what_it_does_not_know_is_said():
    done = completed("environment: {pod_spec: {batches: 5, spec: {containers: [{security_context: {}}]}}}")
    assert done.config["environment"]["pod_spec"] == {
        "metadata": {"creationTimestamp": None},
        "spec": {"containers": [{"security_context": {}}]},
        "status": {},
    }
    assert len(done.warnings) == 2
