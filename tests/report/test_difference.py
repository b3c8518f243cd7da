"""Two runs compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.report.difference import (
    ABSENT,
    RunRecord,
    SettingChange,
    Trace,
    changes,
    compare_runs,
    read_run,
)

LOCK = """
searcher: {name: single, metric: loss, max_length: {batches: 9}}
hyperparameters: {lr: 0.1, sizes: [1, 2], empty: {}}
data: {zero_trial: {model_dir: ../m, versions: {torch: 2.13.0}}}
"""


def train(step: int, losses: list[Any], **more: Any) -> dict[str, Any]:
    """The event of an exchange at ``step``: rank 0's losses of the steps since the last one."""
    return {"kind": "train", "step": step, "loss": 0.0, "each": {"loss": losses}, **more}


def make(
    folder: Path,
    events: list[dict[str, Any]],
    metrics: list[dict[str, Any]] | None = None,
    lock: str | None = LOCK,
    **files: Any,
) -> Path:
    """A run's folder; ``files``: certificate, summary, resolved_config."""
    folder.mkdir(parents=True)
    for name, lines in (("events", events), ("metrics", metrics or [])):
        timed = [{"time": float(index), **line} for index, line in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    if lock is not None:
        (folder / "config.lock.yaml").write_text(lock)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def certificate(seed: int = 7, **files: str) -> dict[str, Any]:
    start = {"seed": seed, "ranks": 2, "hyperparameters": {"lr": 0.1}, "package": "p", "versions": {"torch": "2"}}
    return {"starts": [start | {"code": {"sha256": "x", "files": files, "complete": True}}]}


def test_everything_that_a_run_leaves(tmp_path: Path) -> None:
    run = read_run(
        make(
            tmp_path / "r",
            [
                {"kind": "start", "step": 0},
                train(1, [5.0], lr=0.1),
                train(4, [4.0, "inf", 2], lr=0.2, grad_norm=1),
                {"kind": "validation", "step": 4, "metrics": {"acc": 1, "batches": 9}},
            ],
            [{"group": "training", "step": 4, "metrics": {"loss": 3.5}}],
            certificate=certificate(**{"a.py": "1"}),
            summary={"end": "completed", "data": {"sha256": "d", "files": 3}},
            resolved_config={"batch": [{"name": "ranks", "value": 2}]},
        )
    )
    assert {trace.name: dict(trace.steps) for trace in run.traces} == {
        "loss of rank 0": {1: 5.0, 2: 4.0, 3: "inf", 4: 2.0},
        "lr": {1: 0.1, 4: 0.2},
        "gradient norm": {4: 1.0},
        "mean loss of all ranks": {4: 3.5},
        "acc": {4: 1.0},
    }
    assert [trace.name for trace in run.traces if trace.local] == ["loss of rank 0"]
    assert run.settings == {
        "searcher.name": "single",
        "searcher.metric": "loss",
        "searcher.max_length.batches": 9,
        "hyperparameters.lr": 0.1,
        "hyperparameters.sizes": [1, 2],
        "batch: ranks": 2,
    }
    assert (run.code, run.data) == ({"a.py": "1"}, {"sha256": "d", "files": 3})
    assert run.made_with == {"package": "p", "versions.torch": "2"}
    assert (run.end, run.starts, run.last_step) == ("completed", 1, 4)


def test_steps_that_were_trained_again_count_as_they_were_the_last_time(tmp_path: Path) -> None:
    events = [{"kind": "start", "step": 0}, train(2, [1.0, 2.0]), train(4, [3.0, 4.0])]
    events += [{"kind": "start", "step": 2}, train(3, [30.0])]
    (trace,) = read_run(make(tmp_path / "r", events)).traces
    assert trace.steps == {1: 1.0, 2: 2.0, 3: 30.0}


def test_a_scripts_run_and_one_that_has_left_little(tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "script", [], lock=None, certificate=certificate()))
    assert run.settings == {"hyperparameters.lr": 0.1, "seed": 7, "ranks": 2}
    run = read_run(make(tmp_path / "little", [{"kind": "train", "step": 1, "loss": 2.0}], certificate=["odd"]))
    assert (run.code, run.data, run.end, list(run.traces), run.last_step) == (None, None, None, [], 0)


ODD: list[Any] = [None, 3, "x", [1], {"a": 1}, True, [[]], {"loss": 3}, {"loss": [None, "nan", {}]}, 1e400]


@pytest.mark.parametrize("odd", ODD)
def test_odd_contents_are_no_reason_to_give_up(tmp_path: Path, odd: Any) -> None:
    train = {"kind": "train", "step": 2, "each": odd, "lr": odd, "time": odd}
    metrics = [{"group": "training", "step": odd, "metrics": {"x": odd}}]
    metrics += [{"group": "validation", "step": 1, "metrics": odd, "time": odd}]
    files = {"certificate": {"starts": odd}, "summary": {"end": odd, "data": odd}, "resolved_config": {"batch": odd}}
    run = read_run(make(tmp_path / "r", [{"kind": "start", "step": odd}, train, {"kind": odd}], metrics, **files))
    assert compare_runs(run, run).first is None
    start = {"code": odd, "versions": odd, "machine": odd, "hyperparameters": odd}
    read_run(make(tmp_path / "s", [], lock=None, certificate={"starts": [start]}))


def test_no_run_and_a_damaged_lock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this folder contains no run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.lock\.yaml"):
        read_run(make(tmp_path / "r", [], lock="{unclosed"))


def run(steps: Mapping[int, Any] | None = None, **more: Any) -> RunRecord:
    values = {1: 5.0, 2: 4.0, 3: 3.0} if steps is None else steps
    fields = {"settings": {"seed": 7}, "code": {"a.py": "1"}, "data": {"sha256": "d"}, "end": "completed"}
    return RunRecord(Path("r"), traces=(Trace("loss", values),) if values else (), **(fields | more))


def test_the_first_step_that_differs_and_the_largest_difference() -> None:
    found = compare_runs(run({1: 5.0, 2: 4.0, 3: 3.0, 9: 1.0}), run({1: 5.0, 3: 3.5, 9: 3.0}))
    assert not found.same and found.same_origin and not found.same_values
    assert found.first is not None and found.first.parting is not None
    parting = found.first.parting
    assert (parting.step, parting.a, parting.b, parting.before, parting.difference) == (3, 3.0, 3.5, 1, 0.5)
    assert (parting.largest, parting.at, found.first.steps) == (2.0, 9, 3)

    def both(late: float, early: float) -> RunRecord:
        return replace(run(), traces=(Trace("late", {1: 1.0, 8: late}), Trace("early", {1: 1.0, 4: early})))

    found = compare_runs(both(1.0, 2.0), both(1.5, 2.5))
    assert found.first is not None and found.first.name == "early"


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (float("nan"), float("nan"), True),
        ("inf", "inf", True),
        ("inf", 1.0, False),
        (None, None, True),
        (None, 1.0, False),
        (1.0, 1.0 + 2**-52, False),
    ],
)
def test_values_are_equal_in_every_bit_or_not(a: Any, b: Any, equal: bool) -> None:
    found = compare_runs(run({1: a}), run({1: b}))
    assert found.same_values is equal
    if not equal and not isinstance(a, float):
        assert found.first is not None and found.first.parting is not None and found.first.parting.largest is None


def test_tolerances_lengths_and_nothing_to_compare() -> None:
    a, b = run({1: 1.0, 2: 0.0}), run({1: 1.001, 2: 0.0})
    assert compare_runs(a, b, rtol=0.01).same and not compare_runs(a, b, rtol=0.0001).same
    shorter = compare_runs(run(), run({1: 5.0, 2: 4.0}))
    assert shorter.ends == (3, 2) and shorter.first is None and not shorter.same_values
    none = compare_runs(run({}), run({}))
    assert not none.same and none.notes[-1] == "the runs have no values in common"


def test_settings_code_and_data() -> None:
    found = compare_runs(run(), run(settings={"seed": 8, "x": None}, code={"b.py": "2"}, data={"sha256": "e"}))
    assert found.settings == (SettingChange("seed", 7, 8), SettingChange("x", ABSENT, None))
    assert found.code == (SettingChange("a.py", "1", ABSENT), SettingChange("b.py", ABSENT, "2"))
    assert found.data == (SettingChange("sha256", "d", "e"),)
    assert found.same_values and not found.same_origin and not found.same
    assert changes({"a": 1}, {"a": 1.0}) == ()


def test_what_is_noted_and_what_does_not_count() -> None:
    found = compare_runs(run(), run())
    assert found.same and found.first is None and found.notes == ()
    assert [(trace.name, trace.steps, trace.parting) for trace in found.traces] == [("loss", 3, None)]
    found = compare_runs(run(made_with={"versions.torch": "2.6"}), run(made_with={"versions.torch": "2.7"}))
    assert found.made_with == (SettingChange("versions.torch", "2.6", "2.7"),) and found.same
    found = compare_runs(run(code=None, data=None), run(data=None, starts=2, whole_code=False))
    assert found.same and [note.split(":")[0] for note in found.notes] == [
        "code is not compared",
        "data is not compared",
        "B's folder contains more code than was recorded",
        "B was started 2 times; its last start is compared",
    ]
    assert found.notes[0].endswith("A has no certificate.json") and "A and B have no fingerprint" in found.notes[1]


def test_rank_0_of_another_number_of_ranks_has_seen_other_samples() -> None:
    def shared(ranks: int, own: float) -> RunRecord:
        traces = (Trace("own", {1: own}, local=True), Trace("mean", {1: 2.0}))
        return replace(run(settings={"batch: data-parallel ranks": ranks}), traces=traces)

    found = compare_runs(shared(1, 1.0), shared(2, 3.0))
    assert [trace.name for trace in found.traces] == ["mean"] and found.same_values
    assert "rank 0's own values are not compared" in found.notes[-1]
