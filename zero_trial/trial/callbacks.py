"""Hooks into a run: subclass, override what you need, return it from ``build_callbacks``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TrialCallback:
    """Called on every rank, at the same moments.

    The names are those of Determined's PyTorchCallback, whose subclasses work here as well.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called when the trial is built; its checkpoint, if there is one, is loaded right after
        this.

        ``first_batch_idx`` steps are complete.
        """

    def on_trial_shutdown(self) -> None:
        """Called last, also after an error."""

    def on_training_start(self) -> None:
        """Called before the first step of this process."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first step of an epoch (not when a run resumes inside one)."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last step of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called when training metrics are reported: averages over all replicas, and this rank's
        values step by step."""

    def on_validation_start(self) -> None: ...

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called with the final metrics, the same on every rank."""

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called with what ``evaluate_batch`` returned on this rank, batch by batch."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any] | None) -> None:
        """Called before loading, with the content of trial_state.json."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before saving, with the future content of trial_state.json."""

    def on_checkpoint_write_end(self, checkpoint_dir: str | Path) -> None:
        """Called when this rank's files are written; the folder still has a temporary name."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called when the checkpoint exists under its storage id."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return this rank's state for a checkpoint, as JSON-able values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
