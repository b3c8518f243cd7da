"""A folder of runs as a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.report.test_run_folder import SUMMARY, make, start, train, validation
from zero_trial.errors import ConfigError
from zero_trial.report.run_reader import from_runs
from zero_trial.report.sweep_page import render_sweep


def run(folder: Path, rate: float, loss: float, metric: str = "validation_loss") -> None:
    make(folder, [start(0), train(4, loss)], [validation(2, loss + 1), validation(4, loss)], summary=SUMMARY)
    config = {
        "name": "small",
        "searcher": {"name": "single", "metric": metric},
        "hyperparameters": {"width": 64},
        "data": {
            "ds_config": {"optimizer": {"params": {"lr": rate}}},
            "zero_trial": {"model_dir": f"../{folder.name}"},
        },
    }
    (folder / "config.lock.yaml").write_text(yaml.safe_dump(config))


def test_what_differs_is_what_was_swept(tmp_path: Path) -> None:
    for number, (rate, loss) in enumerate(((0.1, 2.0), (0.01, 1.0), (0.001, 3.0))):
        run(tmp_path / f"{number:04d}", rate, loss)
    (tmp_path / "notes").mkdir()
    report = from_runs(tmp_path)
    assert [trial.id for trial in report.ranked()] == ["0001", "0000", "0002"]
    assert [axis.name for axis in report.axes] == ["data.ds_config.optimizer.params.lr"]
    assert report.ranked()[0].point == {"data.ds_config.optimizer.params.lr": 0.01}
    assert report.trials[0].steps == 4
    assert report.best is not None and report.best.trial == "0001"
    best = yaml.safe_load(report.best.text)
    assert best["data"] == {"ds_config": {"optimizer": {"params": {"lr": 0.01}}}}
    assert "0001" in render_sweep(report)


def test_runs_of_different_metrics_cannot_be_compared(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.1, 1.0)
    run(tmp_path / "b", 0.1, 1.0, metric="accuracy")
    with pytest.raises(ConfigError, match="different metrics: got accuracy, validation_loss"):
        from_runs(tmp_path)


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no runs here"):
        from_runs(tmp_path)
    with pytest.raises(ConfigError, match="no runs here"):
        from_runs(tmp_path / "none")
