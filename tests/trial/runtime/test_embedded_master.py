"""Whole trials by Determined's ``det`` and Determined's harness under the embedded master: paused,
activated, crashed, started again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.master.det import SECONDS, Det, running, until
from tests.support.storing import ObjectStorage
from tests.trial.runtime.line_model import DS_CONFIG, FILES, experiment

pytest.importorskip("determined")
from determined.common.api import bindings


@pytest.fixture(scope="module")
def det(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Det]:
    with pytest.MonkeyPatch.context() as patch:
        # det has a home of its own here; native kernels that were built once are found in the usual
        # place
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
        with running(tmp_path_factory.mktemp("embedded")) as master:
            yield master


def submit(det: Det, front: str, changes: Mapping[str, Any] | None = None, **hyperparameters: Any) -> int:
    """``det experiment create``; the experiment's number, which is its trial's too while each has
    one. ``changes``: whole sections of the configuration."""
    context = det.folder / "line"
    context.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (context / name).write_text(text)
    config = {
        **experiment(front, **hyperparameters),
        "resources": {"slots_per_trial": 2},
        "reproducibility": {"experiment_seed": 7},
        "max_restarts": 1,
        **(changes or {}),
    }
    return det.create(context=context, **config)


def workloads(det: Det, trial: int, kind: str) -> dict[int, dict[str, Any]]:
    """Step -> metrics."""
    found = det.json("trial", "describe", str(trial), "--metrics")["workloads"]
    return {w[kind]["totalBatches"]: w[kind]["metrics"]["avgMetrics"] for w in found if w.get(kind)}


def test_a_pause_and_a_crash_with_one_restart_give_the_bits_of_an_uninterrupted_run(det: Det, tmp_path: Path) -> None:
    """What is trained again is reported once. The steps of the uninterrupted run, a script, go on
    while the harness and boto3 upload its checkpoint, and the master is told of the checkpoint when
    its last file is stored."""

    def saved() -> list[int]:
        found = bindings.get_GetExperimentCheckpoints(det.session(), id=whole).checkpoints
        return sorted(int(each.metadata["steps_completed"]) for each in found)

    bucket, gate = ObjectStorage(), det.folder / "gate"
    in_background = {**DS_CONFIG, "checkpoint": {"writer": {"decoupled": True}}}
    changes = {
        "data": {"ds_config": in_background},
        "checkpoint_storage": bucket.section,
        "checkpoint_policy": "none",
        "min_checkpoint_period": {"batches": 3},
    }
    stopped = submit(det, "class", wait_at=2, fault="crash", at=6, mark=str(tmp_path / "crashed"))
    try:
        whole = submit(det, "script", changes, settle_at=3, wait_at=5, wait_for=str(gate))
        det.wait_for_line(stopped, "waits at its gate")
        det.ok("experiment", "pause", str(stopped))
        det.wait(stopped, "PAUSED")
        det.ok("experiment", "activate", str(stopped))
        det.wait_for_line(whole, "waits at its gate")  # in the sixth step; the upload has begun after the fourth
        assert bucket.asked.wait(SECONDS), det.logs(whole)
        assert bucket.objects == {} and saved() == []
        bucket.open.set()
        until(lambda: saved() == [3], "the checkpoint is never reported")  # while rank 0 waits in the step
        gate.touch()
        assert det.wait(whole) == "COMPLETED", det.logs(whole)
    finally:
        bucket.close()
    assert saved() == [3, 6, 8]
    names = [name.partition("/")[2] for name in bucket.objects]
    assert names.count("metadata.json") == names.count("model0/manifest.json") == 3

    assert det.wait(stopped) == "COMPLETED", det.logs(stopped)
    log = det.logs(stopped)
    assert "start   params 5  resumed at step 3" in log and "resumed at step 4" in log
    assert len(re.findall(r"run \d ended with exit code \d+: (?:rank \d: )?KeyError: 'no such thing'", log)) == 1
    assert list(workloads(det, stopped, "training")) == list(range(1, 9))
    assert list(workloads(det, stopped, "validation")) == [4, 8]
    assert [det.trials(each)[0]["restarts"] for each in (whole, stopped)] == [0, 1]
    for kind in ("training", "validation"):
        assert workloads(det, stopped, kind) == workloads(det, whole, kind)
    uuid = re.findall(r"checkpoint ([0-9a-f-]{36})", log)[-1]
    det.ok("checkpoint", "download", uuid, "-o", str(tmp_path / "latest"))
    assert json.loads((tmp_path / "latest" / "trial_state.json").read_text())["step"] == 8


def test_hyperparameters_that_one_rank_cannot_train_end_all_ranks_without_a_restart(det: Det) -> None:
    number = submit(det, "module", fault="invalid", at=2)
    det.wait(number)
    log = det.logs(number)
    assert log.count("hyperparameters that cannot be trained: too small") == 1 and "Traceback" not in log
    assert det.trials(number)[0]["restarts"] == 0
