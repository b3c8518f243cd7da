"""The whole master in this process with Determined's harness in its trials: what no fake can
show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.master.fakes import experiment
from tests.support.archive import tgz
from zero_trial.master.agent.agent import ThisMachine
from zero_trial.master.agent.cluster import ClusterManager
from zero_trial.master.agent.environment import SlotDevices
from zero_trial.master.core import Master
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.http import listen
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import Experiment, NewExperiment
from zero_trial.util.process_tree import marked

TRAIN = """
import os, subprocess, sys, time
import determined as det
from determined import core

info = det.get_cluster_info()
mode = info.trial.hparams["mode"]
print("hook", os.environ.get("FROM_HOOK"), "user", os.environ.get("FROM_CONFIG"), "leak", os.environ.get("SECRET_OF_THE_MASTER"))
print("paths", det._info.DEFAULT_CLUSTER_INFO_PATH, os.path.exists("/run/determined/info"), flush=True)
if mode == "plain":
    subprocess.Popen(["setsid", "sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with core.init(distributed=None, tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    if mode == "deaf":
        print("running", flush=True)
        time.sleep(300)
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
        (path / "state").write_text("1")
    context.train.report_validation_metrics(1, {"val": 0.5, "batches": 1})
"""


class Live:
    """A master on four slots with its server."""

    def __init__(self, root: Path) -> None:
        self.home = MasterDirectory(root)
        self.home.prepare()
        import os

        env = {**os.environ, "SECRET_OF_THE_MASTER": "leaked"}
        engine = ThisMachine(self.home, SlotDevices(4, cores=4), host_env=env)
        self.master = Master(self.home, ClusterManager(self.home, engine, host_env=env, grace=1.0))
        self.server = listen(self.master)
        self.master.begin(self.server.url)

    def create(self, mode: str, files: dict[str, bytes] | None = None, **config: Any) -> Experiment:
        text = yaml.safe_dump(experiment(hyperparameters={"mode": mode}, **config))
        context = tgz({"train.py": TRAIN.encode(), **(files or {})})
        return self.master.experiments.create(NewExperiment(text, context, "ada")).experiment

    def wait(
        self, made: Experiment, wanted: Callable[[Experiment], bool] = lambda found: found.state.final
    ) -> Experiment:
        """The experiment once it is as wanted; fails after two minutes with the log."""
        tick = threading.Event()
        for _ in range(2400):
            found = self.master.experiments.get(made.id)
            if wanted(found):
                return found
            tick.wait(0.05)
        raise AssertionError("\n".join(self.log(made)))

    def log(self, made: Experiment) -> list[str]:
        (trial,) = self.master.experiments.trials(made.id)
        return [line.message for line in self.master.trials.logs(trial.id, LogQuery()) if line is not None]

    def said(self, made: Experiment, word: str) -> bool:
        return any(line.startswith(word) for line in self.log(made))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    made = Live(tmp_path_factory.mktemp("master") / "root")
    yield made
    made.master.stop_runs()
    made.server.close()
    made.master.close()


@pytest.mark.smoke
def test_a_trial_under_the_genuine_harness(live: Live, tmp_path: Path) -> None:
    """It has a startup hook, a storage of its own, and a daemon, which does not outlive it."""
    folder = tmp_path / "deep" / "saved"
    made = live.create(
        "plain",
        {"startup-hook.sh": b"export FROM_HOOK=hooked\n"},
        environment={"environment_variables": ["FROM_CONFIG=configured"]},
        checkpoint_storage={"type": "directory", "container_path": str(folder)},
    )
    found = live.wait(made)
    log = live.log(made)
    assert found.state.value == "COMPLETED", "\n".join(log)
    assert found.best_metric == 0.5 and found.checkpoint_count == 1
    assert "hook hooked user configured leak None" in log
    (paths,) = [line.split() for line in log if line.startswith("paths")]
    assert paths[1].startswith(str(live.home.allocations)) and paths[2] == "False"
    (saved,) = live.master.experiments.checkpoints(made.id)
    assert live.master.checkpoints.directory(saved.uuid) == folder / saved.uuid
    assert (folder / saved.uuid / "state").read_text() == "1"
    (trial,) = live.master.experiments.trials(made.id)
    assert marked("DET_ALLOCATION_ID", f"{live.master.state.allocations_of(trial)}.1") == []


def test_a_trial_that_ignores_preemption_is_killed_after_its_time(live: Live) -> None:
    made = live.create("deaf", preemption_timeout=1)
    live.wait(made, lambda _: live.said(made, "running"))
    live.master.experiments.pause(made.id)
    (trial,) = live.master.experiments.trials(made.id)
    name = f"{live.master.state.allocations_of(trial)}.1"
    live.wait(made, lambda _: live.master.tasks.allocation(name).state.value == "TERMINATED")
    assert live.master.experiments.get(made.id).state.value == "PAUSED"
    assert marked("DET_ALLOCATION_ID", name) == []
    live.master.experiments.kill(made.id)
    assert live.wait(made).state.value == "CANCELED"
