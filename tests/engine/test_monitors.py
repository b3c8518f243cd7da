"""The monitor that ds_config asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.monitors import CsvFiles, Event, Monitor, TensorBoard, build_monitor, folder_of
from zero_trial.errors import ConfigError


class Memory:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def write(self, events: Sequence[Event]) -> None:
        self.calls.append(list(events))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_every_writer_gets_every_event():
    first, second = Memory(), Memory()
    monitor = Monitor([first, second])
    monitor.write_events([("a", 1.0, 8)])
    monitor.write_events([("b", 2.0, 16)], flush=False)
    monitor.close()
    assert first.calls == second.calls == [[("a", 1.0, 8)], "flush", [("b", 2.0, 16)], "close"]
    assert not monitor.enabled


def test_nobody_listens():
    monitor = Monitor()
    assert not monitor.enabled
    monitor.write_events([("a", 1.0, 8)])
    monitor.close()


def test_only_rank_0_writes(tmp_path: Path):
    config = read_ds_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    assert not build_monitor(config, 1).enabled
    assert not (tmp_path / "job").exists()
    assert build_monitor(config, 0).enabled
    assert (tmp_path / "job").is_dir()


def test_nothing_is_switched_on_by_itself():
    assert not build_monitor(read_ds_config({"csv_monitor": {"job_name": "x"}}), 0).enabled


def test_several_at_once(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    both = {"enabled": True, "output_path": str(tmp_path)}
    monitor = build_monitor(read_ds_config({"tensorboard": both, "csv_monitor": both | {"job_name": "c"}}), 0)
    assert [type(writer) for writer in monitor._writers] == [TensorBoard, CsvFiles]
    monitor.write_events([("a", 1.0, 1)])
    monitor.close()
    assert list((tmp_path / "DeepSpeedJobName").iterdir()) and (tmp_path / "c" / "a.csv").exists()


@pytest.mark.parametrize(
    ("section", "package"), [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_an_error_on_every_rank(
    section: str, package: str, rank: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("zero_trial.engine.monitors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{section}.enabled: the package {package} is not installed"):
        build_monitor(read_ds_config({section: {"enabled": True}}), rank)


def test_folders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/nowhere")
    assert folder_of("", "tensorboard", "job") == Path("tensorboard/job")
    assert folder_of("~/logs", "tensorboard", "job") == Path("/nowhere/logs/job")
