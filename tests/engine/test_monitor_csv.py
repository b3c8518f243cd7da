"""CSV files of scalars."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.engine.monitors import CsvFiles
from zero_trial.errors import ConfigError


def test_one_file_per_name(tmp_path: Path):
    files = CsvFiles(tmp_path / "job")
    files.write([("Train/Samples/lr", 0.1, 8), ("Train/Samples/train_loss", 2.5, 8)])
    files.write([("Train/Samples/lr", 0.05, 16)])
    files.close()
    lr = (tmp_path / "job" / "Train_Samples_lr.csv").read_text()
    assert lr.splitlines() == ["step,lr", "8,0.1", "16,0.05"]
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines() == ["step,train_loss", "8,2.5"]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path):
    for step in (1, 2):
        files = CsvFiles(tmp_path)
        files.write([("x", float(step), step)])
        files.close()
    assert (tmp_path / "x.csv").read_text().splitlines() == ["step,x", "1,1.0", "2,2.0"]


def test_flushed_events_can_be_read_while_the_run_goes_on(tmp_path: Path):
    files = CsvFiles(tmp_path)
    files.write([("x", 1.0, 1)])
    files.flush()
    assert (tmp_path / "x.csv").read_text().splitlines()[-1] == "1,1.0"
    files.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: the folder cannot be made"):
        CsvFiles(tmp_path / "taken" / "job")
