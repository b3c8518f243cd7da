"""What a cluster adds."""

from __future__ import annotations

from tests.experiment.written import completed
from zero_trial.experiment.rules import ClusterDefaults

STORAGE = {"type": "shared_fs", "host_path": "/s"}


def test_the_clusters_word_counts_where_the_experiment_says_nothing():
    cluster = ClusterDefaults(
        checkpoint_storage=STORAGE,
        task_container_defaults={
            "image": "cluster/image:1",
            "environment_variables": ["A=cluster"],
            "bind_mounts": [{"host_path": "/d", "container_path": "/d"}],
            "shm_size_bytes": 1024,
            "slurm": {"sbatch_args": ["-c"]},
            "preemption_timeout": 30,
        },
        name="Experiment (happy-heron)",
        experiment_seed=5,
    )
    config = completed(
        "{name: null, environment: {image: {cuda: mine}, environment_variables: [A=mine]}, slurm: {sbatch_args: [-u]}}",
        cluster,
    ).config
    assert config["name"] == "Experiment (happy-heron)"
    assert config["reproducibility"] == {"experiment_seed": 5}
    assert config["environment"]["image"] == {"cpu": "cluster/image:1", "cuda": "mine", "rocm": "cluster/image:1"}
    assert config["environment"]["environment_variables"]["cpu"] == ["A=cluster", "A=mine"]
    assert config["bind_mounts"][0]["container_path"] == "/d"
    assert (config["resources"]["shm_size"], config["preemption_timeout"]) == (1024, 30)
    assert config["slurm"]["sbatch_args"] == ["-c", "-u"]


def test_nothing_is_added_by_default():
    assert ClusterDefaults().as_config()["checkpoint_storage"] is None
