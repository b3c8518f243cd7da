"""A trial's training data, opened and asked for its position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trial.harness import LineTrial, Points, run_rank, run_world, steps
from zero_trial.trial import DataLoader
from zero_trial.trial.checkpointing import read_state


class Larger(LineTrial):
    def build_training_data_loader(self) -> Any:
        return DataLoader(Points(24), batch_size=3)


def messages(run: Any) -> list[str]:
    return [event["message"] for event in run.record.events if event["kind"] == "note"]


def test_a_batch_that_is_not_the_engines_is_said() -> None:
    assert "build_training_data_loader: batches of 3 samples, but the engine's micro batch is 2" in messages(
        run_rank(Larger, steps(1))
    )
    assert not any("micro batch is" in message for message in messages(run_rank(LineTrial, steps(1))))


class Few(LineTrial):
    def build_training_data_loader(self) -> Any:
        return DataLoader(Points(3), self.context.get_train_micro_batch_size_per_gpu())


def test_a_data_set_smaller_than_a_batch_is_said(tmp_path: Path) -> None:
    """It trains, on the same samples again and again; whoever gave the wrong folder shall know."""
    said = "build_training_data_loader: 3 samples are fewer than one micro-batch (2 of 2 replicas); each comes several times in it"
    assert said in messages(run_world(2, Few, steps(1), tmp_path)[0])
    assert not any("fewer than" in message for message in messages(run_rank(Few, steps(1))))


class Greedy(LineTrial):
    """Rank 1 takes one batch more."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.context.distributed.rank == 1 and batch_idx == 0:
            next(dataloader_iter)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def test_the_lowest_position_counts_where_ranks_differ(tmp_path: Path) -> None:
    first, _ = run_world(2, Greedy, steps(2), tmp_path)
    state = read_state(tmp_path / "step-000002")
    assert (state.micro_batches, state.samples) == (2, 8)
    assert any(
        "ranks have taken different numbers of batches [[2, 8], [3, 12]]" in message for message in messages(first)
    )


def test_a_trial_that_takes_two_batches_per_step_goes_on_after_the_last_one(tmp_path: Path) -> None:
    class Twice(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            next(dataloader_iter)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    run_rank(Twice, steps(3), storage=tmp_path)
    assert run_rank(Twice, steps(4), storage=tmp_path, latest_checkpoint="step-000003").trial.seen == [[14, 15]]


def test_a_loader_without_a_length_is_one_long_epoch() -> None:
    class Streams(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            from torch.utils.data import DataLoader as TorchDataLoader

            return (batch for batch in TorchDataLoader(self.data, 2))

    run = run_rank(Streams, steps(5))
    assert run.trial.calls == [(0, step) for step in range(5)]
    assert next(event for event in run.record.events if event["kind"] == "start")["epoch_steps"] is None
