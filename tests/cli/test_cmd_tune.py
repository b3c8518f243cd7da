"""``zero-trial tune``: candidates, short trials and the ds_config's file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.planning.project import DS_CONFIG, project
from zero_trial.cli import cmd_tune
from zero_trial.cli.main import main
from zero_trial.errors import ExitStatus, TrialError
from zero_trial.planning import tune
from zero_trial.planning.tune import (
    ACCUMULATION,
    MICRO,
    STAGE,
    Margin,
    TrainingWay,
    TuneFacts,
    TuneTrial,
    Weighed,
    own_way,
    select,
    ways_to_train,
)


def tuned(folder: Path, *options: str, **ds_config: Any) -> tuple[Path, list[str]]:
    """A project whose ds_config has these keys, too, and the words that tune it."""
    made = project(folder)
    made.folder.joinpath("ds_config.json").write_text(json.dumps({**DS_CONFIG, **ds_config}))
    return made.folder, ["tune", str(made.experiment), str(made.folder), "--slots", "1", *options]


def test_what_would_be_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = tuned(tmp_path, "--dry-run", "--keep", "zero_optimization.stage")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if line.startswith("fits")] == [
        f"fits    ZeRO-0, micro batch {micro} x {8 // micro}" for micro in (8, 4, 2)
    ]


def test_the_autotuning_section_limits_the_micro_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"max_train_micro_batch_size_per_gpu": 4, "min_train_micro_batch_size_per_gpu": 2}
    for more, sizes in ({}, (8, 4, 2)), (limits, (4, 2)), ({"num_tuning_micro_batch_sizes": 4}, (8, 4, 2, 1)):
        folder = tmp_path / str(len(sizes))
        folder.mkdir()
        batch = {"train_micro_batch_size_per_gpu": sizes[0]}
        _, words = tuned(folder, "--dry-run", "--keep", "zero_optimization.stage", autotuning=more, **batch)
        assert main(words) == 0
        fits = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fits")]
        assert len(fits) == len(sizes)
        assert all(f"micro batch {size} " in line for size, line in zip(sizes, fits, strict=True))


def test_what_cannot_fit_is_pruned_with_the_planned_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = tuned(tmp_path, "--dry-run", "--memory", "1MiB", "--keep", "zero_optimization.stage")
    assert main(words) == ExitStatus.DOES_NOT_FIT
    captured = capsys.readouterr()
    assert "with the margin, has 1.0 MiB" in captured.out
    assert "has 1.0 MiB" in captured.err


@pytest.mark.parametrize(
    ("options", "ds_config"),
    [
        (("--write", "hyperparameters.ds_config.gradient_clipping=1.0"), {}),
        (("--write", "trainer=deepspeed"), {}),
        (("--keep", "zero_optimisation.stage"), {}),
        (("--trials", "0"), {}),
        (("--steps", "-1"), {}),
        ((), {"autotuning": {"tuner_type": "random"}}),
        ((), {"autotuning": {"max_train_batch_size": 4}}),
    ],
)
def test_what_is_refused_before_anything_is_planned(
    options: tuple[str, ...],
    ds_config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, words = tuned(tmp_path, "--dry-run", *options, **ds_config)
    assert main(words) == ExitStatus.USER_ERROR
    assert "plan" not in capsys.readouterr().out


def test_a_file_with_comments_is_not_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = tuned(tmp_path, "--dry-run", "--write")
    written = folder / "ds_config.json"
    written.write_text("// the batch of the paper\n" + written.read_text())
    assert main(words) == ExitStatus.USER_ERROR
    assert "--write" in capsys.readouterr().err


def test_a_dry_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = tuned(tmp_path, "--dry-run", "--json", "--keep", "zero_optimization.stage", "--memory", "64GiB")
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["way"]["train_micro_batch_size_per_gpu"] for each in found["fits"]] == [8, 4, 2]
    assert all(each["bytes"] > 0 for each in found["fits"])
    assert found["limit"] == 64 << 30
    assert found["pruned"]


def test_ctrl_c_concludes_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[TrainingWay] = []

    def run(request: object, way: TrainingWay, *_: object) -> TuneTrial:
        done.append(way)
        if len(done) == 2:
            raise KeyboardInterrupt
        return TuneTrial(way, 1.0, "", 2.0)

    monkeypatch.setattr(tune, "run_trial", run)
    folder, words = tuned(tmp_path, "--write", "--keep", "zero_optimization.stage")
    before = (folder / "ds_config.json").read_text()
    assert main(words) == ExitStatus.INTERRUPTED
    shown = capsys.readouterr().out
    assert (folder / "ds_config.json").read_text() == before
    trains = next(line for line in shown.splitlines() if line.startswith("train "))
    assert trains.endswith(" --slots 1")


def test_a_reason_is_said_once() -> None:
    facts = TuneFacts(samples=8, current={STAGE: 0, MICRO: 8, ACCUMULATION: 1}, keep=(STAGE,))
    why = {8: "", 4: "other samples", 2: "other samples", 1: "too large"}
    found = select(
        ways_to_train(facts),
        lambda way: Weighed(1, refusal=why[way.micro_batch]),
        Margin(0, 0),
        None,
        sizes=3,
        own=own_way(facts),
    )
    pruned = [line for line in cmd_tune._selection_lines(found) if line.startswith("pruned")]
    assert [line.rpartition(": ")[2] for line in pruned] == ["other samples", "too large"]
    assert " and 1 more" in pruned[0] and "more" not in pruned[1]


@pytest.mark.parametrize("accelerator", [False, True])
def test_plans_for_gpus_are_made_in_another_process(accelerator: bool) -> None:
    with cmd_tune._planning(accelerator) as call:
        assert (call(os.getpid) != os.getpid()) is accelerator


def test_a_killed_plan_is_an_error_and_no_traceback() -> None:
    with pytest.raises(TrialError, match="was killed"), cmd_tune._planning(True) as call:
        call(os._exit, 1)


@pytest.mark.smoke
def test_two_trials_and_what_they_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--keep", "zero_optimization.stage", "--trials", "2", "--steps", "2", "--json", "--write")
    folder, words = tuned(tmp_path, *options)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 2
    assert all(trial["steps_per_second"] > 0 and not trial["why"] for trial in found["trials"])
    written = json.loads((folder / "ds_config.json").read_text())
    assert written == {**DS_CONFIG, **found["best"]["changes"]}
    assert not list((tmp_path / "tunes").iterdir())  # measured trials leave no folder


def test_gpus_that_are_elsewhere_are_planned_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = tuned(tmp_path, "--gpu-memory", "8GiB", "--keep", "zero_optimization.stage")
    assert main(words) == ExitStatus.USER_ERROR
    assert "--gpu-memory" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert "limit 8.0 GiB per rank" in capsys.readouterr().out
