"""Which checkpoints of an ended experiment go, as a pure function of the policy.

A checkpoint stays if it is among the ``save_experiment_best`` best of the experiment, the ``save_trial_best`` best or the ``save_trial_latest``
newest of its trial. Best goes by the searcher's metric of the validation at the checkpoint's step; one without that metric is never among the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zero_trial.master.records import Checkpoint, CheckpointState
from zero_trial.master.verbs import GcPolicy


def policy_of(config: Mapping[str, Any]) -> GcPolicy:
    """The policy of a completed config."""
    section = config.get("checkpoint_storage") or {}
    return GcPolicy(
        int(section.get("save_experiment_best", 0)),
        int(section.get("save_trial_best", 1)),
        int(section.get("save_trial_latest", 1)),
    )


def superfluous(
    checkpoints: Sequence[Checkpoint], policy: GcPolicy, *, smaller_is_better: bool, keep: Iterable[str] = ()
) -> list[Checkpoint]:
    """Checkpoints that the policy does not save; ``keep`` are UUIDs that stay anyway, because another experiment starts from them."""
    there = [item for item in checkpoints if item.state is CheckpointState.COMPLETED]
    saved = set(keep) | _best(there, policy.save_experiment_best, smaller_is_better)
    for trial_id in {item.trial_id for item in there}:
        of_trial = [item for item in there if item.trial_id == trial_id]
        saved |= _best(of_trial, policy.save_trial_best, smaller_is_better)
        newest = sorted(of_trial, key=lambda item: (item.steps_completed, item.reported), reverse=True)
        saved |= {item.uuid for item in newest[: policy.save_trial_latest]}
    return [item for item in there if item.uuid not in saved]


def _best(checkpoints: Iterable[Checkpoint], count: int, smaller_is_better: bool) -> set[str]:
    sign = 1 if smaller_is_better else -1
    scored = [
        (sign * item.searcher_metric, item.steps_completed, item.uuid)
        for item in checkpoints
        if item.searcher_metric is not None
    ]
    return {uuid for _, _, uuid in sorted(scored)[:count]}
