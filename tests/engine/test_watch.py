"""Who watches an engine, by what ds_config says."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools


def lines(config: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is printed in ``steps`` steps."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "zero_trial"):
        train_engine(make_engine(TinyLM, config), range(steps))
    return [record.getMessage() for record in caplog.records]


def test_nobody_watches_unless_asked():
    engine = make_engine(TinyLM, {})
    assert vars(engine.observer) == dict.fromkeys(vars(engine.observer)) | {"monitor": engine.monitor}
    assert not engine.monitor.enabled


def test_steps_per_print_and_throughput(caplog: pytest.LogCaptureFixture):
    printed = lines({"steps_per_print": 2}, 5, caplog)
    assert [line.split()[0] for line in printed] == ["step=2", "step=4"]
    assert all(" samples/s=" in line for line in printed)
    without = lines({"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}}, 2, caplog)
    assert len(without) == 1 and "samples/s" not in without[0]


def test_wall_clock_breakdown(caplog: pytest.LogCaptureFixture):
    config = {"steps_per_print": 1, "wall_clock_breakdown": True, "gradient_accumulation_steps": 2}
    printed = [line for line in lines(config, 2, caplog) if line.startswith("ms per step: ")]
    assert len(printed) == 2
    parts = [part.rsplit(" ", 1) for part in printed[1].removeprefix("ms per step: ").split(" | ")]
    assert [name for name, _ in parts] == ["forward", "backward", "reduce wait", "step", "other"]
    assert all(float(value) >= 0 for _, value in parts) and float(parts[0][1]) > 0
    assert not [line for line in lines({"steps_per_print": 1}, 1, caplog) if line.startswith("ms per step")]


def test_details_without_steps_per_print_come_every_ten_steps(caplog: pytest.LogCaptureFixture):
    printed = lines({"memory_breakdown": True}, 11, caplog)
    assert len(printed) == 1 and printed[0].startswith("memory: parameters 0.2 MiB")
    assert lines({"memory_breakdown": False}, 11, caplog) == []


def test_dump_state(caplog: pytest.LogCaptureFixture):
    assert lines({"dump_state": True}, 0, caplog)[0].startswith("configuration:\ntrain_batch_size ")
    assert lines({}, 0, caplog) == []


def test_monitors_get_the_events_of_a_run(tmp_path: Path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    engine = make_engine(TinyLM, monitor | {"steps_per_print": 1})
    losses = train_engine(engine, range(3))
    engine.monitor.write_events([("Mine/accuracy", 0.5, engine.global_samples)])
    read = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in read] == ["step", "8", "16", "24"]
    assert [float(line.split(",")[1]) for line in read[1:]] == pytest.approx(losses)
    assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()
    assert not (tmp_path / "job" / "Train_Samples_loss_scale.csv").exists()
    assert (tmp_path / "job" / "Mine_accuracy.csv").read_text().splitlines() == ["step,accuracy", "24,0.5"]
    engine.destroy()
    assert not engine.monitor.enabled


def test_the_loss_scale_of_fp16(tmp_path: Path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 5}}
    engine = make_engine(TinyLM, monitor | autocast)
    train_engine(engine, range(1))
    assert (tmp_path / "job" / "Train_Samples_loss_scale.csv").read_text().splitlines() == ["step,loss_scale", "8,32.0"]


def test_several_watchers_of_phases():
    engine = make_engine(TinyLM, {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}})
    observer = engine.observer
    assert observer.timers is not None and observer.profiler is not None
    alone = make_engine(TinyLM, {"wall_clock_breakdown": True}).observer
    assert alone.timers is not None and alone.profiler is None


def test_disable_python_gc():
    was = gc.isenabled()
    gc.enable()
    try:
        engine = make_engine(TinyLM, {"disable_python_gc": True})
        assert not gc.isenabled()
        engine.destroy()
        assert gc.isenabled()
        make_engine(TinyLM, {})
        assert gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()


def on_two_ranks(logger: dict[str, Any]) -> tuple[list[str], dict[str, dict[str, int]], bool]:
    """Printed lines, the summary, and whether this rank reports at all."""
    printed: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_trial").addHandler(handler)
    logging.getLogger("zero_trial").setLevel(logging.INFO)  # the ranks of the pool live on from test to test
    try:
        engine = make_engine(TinyLM, {"zero_optimization": {"stage": 2}, "steps_per_print": 1, "comms_logger": logger})
        train_engine(engine, range(1))
    finally:
        logging.getLogger("zero_trial").removeHandler(handler)
    return printed, engine.comms_summary(), engine.observer.lines is not None


def test_comms_logger(ranks: Pools):
    first, second = ranks(2).run(on_two_ranks, {"enabled": True})
    assert second[0] == [] and not second[2]
    printed, summary, _ = first
    table = next(line for line in printed if line.startswith("communication"))
    scatter = summary["reduce_scatter/shard"]
    assert scatter["bytes"] == 4 * scatter["elements"] > 0
    assert f"{scatter['bytes']:,}" in table and "all_gather/shard" in table
    assert not [
        line for line in ranks(2).run(on_two_ranks, {"enabled": False})[0][0] if line.startswith("communication")
    ]


def test_comms_logger_of_some_collectives(ranks: Pools):
    printed, summary, _ = ranks(2).run(on_two_ranks, {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]})[
        0
    ]
    assert summary and all(name.startswith("all_gather/") for name in summary)
    assert "reduce_scatter" not in "".join(printed)
