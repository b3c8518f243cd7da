"""What a run shows: the screen with and without a terminal, with a clock of the tests, and its
lines."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from zero_trial.launch.screen import (
    EventWatcher,
    LogWatcher,
    Screen,
    done_line,
    event_line,
    is_terminal,
    training_line,
    with_size,
)
from zero_trial.trial.runs.events import append_line


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def train(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "total_steps": 9, "loss": 1.0}


def test_without_a_terminal_a_line_every_ten_seconds():
    out, clock = io.StringIO(), Clock()
    screen = Screen(out, clock=clock)
    for second in range(1, 25):
        clock.now = second
        screen.show(train(second))
        screen.tick()
    screen.close()
    steps = [line.split()[2] for line in out.getvalue().splitlines()]
    assert steps == ["10/9", "20/9", "24/9"]  # and the last one, so that the end is known


def test_other_lines_come_at_once():
    out = io.StringIO()
    screen = Screen(out, clock=Clock())
    screen.show({"kind": "note", "message": "hello"})
    screen.show({"kind": "validation", "step": 4, "metrics": {"validation_loss": 2.5}})
    assert out.getvalue().splitlines() == ["note    hello", "eval    step 4  validation_loss 2.5"]


def test_on_a_terminal_one_line_moves():
    out = io.StringIO()
    screen = Screen(out, live=True)
    screen.show(train(3))
    screen.show(train(6))
    screen.say("saved   x")
    screen.close()
    text = out.getvalue()
    assert "\r" in text and "train   step 3/9 |" in text and "| loss 1" in text and "train   step 6/9 |" in text
    assert "saved   x\n" in text
    assert text.count("\n") == 2  # the line that stays, and the end of the live one


def test_a_terminal_without_room_is_none(monkeypatch: pytest.MonkeyPatch):
    main, terminal = os.openpty()
    try:
        with os.fdopen(terminal, "w") as stream:
            sizes = {"none": os.terminal_size((0, 0)), "some": os.terminal_size((80, 24))}
            for size, live in (("none", False), ("some", True)):
                monkeypatch.setattr(os, "get_terminal_size", lambda fd, size=size: sizes[size])
                assert is_terminal(stream) is live
    finally:
        os.close(main)
    assert not is_terminal(io.StringIO())


def test_quiet_is_silent():
    out = io.StringIO()
    screen = Screen(out, live=True, quiet=True)
    screen.show(train(1))
    screen.say("x")
    screen.close()
    assert out.getvalue() == ""


def test_a_watcher_shows_what_is_appended(tmp_path: Path):
    out = io.StringIO()
    events = tmp_path / "events.jsonl"
    watcher = EventWatcher(events, Screen(out, clock=Clock()))
    watcher.tick()
    events.write_text(json.dumps({"kind": "note", "message": "a"}) + "\n" + json.dumps(train(2)) + "\n")
    watcher.tick()
    watcher.close()
    assert out.getvalue() == "note    a\ntrain   step 2/9  loss 1\n"


def test_a_checkpoint_is_shown_with_its_size(tmp_path: Path):
    folder = tmp_path / "checkpoints" / "step-000002" / "model0"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 10)
    (folder / "b").write_bytes(b"x" * 5)
    event = with_size({"kind": "checkpoint", "storage_id": "step-000002"}, tmp_path)
    assert event["bytes"] == 15
    assert str(event["path"]).endswith("step-000002")


def test_a_log_is_copied_up_to_the_traceback(tmp_path: Path):
    out = io.StringIO()
    log = tmp_path / "rank-0.log"
    events = tmp_path / "events.jsonl"
    watcher = LogWatcher(log, out, stop_at="[bye]", events=events)
    log.write_text("step 1\nstep")
    watcher.tick()
    assert out.getvalue() == "step 1\n"
    for rank in (0, 1):  # rank 0's is in its log
        append_line(events, {"kind": "note", "message": f"rank {rank} has waited", "rank": rank})
    watcher.tick()
    log.write_text("step 1\nstep 2\n[bye]\nTraceback\n")
    watcher.tick()
    watcher.close()
    assert out.getvalue() == "step 1\nrank 1 has waited\nstep 2\n"


def test_what_ranks_say_does_not_control_the_terminal(tmp_path: Path):
    """Escape sequences of a trial could rename the window, fill the clipboard or overwrite
    lines."""
    out = io.StringIO()
    screen = Screen(out, live=False)
    screen.say("failed \x1b]52;c;aGk=\x07rank 1")
    screen.show({"kind": "note", "message": "a\x1b[2Jb\x9b31mc"})
    screen.show({"kind": "train", "step": 1, "loss": "\x1b]0;t\x07nan"})
    screen.close()
    log = tmp_path / "rank-0.log"
    log.write_text("plain \x1b[31mred\x1b[0m\n")
    watcher = LogWatcher(log, out, stop_at="", events=tmp_path / "events.jsonl")
    watcher.close()
    assert out.getvalue().splitlines() == ["failed rank 1", "note    abc", "train   step 1  loss nan", "plain red"]


SPEED = {"tokens_per_second": 9812.0, "samples_per_second": 9.0}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"loss": 2.1134, **SPEED, "mfu": 0.4123, "lr": 2.7e-4, "eta_seconds": 12.3, "total_steps": 200},
            "step 3/200  loss 2.113  9.81k tok/s  mfu 41.2%  lr 2.7e-04  eta 00:12",
        ),
        # every metric of train_batch
        ({"loss": 2.0, "accuracy": 0.25, "each": {"accuracy": [0.25], "loss": [2.0]}}, "step 3  loss 2  accuracy 0.25"),
        ({}, "step 3"),  # what is not known is not shown
        ({"samples_per_second": 12.0}, "step 3  12 samples/s"),
    ],
)
def test_a_training_line(event: dict[str, Any], line: str):
    assert training_line({"kind": "train", "step": 3, **event}) == f"train   {line}"


@pytest.mark.parametrize(
    ("kind", "event", "line"),
    [
        ("validation", {"step": 200, "metrics": {"loss": 2.0411, "batches": 200}}, "eval    step 200  loss 2.041"),
        ("checkpoint", {"path": "runs/0001/step-000200", "bytes": 15000000}, "saved   runs/0001/step-000200  14.3 MiB"),
        ("note", {"message": "ranks differ"}, "note    ranks differ"),
        ("plan", {"message": "params 1.2M  fits", "stage": 2}, "plan    params 1.2M  fits"),
        ("done", {}, None),
        ("unknown", {}, None),
    ],
)
def test_other_events(kind: str, event: dict[str, Any], line: str | None):
    assert event_line({"kind": kind, **event}) == line
    assert event_line({}) is None


MEASURED = {"memory_measured_peak_bytes": 30 * 2**20, "ranks": 2}
PLANNED = {"memory_planned_bytes": 31 * 2**20, "memory_plan_error_percent": 3.33}
BASELINES = {"chance_accuracy": 0.1, "train_loss": 0.2, "noise_loss": float("nan")}
WHOLE = {
    "train_seconds": 41.3,
    "ranks": 2,
    "zero_stage": 2,
    "seed": 7,
    **SPEED,
    "initial_validation": {"val_bits_per_byte": 8.04},
    "final_validation": {"val_bits_per_byte": 3.123},
    "unigram_bits_per_byte": 4.61,
    "xz_bits_per_byte": 2.31,
    "peak_memory_bytes": [60 * 2**20, 61 * 2**20],
}


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({}, "finished"),
        ({"train_seconds": 7200, "final_validation": {"acc": 0.5}, "ranks": 1}, "2:00:00 · acc 0.5 · 1 rank"),
        ({"initial_validation": {"acc": 0.5}, "final_validation": {"acc": 0.5}}, "finished · acc 0.5"),
        (
            WHOLE,
            "41 s · val_bits_per_byte 8.04 -> 3.123 (unigram 4.61, xz 2.31) · 9.81k tok/s · peak 61.0 MiB/rank "
            "· 2 ranks · ZeRO-2 · seed 7",
        ),
        # the plan is about live tensors; the process's peak holds interpreter and libraries
        (MEASURED | PLANNED, "finished · tensors 30.0 MiB/rank (planned 31.0 MiB, error +3.3 %) · 2 ranks"),
        (MEASURED, "finished · tensors 30.0 MiB/rank · 2 ranks"),
        (PLANNED, "finished"),
        # baselines are figures of the same quantity
        (
            {"final_validation": {"accuracy": 0.9, "validation_loss": 0.3}, **BASELINES},
            "finished · accuracy 0.9 (chance 0.1) · validation_loss 0.3 (train 0.2)",
        ),
    ],
)
def test_the_last_line(summary: dict[str, Any], line: str):
    assert done_line(summary) == f"done    {line}"
