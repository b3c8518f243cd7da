"""Which checkpoints go."""

from __future__ import annotations

import pytest

from zero_trial.master.core.garbage import policy_of, superfluous
from zero_trial.master.records import Checkpoint, CheckpointState, GcPolicy


def saved(
    name: str, trial: int, steps: int, metric: float | None, state: CheckpointState = CheckpointState.COMPLETED
) -> Checkpoint:
    return Checkpoint(
        name, state, trial, 1, "t", "t.1", float(steps), {}, {}, steps_completed=steps, searcher_metric=metric
    )


THERE = [
    saved("a1", 1, 1, 0.5),
    saved("a2", 1, 2, 0.3),
    saved("a3", 1, 3, 0.4),
    saved("b1", 2, 1, 0.1),
    saved("b2", 2, 2, 0.9),
    saved("b3", 2, 3, None),
]


@pytest.mark.parametrize(
    ("policy", "smaller", "kept"),
    [
        ((0, 0, 0), True, ""),
        ((1, 0, 0), True, "b1"),
        ((2, 0, 0), True, "a2 b1"),
        ((1, 0, 0), False, "b2"),
        ((0, 1, 0), True, "a2 b1"),
        ((0, 1, 0), False, "a1 b2"),
        ((0, 0, 1), True, "a3 b3"),
        ((0, 1, 1), True, "a2 a3 b1 b3"),
        ((0, 9, 0), True, "a1 a2 a3 b1 b2"),
        ((9, 0, 9), True, "a1 a2 a3 b1 b2 b3"),
    ],
)
def test_policies(policy: tuple[int, int, int], smaller: bool, kept: str) -> None:
    gone = {item.uuid for item in superfluous(THERE, GcPolicy(*policy), smaller_is_better=smaller)}
    assert sorted({item.uuid for item in THERE} - gone) == kept.split()


def test_what_others_start_from_stays() -> None:
    gone = superfluous(THERE, GcPolicy(0, 0, 0), smaller_is_better=True, keep=["b2"])
    assert "b2" not in {item.uuid for item in gone} and len(gone) == 5


def test_only_complete_ones_are_looked_at() -> None:
    others = [saved("x", 1, 9, 0.0, CheckpointState.DELETED), saved("y", 1, 8, 0.0, CheckpointState.PARTIALLY_DELETED)]
    assert superfluous(others, GcPolicy(0, 0, 0), smaller_is_better=True) == []


def test_the_policy_of_a_config() -> None:
    counts = {"save_experiment_best": 2, "save_trial_best": 3, "save_trial_latest": 4}
    assert policy_of({"checkpoint_storage": counts}) == GcPolicy(2, 3, 4)
    assert policy_of({}) == GcPolicy(0, 1, 1)
