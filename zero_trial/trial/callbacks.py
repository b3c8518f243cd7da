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
        """The trial is built; its checkpoint, if there is one, is loaded right after this.

        ``first_batch_idx`` steps are complete.
        """

    def on_trial_shutdown(self) -> None:
        """The last call, also after an error."""

    def on_training_start(self) -> None:
        """Before the first step of this process."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first step of an epoch (not when a run resumes inside one)."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last step of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Training metrics are reported: the averages over all replicas, and this rank's values step by step."""

    def on_validation_start(self) -> None: ...

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """``metrics`` are the final ones, the same on every rank."""

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """``outputs``: what ``evaluate_batch`` returned on this rank, batch by batch."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any] | None) -> None:
        """``checkpoint`` is what trial_state.json says."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """``checkpoint`` is what trial_state.json will say."""

    def on_checkpoint_write_end(self, checkpoint_dir: str | Path) -> None:
        """The files of this rank are written; the folder has a temporary name still."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """The checkpoint exists under its storage id."""

    def state_dict(self) -> Mapping[str, Any]:
        """What to keep, as JSON-able values. Kept per rank."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
