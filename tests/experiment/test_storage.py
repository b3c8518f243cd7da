"""``checkpoint_storage``."""

from __future__ import annotations

import pytest

from tests.experiment.written import completed, judge, section
from zero_trial.experiment.rules import ClusterDefaults

SUBDIR = "checkpoint_storage: storage_path must either be a relative directory or a subdirectory of host_path"
AZURE = "checkpoint_storage: exactly one of connection_string or account_url must be set"


@pytest.mark.parametrize(
    ("storage", "fault"),
    [
        ("{type: shared_fs, host_path: /a}", None),
        ("{type: shared_fs, host_path: /a, storage_path: b/c, propagation: rshared}", None),
        ("{type: shared_fs, host_path: /a, storage_path: /a/b}", None),
        ("{type: shared_fs, host_path: /a, storage_path: b/../c}", None),
        ("{type: shared_fs, host_path: /, storage_path: /b}", None),
        ("{type: shared_fs, host_path: /a, save_experiment_best: 3, save_trial_best: 0, save_trial_latest: 0}", None),
        ("{type: shared_fs, host_path: /a, checkpoint_path: c, tensorboard_path: t, container_path: x}", None),
        ("{type: directory, container_path: /a}", None),
        ("{type: s3, bucket: b, access_key: a, secret_key: s, endpoint_url: u, prefix: p/q}", None),
        ("{type: s3, bucket: b}", None),
        ("{type: gcs, bucket: b, prefix: p}", None),
        ("{type: azure, container: c, connection_string: s}", None),
        ("{type: azure, container: c, account_url: u, credential: k}", None),
        ("{save_trial_best: 5}", None),
        ("null", None),
        ("{type: directory}", "checkpoint_storage.container_path: is a required property"),
        ("{type: shared_fs, host_path: /a, storage_path: /b}", SUBDIR),
        ("{type: shared_fs, host_path: /a, storage_path: ../b}", SUBDIR),
        ("{type: shared_fs, host_path: /a, storage_path: /ab}", SUBDIR),
        ("{type: shared_fs, host_path: 3}", "checkpoint_storage.host_path: 3 is not a string"),
        ("{type: shared_fs, host_path: /a, bucket: b}", "checkpoint_storage.bucket: unknown property."),
        ("{type: s3}", "checkpoint_storage.bucket: is a required property"),
        ("{type: s3, bucket: b, prefix: a/../b}", "checkpoint_storage: prefix must not contain .."),
        ("{type: gcs, bucket: b, access_key: a}", "checkpoint_storage.access_key: unknown property."),
        ("{type: azure, container: c}", AZURE),
        ("{type: azure, container: c, connection_string: s, account_url: u}", AZURE),
        (
            "{type: hdfs, hdfs_url: u}",
            "checkpoint_storage.type: hdfs is no longer supported. Use shared_fs, directory, s3, gcs or azure.",
        ),
        (
            "{type: ftp}",
            'checkpoint_storage: is not an object where object["type"] is one of shared_fs, directory, s3, gcs or azure',
        ),
        ("{save_trial_best: -1}", "checkpoint_storage.save_trial_best: -1 is less than 0"),
        ("{save_trial_best: 1.0}", None),
        ("{type: null}", "checkpoint_storage.type: null is not a type of storage"),
        ("{host_path: /a}", "checkpoint_storage.type: is a required property, because host_path is given"),
        (
            "{type: azure, container: c, connection_string: s, credential: k}",
            "checkpoint_storage: credential and connection_string must not both be set",
        ),
        ("/a", 'checkpoint_storage: "/a" is not a map'),
    ],
)
def test_storage(storage: str, fault: str | None):
    judge(f"checkpoint_storage: {storage}", fault)


def test_how_many_are_kept():
    storage = section("checkpoint_storage: {save_trial_best: 5}", "checkpoint_storage")
    assert (storage["host_path"], storage["propagation"]) == ("/storage", "rprivate")
    assert [storage[f"save_{kept}"] for kept in ("experiment_best", "trial_best", "trial_latest")] == [0, 5, 1]


def test_a_cluster_without_storage_needs_the_experiments():
    judge_at = ClusterDefaults()
    assert (
        completed("checkpoint_storage: {type: gcs, bucket: b}", judge_at).config["checkpoint_storage"]["bucket"] == "b"
    )
    with pytest.raises(Exception, match="checkpoint_storage: is a required property"):
        completed("{}", judge_at)
    with pytest.raises(Exception, match=r"checkpoint_storage.type: is a required property"):
        completed("checkpoint_storage: {save_trial_best: 5}", judge_at)
