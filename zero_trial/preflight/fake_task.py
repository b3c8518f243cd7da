"""What surrounds a trial that is built in this process, without ranks: its request, its context,
its modules, and the error for what its code raises."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zero_trial
from zero_trial.engine.start import engines_from
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.experiment.entrypoint import Entrypoint
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.preflight.fake_engine import whole_pipelines
from zero_trial.runtime.local import InMemoryPlatform
from zero_trial.runtime.protocols import JsonDistributed
from zero_trial.stand_in.deepspeed_table import install_deepspeed
from zero_trial.stand_in.determined_table import install_determined
from zero_trial.trial.context import EngineFactory, ZeroTrialContext
from zero_trial.trial.trial import ZeroTrial, import_trial_class, seed_everything


@dataclass(frozen=True)
class DryRunRequest:
    """What to run: one point of an experiment on ``slots`` ranks.

    ``dry_run``: train and evaluate also where that is much work.
    """

    experiment: ExperimentConfig
    entrypoint: Entrypoint
    hyperparameters: Mapping[str, Any]
    model_dir: Path
    slots: int
    seed: int = 0
    dry_run: bool = False


class FakeTask:
    """What surrounds a trial that is built in this process: rank 0 of ranks that are not there.

    Attributes:
        ranks: what the ranks would tell each other; each says what rank 0 says.
    """

    def __init__(self, request: DryRunRequest, storage: Path) -> None:
        self._request = request
        self.ranks = JsonDistributed(0, request.slots, 0, lambda value: [value] * request.slots)
        self.platform = InMemoryPlatform(
            hparams=request.hyperparameters,
            experiment=request.experiment.plain(),
            model_dir=request.model_dir.resolve(),
            seed=request.seed,
            distributed=self.ranks,
            storage=storage,
            tensorboard_path=storage / "tensorboard",
        )
        self._contexts: list[ZeroTrialContext] = []

    def import_class(self) -> type[ZeroTrial]:
        """Import the trial's class, which runs the user's module."""
        name = self._request.entrypoint
        if name.as_determined:
            install_deepspeed().refuse_if_installed()
            install_determined()
        return import_trial_class(name.module, name.name, self._request.model_dir.resolve())

    def seeded_context(self) -> ZeroTrialContext:
        """Seed all random generators as a run does and return the context to build the trial
        with.
        """
        seed_everything(self._request.seed)
        self._contexts.append(ZeroTrialContext(self.platform, zero_trial.initialize, torch.device("cpu")))
        return self._contexts[-1]

    def close(self) -> None:
        """Close what contexts have opened in the folder, which is removed next."""
        for context in self._contexts:
            context.tensorboard.close()


@contextlib.contextmanager
def fake_task(request: DryRunRequest, initialize: EngineFactory, most_values: float = 0.0) -> Iterator[FakeTask]:
    """Yield what a trial is built with; inside, its engines come from ``initialize``, and pipelines
    of at most ``most_values`` parameters have values.

    What the trial prints goes to stderr. Afterwards its modules are forgotten and its files are
    gone.
    """
    with (
        tempfile.TemporaryDirectory(prefix="zero-trial-dry-run-") as folder,
        contextlib.redirect_stdout(sys.stderr),
        _model_folder(request.model_dir),
        engines_from(initialize),
        whole_pipelines(most_values),
    ):
        task = FakeTask(request, Path(folder))
        try:
            yield task
        finally:
            task.close()


class TrialCodeError(TrialError):
    """The trial's own code raised an exception."""

    exit_code = 1


def trial_code_error(error: BaseException, model_dir: Path, doing: str) -> ZeroTrialError:
    """Return the error for what the user's code raised, with the last line of that code in the
    traceback.
    """
    root = model_dir.resolve()
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(root)
    ]
    where = f"{Path(own[-1].filename).resolve().relative_to(root)}:{own[-1].lineno}" if own else None
    if not own and isinstance(error, RuntimeError):
        return TrialError(str(error))  # ours, about what the trial did: Determined raises the same
    line = f" in: {own[-1].line}" if own and own[-1].line else ""
    text = str(error).strip()
    return TrialCodeError(f"{doing} raised {type(error).__name__}{f': {text}' if text else ''}{line}", where=where)


@contextlib.contextmanager
def raised_by_trial(model_dir: Path, doing: str) -> Iterator[None]:
    """Raise what the trial's code raises in the block as the error of that code."""
    try:
        yield
    except ZeroTrialError:
        raise
    except (Exception, SystemExit) as error:
        raise trial_code_error(error, model_dir, doing) from error


@contextlib.contextmanager
def _model_folder(folder: Path) -> Iterator[None]:
    """Forget afterwards what was imported from the model's folder: the next one may have modules of
    the same names.
    """
    path, before, root = list(sys.path), set(sys.modules), folder.resolve()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(root):
                del sys.modules[name]
