"""Which checkpoint, and which of its engines, a folder on the command line means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_trial.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zero_trial.checkpoint.folder import EngineCheckpoint, SavedCheckpoint

FOLDER_HELP = "a checkpoint, or a run's folder or a folder of checkpoints: then the newest whole one"


def choose(folder: Path) -> SavedCheckpoint:
    """The checkpoint itself, or the latest that looks whole. Raises CheckpointError if it, or every one, is broken."""
    from zero_trial.checkpoint.folder import inspect_folder

    shelf = inspect_folder(folder)
    if len(shelf.trials) > 1:
        raise ConfigError(
            f"checkpoints of {len(shelf.trials)} trials lie here",
            where=str(shelf.folder),
            expected="one checkpoint",
            fix=f"zero-trial ckpt ls {shelf.folder} shows them; name one.",
        )
    saved = shelf.saved[-1] if shelf.single else shelf.latest()
    if saved is None:
        raise CheckpointError(
            "no checkpoint here is whole",
            where=str(shelf.folder),
            got=next((one.fault for one in reversed(shelf.saved) if one.fault), "saves that did not finish"),
        )
    if saved.fault is not None:
        raise CheckpointError(saved.fault)
    return saved


def only_engine(saved: SavedCheckpoint) -> EngineCheckpoint:
    """The engine of a checkpoint that has one. Raises ConfigError naming them where there are several."""
    if not saved.engines:
        raise ConfigError(
            "no engine has saved anything in this checkpoint",
            where=str(saved.folder),
            fix="A trial that saves its model by itself knows how to read it.",
        )
    if len(saved.engines) > 1:
        names = ", ".join(engine.folder.name for engine in saved.engines)
        raise ConfigError(
            f"the trial has {len(saved.engines)} models",
            where=str(saved.folder),
            got=names,
            fix=f"Name one: {saved.engines[0].folder}.",
        )
    return saved.engines[0]
