"""The classes that users subclass, ZeroTrial and TrialCallback; the import of their class from the
model's folder; and the seed that everything starts from."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.metrics import Reducer

if TYPE_CHECKING:
    from zero_trial.trial.context import ZeroTrialContext


class ZeroTrial(ABC):
    """The base class of a trial. Subclass it.

    ``__init__`` builds the model and calls ``context.initialize(model=...)``. The methods below
    define data, training and validation.
    """

    # Tokens per sample, if samples are sequences: tokens per second are then reported in addition
    # to samples per second.
    tokens_per_sample: int | None = None

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context = context

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train one micro-batch: read it from ``dataloader_iter``, call the engine,
        ``engine.backward(loss)`` and ``engine.step()``.

        Called once per micro-batch (once per optimizer step in a pipeline or after
        ``context.disable_auto_grad_accumulation()``). ``batch_idx`` counts optimizer steps since
        the start of the trial, ``epoch_idx`` epochs. Returns the loss, or scalars by name; they are
        reported as means over micro-batches and ranks, even if ``engine.backward(loss_sum,
        weight=tokens)`` weights the gradients. ``dataloader_iter`` is None on ranks that read no
        data.
        """

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return a ``zero_trial`` DataLoader, or any iterable after
        ``context.disable_dataset_reproducibility_checks()``."""

    def build_validation_data_loader(self) -> Any:
        """Return the same for one validation pass, or None to skip validation."""
        return None

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """Return the metrics of one validation batch. Runs without gradients, with engines in eval
        mode."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Return the metrics of the full validation set, unsharded; override this instead of
        ``evaluate_batch``.

        Every rank runs it (the forward of a sharded model needs all ranks); rank 0's metrics are
        used.
        """
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return one Reducer for all validation metrics, or Reducers by name (AVG for the
        others)."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, TrialCallback]:
        """Return callbacks by name; a resumed run restores their state by this name."""
        return {}

    def summary(self) -> Mapping[str, Any]:
        """Return additional values for summary.json; called on rank 0 at the end of the run."""
        return {}

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of samples in a batch. The default is the first tensor's first
        dimension."""
        if isinstance(batch, torch.Tensor):
            return len(batch)
        if isinstance(batch, Mapping):
            return self.get_batch_length(next(iter(batch.values())))
        return self.get_batch_length(batch[0])

    def save(self, context: ZeroTrialContext, path: Path) -> None:
        """Write every engine to ``path``. An override must also call this method. Collective."""
        for index, engine in enumerate(context.engines):
            engine.save_checkpoint(str(path), tag=f"model{index}", save_latest=False)

    def load(self, context: ZeroTrialContext, path: Path) -> None:
        """Load every engine from ``path``; only weights if ``context.weights_only``. Collective."""
        for index, engine in enumerate(context.engines):
            options = {"load_module_only": True} if context.weights_only else {}
            loaded, _ = engine.load_checkpoint(str(path), tag=f"model{index}", **options)
            if loaded is None:
                raise CheckpointError("Failed to load deepspeed checkpoint.", where=f"{path}, model{index}")


class TrialCallback:
    """Hooks into a run: override the methods that you need, and return the callback from
    ``build_callbacks``. Every rank calls the methods, at the same points.

    The names are those of Determined's PyTorchCallback, whose subclasses also work here.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called when the trial is built, before its checkpoint (if any) is loaded.

        ``first_batch_idx`` steps are complete.
        """

    def on_trial_shutdown(self) -> None:
        """Called last, even after an error."""

    def on_training_start(self) -> None:
        """Called before the first step of this process."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first step of an epoch (not when a run resumes inside one)."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last step of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called with the reported training metrics: global averages, and this rank's steps."""

    def on_validation_start(self) -> None: ...

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called with the final metrics, the same on every rank."""

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called with the values that ``evaluate_batch`` returned on this rank, batch by batch."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any] | None) -> None:
        """Called before loading, with the content of trial_state.json."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before saving, with the content to be written to trial_state.json."""

    def on_checkpoint_write_end(self, checkpoint_dir: str | Path) -> None:
        """Called after this rank's files are written, while the folder has a temporary name."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called once the checkpoint is stored under its storage id."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return this rank's state for a checkpoint, as JSON-able values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def overrides(trial: ZeroTrial, method: str) -> bool:
    """Return whether the user's class overrides ``method``."""
    return getattr(type(trial), method) is not getattr(ZeroTrial, method)


def import_trial_class(module: str, name: str, model_dir: Path) -> type[ZeroTrial]:
    """Import and return the class ``name`` of ``module``, with ``model_dir`` first on the search
    path.

    Raises ConfigError, naming the trials that the module defines, if the class is not a trial;
    errors in the module itself propagate.
    """
    sys.path.insert(0, str(model_dir))
    try:
        content = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "deepspeed":
            raise
        raise ConfigError(
            f"{module} imports deepspeed, which is not installed",
            where="entrypoint",
            fix=f"For a DeepSpeedTrial, use the entrypoint python3 -m zero_trial.as_determined {module}:{name}: zero_trial then replaces "
            "deepspeed and determined.pytorch.deepspeed.",
        ) from error
    kind = content.get(name)
    if isinstance(kind, type) and issubclass(kind, ZeroTrial):
        return kind
    trials = [
        key
        for key, value in content.items()
        if isinstance(value, type) and issubclass(value, ZeroTrial) and value is not ZeroTrial
    ]
    fix = f"Use entrypoint: {module}:{trials[0]}." if trials else "Write a subclass of zero_trial.ZeroTrial."
    if any(base.__name__ == "PyTorchTrial" for base in getattr(kind, "__mro__", ())):
        fix = f"A PyTorchTrial runs under a master with determined.exec.harness {module}:{name}. For ZeRO, make it a ZeroTrial: "
        fix += "From PyTorchTrial, in docs/guide/moving_from_deepspeedtrial.md."
    listed = ", ".join(f"{key}(ZeroTrial)" for key in trials)
    raise ConfigError(
        f"{module}:{name} {'is not a ZeroTrial' if name in content else 'not found'} in {model_dir / module}.py; "
        f"it defines {listed or 'no ZeroTrial'}",
        where="entrypoint",
        fix=fix,
    )


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, torch (all devices) and, if imported, numpy.

    The same on every rank, before the trial is built.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def fitted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, wrapped to receive only as many positional arguments as it accepts:
    ``evaluate_batch(iterator)`` is an older form."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return method
    taken = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
    return lambda *arguments: method(*arguments[:taken])
