"""What a trial may ask about its experiment: hyperparameters, ids, seed, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.platform.protocols import Distributed, Platform
from zero_trial.trial.hparams import HParams


class ExperimentView:
    """Read-only questions that the platform answers; ``ZeroTrialContext`` inherits them."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._hparams = HParams(platform.hparams)

    @property
    def distributed(self) -> Distributed:
        """The ranks of this trial: rank, size, local_rank, and collectives for small JSON-able values."""
        return self.platform.distributed

    def get_hparams(self) -> HParams:
        """All hyperparameters: a dict that also allows ``h.name``."""
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        if name not in self._hparams:
            raise ConfigError(
                "no such hyperparameter", where=f"hyperparameters.{name}", expected=f"one of {sorted(self._hparams)}"
            )
        return self._hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        return dict(self.platform.experiment)

    def get_data_config(self) -> dict[str, Any]:
        return dict(self.platform.experiment.get("data") or {})

    def get_experiment_id(self) -> str:
        return self.platform.experiment_id

    def get_trial_id(self) -> str:
        return self.platform.trial_id

    def get_trial_seed(self) -> int:
        return self.platform.seed

    def get_initial_batch(self) -> int:
        """Steps that the checkpoint to start from had completed; 0 in a fresh trial."""
        return self.platform.steps_completed

    def get_tensorboard_path(self) -> Path:
        path = self.platform.tensorboard_path
        if path is None:
            raise ConfigError("this platform keeps no TensorBoard files", where="get_tensorboard_path")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def note(self, text: str, **more: Any) -> None:
        """A line for the person who watches, and ``more`` for whoever reads the events; rank 0's only."""
        if self.distributed.rank == 0:
            self.platform.progress.emit({"kind": "note", "message": text, **more})
