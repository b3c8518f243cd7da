"""The loop: boundaries from one step counter, in order, and an end that is validated and saved."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.in_memory import ReportedRecord
from tests.trial.harness import LineTrial, run_rank, run_world, steps
from zero_trial.errors import ConfigError, Diverged, InvalidHP, MeshError, TrialError
from zero_trial.trial import Batch, TrialCallback
from zero_trial.trial.controller import Score
from zero_trial.trial.metrics import SPEED_METRIC
from zero_trial.trial.reporting import End
from zero_trial.trial.settings import Keep
from zero_trial.trial.trial import fitted


def test_a_trial_learns_reports_validates_and_saves() -> None:
    run = run_rank(
        LineTrial,
        steps(200, validation_period=Batch(100)),
        ds_config={"optimizer": {"type": "SGD", "params": {"lr": 0.2}}},
    )
    first, second = run.record.validation
    assert (first[0], second[0]) == (100, 200)
    assert second[1]["validation_loss"] < first[1]["validation_loss"] < 0.1
    assert run.record.checkpoints[-1] == "step-000200" == run.outcome.checkpoint
    assert (run.outcome.end, run.outcome.step, run.outcome.samples) == (End.COMPLETED, 200, 400)


def test_boundaries_never_reset_the_batch_index() -> None:
    """Upstream 0.38 restarted at 0 at every boundary: no checkpoint at 4, 8, 12 fired, and 15 steps
    were made instead of 14.
    """
    settings = steps(14, validation_period=Batch(3), checkpoint_period=Batch(4), checkpoint_policy="none")
    run = run_rank(LineTrial, settings)
    assert run.trial.calls == [(step // 12, step) for step in range(14)]
    assert [step for step, _ in run.record.validation] == [3, 6, 9, 12, 14]
    assert run.record.checkpoints == ["step-000004", "step-000008", "step-000012", "step-000014"]


def test_max_length_counts_the_steps_of_the_whole_trial(tmp_path: Path) -> None:
    """Upstream 0.38 made max_length further steps after a resume. So do seconds and samples."""
    first = run_rank(LineTrial, steps(6), storage=tmp_path).outcome
    run = run_rank(LineTrial, steps(8), storage=tmp_path, latest_checkpoint="step-000006")
    assert [batch for _, batch in run.trial.calls] == [6, 7]
    assert run.outcome.step == 8
    assert run.outcome.samples * 6 == first.samples * 8
    assert run.outcome.train_seconds > first.train_seconds > 0
    again = run_rank(LineTrial, steps(8), storage=tmp_path, latest_checkpoint="step-000008")
    assert again.trial.calls == [] and again.record.checkpoints == [] and again.record.validation == []
    fewer = run_rank(LineTrial, steps(5), storage=tmp_path, latest_checkpoint="step-000008")
    assert fewer.trial.calls == []
    said = [
        [e["message"] for e in done.record.events if "nothing" in e.get("message", "")] for done in (run, again, fewer)
    ]
    text = "nothing is trained: the checkpoint is at step 8, and max_length is"
    assert said == [[], [f"{text} 8 steps"], [f"{text} 5 steps"]]


def test_resume_with_accumulation_starts_at_exactly_the_right_sample(tmp_path: Path) -> None:
    """Upstream 0.38 started at sample 12 instead of 24: it skipped optimizer steps where the loader
    counts micro- batches.
    """
    run_rank(LineTrial, steps(6), ds_config={"gradient_accumulation_steps": 2}, storage=tmp_path)
    run = run_rank(LineTrial, steps(7), ds_config=TWICE, storage=tmp_path, latest_checkpoint="step-000006")
    # 24 samples in the data: sample 24 is sample 0 of epoch 1
    assert run.trial.seen == [[0, 1], [2, 3]]
    assert run.trial.data.read == [0, 1, 2, 3]  # and nothing that was skipped was read


def test_preemption_saves_and_the_rest_follows_on_resume(tmp_path: Path) -> None:
    run = run_rank(
        LineTrial, steps(20, reporting_period=Batch(5)), storage=tmp_path, record=ReportedRecord(preempt_from_poll=1)
    )
    step = run.outcome.step
    assert run.outcome.end is End.PREEMPTED and step < 20
    assert run.record.checkpoints == [f"step-{step:06d}"] and run.record.validation == []
    rest = run_rank(LineTrial, steps(20), storage=tmp_path, latest_checkpoint=f"step-{step:06d}")
    assert rest.outcome.end is End.COMPLETED and [batch for _, batch in rest.trial.calls] == list(range(step, 20))


def test_a_trial_may_ask_to_stop() -> None:
    class Stops(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 6:
                self.context.set_stop_requested(True)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    run = run_rank(Stops, steps(20, reporting_period=Batch(1)))
    assert run.outcome.end is End.STOPPED and run.outcome.step == 7
    assert run.record.checkpoints == ["step-000007"]


def test_step_zero_validation_happens_once(tmp_path: Path) -> None:
    settings = steps(4, step_zero_validation=True, checkpoint_policy="none")
    run = run_rank(LineTrial, settings, storage=tmp_path)
    assert [step for step, _ in run.record.validation] == [0, 4]
    assert run.outcome.initial_metrics == run.record.validation[0][1]
    assert run.outcome.final_metrics == run.record.validation[1][1]


class Scripted(LineTrial):
    """Validation values from a list."""

    values = (5.0, 3.0, 4.0, 2.0)

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        step = self.context.current_train_batch()
        return {"validation_loss": self.values[step // 2 - 1]}


@pytest.mark.parametrize(
    ("policy", "smaller", "saved"),
    [
        ("best", True, [2, 4, 8]),
        ("best", False, [2, 8]),
        ("all", True, [2, 4, 6, 8]),
        ("none", True, [8]),
    ],
)
def test_checkpoint_policies(policy: str, smaller: bool, saved: list[int]) -> None:
    experiment = {
        "searcher": {"metric": "validation_loss", "smaller_is_better": smaller},
        "data": {"ds_config": {"train_micro_batch_size_per_gpu": 2}},
    }
    settings = steps(
        8, validation_period=Batch(2), checkpoint_policy=policy, metric="validation_loss", smaller_is_better=smaller
    )
    run = run_rank(Scripted, settings, experiment=experiment)
    assert run.record.checkpoints == [f"step-{step:06d}" for step in saved]


@pytest.mark.parametrize(("length", "there"), [(8, [8]), (7, [4, 6, 7])])
def test_a_complete_trial_keeps_as_many_as_a_cluster_would(tmp_path: Path, length: int, there: list[int]) -> None:
    """While it trains, and where it is stopped, two latest ones: one may turn out to be damaged."""

    class Stopped(Scripted):
        def train_batch(self, *arguments: Any) -> Any:
            self.context.set_stop_requested(arguments[-1] >= 6 and length == 7)
            return super().train_batch(*arguments)

    settings = steps(8, checkpoint_period=Batch(2), validation_period=Batch(4), metric="validation_loss")
    ticks = iter(range(10_000))  # the ranks talk after every step
    settings = replace(settings, keep=Keep(best=1, latest=2, at_end=1))
    run_rank(Stopped, settings, storage=tmp_path, clock=lambda: float(next(ticks)))
    assert sorted(int(path.name[-6:]) for path in tmp_path.glob("step-*")) == there
    none = replace(steps(4), keep=Keep(best=0, latest=2, at_end=0))  # one stays at least
    run_rank(LineTrial, none, storage=tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").glob("step-*")] == ["step-000004"]


class NeverTrained(LineTrial):
    def train_batch(self, *arguments: Any) -> Any:
        raise AssertionError("a step before the metric's name was looked at")


def test_a_wrong_metric_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="'val_loss' was never reported"):
        run_rank(NeverTrained, steps(2, metric="val_loss"))


class NeverEvaluated(LineTrial):
    def evaluate_batch(self, *arguments: Any) -> Any:
        raise AssertionError("a validation where only speed is measured")


def test_a_trial_that_measures_its_speed_neither_evaluates_nor_saves(tmp_path: Path) -> None:
    seconds = itertools.accumulate(itertools.repeat(0.25))
    settings = steps(6, metric=SPEED_METRIC, smaller_is_better=False, step_zero_validation=False)
    run = run_rank(NeverEvaluated, settings, storage=tmp_path, clock=lambda: next(seconds))
    assert [(step, sorted(metrics)) for step, metrics in run.record.validation] == [
        (6, ["batches", "epochs", SPEED_METRIC])
    ]
    assert 0 < run.record.validation[0][1][SPEED_METRIC] < 4.0  # the clock is read several times in a step
    assert not list(tmp_path.iterdir()) and run.outcome.checkpoint is None
    with pytest.raises(ConfigError, match="no steps are left to measure after 2"):
        run_rank(LineTrial, steps(2, metric=SPEED_METRIC), storage=tmp_path)


class Calls(TrialCallback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.restored: Any = None

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.calls.append(("startup", first_batch_idx, checkpoint_uuid))

    def on_trial_shutdown(self) -> None:
        self.calls.append("shutdown")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.calls.append(("epoch start", epoch_idx))

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.calls.append(("epoch end", epoch_idx))

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("validated", metrics["batches"]))

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.calls.append(("saved", uuid))

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class WithCalls(LineTrial):
    def build_callbacks(self) -> dict[str, TrialCallback]:
        self.recorder = Calls()
        return {"recorder": self.recorder}


def test_callbacks_are_called_in_order_and_epochs_start_once(tmp_path: Path) -> None:
    run = run_rank(WithCalls, steps(15, validation_period=Batch(5), checkpoint_policy="none"), storage=tmp_path)
    assert run.trial.recorder.calls == [
        ("startup", 0, None),
        ("epoch start", 0),
        ("validated", 5),
        ("validated", 10),
        ("epoch end", 0),
        ("epoch start", 1),
        ("validated", 15),
        ("saved", "step-000015"),
        "shutdown",
    ]
    rest = run_rank(WithCalls, steps(16), storage=tmp_path, latest_checkpoint="step-000015")
    assert rest.trial.recorder.calls[:2] == [("startup", 15, "step-000015"), ("validated", 16)]
    assert rest.trial.recorder.restored == {"count": 7}


@pytest.mark.parametrize("returned", [[TrialCallback()], {"a": 1}])
def test_callbacks_that_are_none_are_named(returned: Any) -> None:
    class Wrong(LineTrial):
        def build_callbacks(self) -> Any:
            return returned

    with pytest.raises(TrialError, match="build_callbacks must return callbacks by name"):
        run_rank(Wrong, steps(1))


@pytest.mark.parametrize("fails", [True, False])
def test_a_shutdown_that_fails_hides_no_cause_and_no_other_shutdown(fails: bool) -> None:
    calls: list[str] = []

    class Broken(TrialCallback):
        def on_trial_shutdown(self) -> None:
            calls.append("broken")
            raise RuntimeError("of the shutdown")

    class Good(TrialCallback):
        def on_trial_shutdown(self) -> None:
            calls.append("good")

    class WithBoth(LineTrial):
        def build_callbacks(self) -> dict[str, TrialCallback]:
            return {"first": Broken(), "second": Good()}

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if fails:
                raise ValueError("the cause")
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    with pytest.raises(ValueError if fails else RuntimeError, match="the cause" if fails else "of the shutdown"):
        run_rank(WithBoth, steps(1))
    assert calls == ["broken", "good"]


def test_an_invalid_hp_is_posted_once_and_ends_every_rank(tmp_path: Path) -> None:
    class Invalid(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.context.distributed.rank == 1 and batch_idx == 2:
                raise InvalidHP("this will not do")
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    record = ReportedRecord()
    first, second = run_world(2, Invalid, steps(5), tmp_path, record=record)
    assert isinstance(second, InvalidHP) and isinstance(first, MeshError)
    assert record.early_exits == ["INVALID_HP"]


def test_ranks_share_the_data_and_stay_equal(tmp_path: Path) -> None:
    first, second = run_world(2, LineTrial, steps(3, validation_period=Batch(3)), tmp_path)
    assert first.trial.seen == [[0, 1], [4, 5], [8, 9]] and second.trial.seen == [[2, 3], [6, 7], [10, 11]]
    weights = [run.trial.engine.module.weight.item() for run in (first, second)]
    assert weights[0] == weights[1]
    assert first.outcome.final_metrics == second.outcome.final_metrics
    assert first.record.checkpoints == ["step-000003"]
    mean = sum(first.trial.losses + second.trial.losses) / 6
    assert first.record.training == [(3, {"loss": pytest.approx(mean, rel=1e-6)})]


def test_resume_on_another_number_of_ranks_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    run_world(2, LineTrial, steps(3), tmp_path)  # 3 steps of 4 samples
    run = run_rank(LineTrial, steps(4), ds_config=TWICE, storage=tmp_path, latest_checkpoint="step-000003")
    assert run.trial.seen == [[12, 13], [14, 15]]


def test_a_loss_that_is_not_finite_ends_every_rank_at_the_same_step(tmp_path: Path) -> None:
    class Breaks(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return loss * float("nan") if self.context.distributed.rank == 1 and batch_idx == 2 else loss

    record = ReportedRecord()
    outcomes = run_world(2, Breaks, steps(5, checkpoint_period=Batch(1)), tmp_path, record=record)
    for error in outcomes:
        assert isinstance(error, Diverged)
        assert str(error).startswith("rank 1, step 3: the loss became nan")
    assert record.checkpoints == ["step-000001", "step-000002"]  # and none of the broken step


class Overflows(LineTrial):
    """The second step's loss is infinite, and its update skipped."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


def test_a_loss_that_overflows_in_a_step_that_a_loss_scale_skips_is_no_divergence() -> None:
    run = run_rank(Overflows, steps(4), skip_steps=(2,), ds_config={"fp16": {"enabled": True}})
    [(_, metrics)] = run.record.training
    assert metrics["loss"] == pytest.approx(sum(run.trial.losses[i] for i in (0, 2, 3)) / 3, rel=1e-6)


def test_without_a_loss_scale_it_is_one_and_a_loss_scale_does_not_explain_everything() -> None:
    class Always(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx) * float("nan")

    became = r"rank 0, step 2: the loss became inf[\s\S]*The last checkpoint is step-000001."
    with pytest.raises(Diverged, match=became):
        run_rank(Overflows, steps(4, checkpoint_period=Batch(1)), skip_steps=(2,))
    with pytest.raises(Diverged, match=r"rank 0, step 11: the loss became nan"):
        run_rank(Always, steps(30), skip_steps=tuple(range(31)), ds_config={"fp16": {"enabled": True}})


def test_live_events() -> None:
    ticks = iter(range(10_000))
    run = run_rank(LineTrial, steps(4, validation_period=Batch(4)), clock=lambda: float(next(ticks)))
    kinds = [event["kind"] for event in run.record.events if event["kind"] != "note"]
    assert kinds == ["start", "train", "train", "train", "train", "validation", "checkpoint"]
    trained = [event for event in run.record.events if event["kind"] == "train"]
    assert [(event["step"], event["total_steps"], event["lr"]) for event in trained] == [
        (n, 4, 0.01) for n in (1, 2, 3, 4)
    ]
    assert [event["loss"] for event in trained] == pytest.approx(run.trial.losses)
    assert all(event["samples_per_second"] > 0 for event in trained)
    assert [event.get("eta_seconds", -1.0) >= 0 for event in trained] == [False, True, True, True]
    validation, checkpoint = (event for event in run.record.events if event["kind"] in ("validation", "checkpoint"))
    assert set(validation["metrics"]) == {"validation_loss"}
    assert checkpoint["files"] == 3 and checkpoint["path"].endswith("step-000004")


TWICE = {"gradient_accumulation_steps": 2}


def test_train_batch_is_called_once_per_micro_batch_with_the_same_index() -> None:
    run = run_rank(LineTrial, steps(3), ds_config=TWICE)
    assert run.trial.calls == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]
    [(_, metrics)] = run.record.training
    assert metrics["loss"] == pytest.approx(sum(run.trial.losses) / 6, rel=1e-6)
    assert run.trial.engine.global_steps == 3


class Manual(LineTrial):
    """Does all micro-batches in one call."""

    micro = 2

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return [super(Manual, self).train_batch(dataloader_iter, epoch_idx, batch_idx) for _ in range(self.micro)][-1]


def test_manual_accumulation_and_steps_that_do_too_little() -> None:
    class TooFew(Manual):
        micro = 1

    class Forgets(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            _, x, y = next(dataloader_iter)
            return ((self.engine(x) - y) ** 2).mean()

    run = run_rank(Manual, steps(2), ds_config=TWICE)
    assert run.trial.engine.global_steps == 2 and len(run.trial.seen) == 4
    few = "did not train for gradient accumulation steps: got 1 micro-batches, expected a multiple of 2"
    with pytest.raises(TrialError, match=few):
        run_rank(TooFew, steps(2), ds_config=TWICE)
    with pytest.raises(TrialError, match="rank 0, step 1: train_batch did not train: no engine took a step"):
        run_rank(Forgets, steps(2))


class AllEachTime(Manual):
    """Leaves out disable_auto_grad_accumulation()."""

    def __init__(self, context: Any) -> None:
        LineTrial.__init__(self, context)


class OwnData(LineTrial):
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return super().train_batch(iter([(torch.arange(2), torch.ones(2, 1), torch.ones(2, 1))]), epoch_idx, batch_idx)


class ReadsAhead(LineTrial):
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.held = [*getattr(self, "held", []), next(dataloader_iter), next(dataloader_iter)]
        return super().train_batch(iter([self.held.pop(0)]), epoch_idx, batch_idx)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            AllEachTime,
            "and train_batch trained 4 of them: train one per call",
        ),
        (
            OwnData,
            "and train_batch took no batch from its iterator",
        ),
        (ReadsAhead, ""),
        (LineTrial, ""),
    ],
)
def test_what_a_step_reads_is_compared_once_with_what_it_counts(kind: Any, text: str) -> None:
    run = run_rank(kind, steps(3), ds_config=TWICE)
    found = [event["message"] for event in run.record.events if "train_batch" in event.get("message", "")]
    counts = f"rank 0, step 1: epochs, records and progress count 2 micro-batches per step, {text}"
    assert len(found) == bool(text) and all(line.startswith(counts) for line in found)


def test_methods_get_the_arguments_that_they_take() -> None:
    assert fitted(lambda a: [a])(1, 2, 3) == [1]
    assert fitted(lambda a, b, c: [a, b, c])(1, 2, 3) == [1, 2, 3]
    assert fitted(lambda *rest: list(rest))(1, 2, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "best", "smaller", "larger"),
    [
        (1.0, 2.0, True, False),
        (2.0, 1.0, False, True),
        (1.0, 1.0, False, False),
        (1.0, None, True, True),
        (1.0, math.nan, True, True),
        (math.nan, 1.0, False, False),
        (math.nan, None, False, False),
    ],
)
def test_which_is_better(value: float, best: float | None, smaller: bool, larger: bool) -> None:
    assert Score("m", True).is_better(value, best) is smaller
    assert Score("m", False).is_better(value, best) is larger


def test_its_value_among_the_metrics() -> None:
    assert Score("loss").of({"loss": 2, "batches": 5}) == 2.0
    assert Score(None).of({}) is None
    for metrics, message in (
        ({"accuracy": 1.0}, r"never reported: got the trial reports \['accuracy'\]"),
        ({"loss": [1.0]}, r"got values of shape \(1,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            Score("loss").of({**metrics, "batches": 5, "epochs": 0})
