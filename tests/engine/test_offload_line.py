"""Tests for zero_trial/engine/offload_config.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import zero_trial
from tests.engine.offloaded import Net, engine_of, loss
from tests.support.dense import STAGES, Case, build_engine
from zero_trial.engine.offload_config import offload_line


def with_params(folder: Path, **given: Any) -> zero_trial.Engine:
    section = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0} | given
    return build_engine(Case(Net, loss), STAGES["zero3-free"] | {"offload_param": section})


def test_the_line_at_the_start(tmp_path: Path) -> None:
    line = offload_line(engine_of("zero1", {}, str(tmp_path)))
    assert line is not None and line.startswith("offload: 0.")
    assert f"MiB of masters and optimizer state per rank in {tmp_path} (" in line and "; 3 buffers of 0.0 MiB" in line
    assert offload_line(engine_of("zero1", {}, None)) is None


def test_a_relative_folder_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    line = offload_line(engine_of("zero1", {}, "disk"))
    assert line is not None and f" in {tmp_path}/disk (" in line


def test_initialize_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zero_trial"):
        engine = engine_of("zero1", {}, str(tmp_path))
    assert offload_line(engine) in [record.getMessage() for record in caplog.records]


def test_a_ratio_says_what_stays(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 1, "ratio": 0.5}
    line = offload_line(build_engine(Case(Net, loss), STAGES["zero3-free"] | {"offload_optimizer": offload}))
    assert line is not None
    assert line.endswith("; state of 9,376 elements stays in memory (ratio 0.5)")


def test_parameters_in_a_file(tmp_path: Path) -> None:
    line = offload_line(with_params(tmp_path))
    assert line is not None and line.startswith("offload: 0.2 MiB of parameters per rank in ")
    assert f" in {tmp_path} (" in line and line.endswith("; 0 elements of this rank's shards stay in memory")


def test_parameters_that_all_stay(tmp_path: Path) -> None:
    """DeepSpeed's default of max_in_cpu holds a small model: nothing happens, and the line says why."""
    assert offload_line(with_params(tmp_path, max_in_cpu=10**9)) == (
        "offload: all parameters stay in memory: max_in_cpu and stage3_param_persistence_threshold hold them; "
        "26,336 elements of this rank's shards stay in memory"
    )
