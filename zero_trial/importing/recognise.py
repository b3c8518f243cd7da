"""What a path holds, by what lies there: a DeepSpeed checkpoint, or plain weights."""

from __future__ import annotations

from pathlib import Path

from zero_trial.checkpoint.manifest import MANIFEST_NAME
from zero_trial.errors import CheckpointError
from zero_trial.importing.deepspeed import read_deepspeed
from zero_trial.importing.findings import Findings, Wishes
from zero_trial.importing.folder import find_deepspeed
from zero_trial.importing.weights import NAMES, find_weights, read_weights


def read_source(source: Path, tag: str | None, wishes: Wishes) -> Findings:
    """The findings of the reader whose format this is. Raises CheckpointError for a path that is of none, or not there."""
    if not source.exists():
        raise CheckpointError("there is no such file or folder", where=str(source))
    folder = find_deepspeed(source, tag)
    if folder is not None:
        return read_deepspeed(folder, wishes)
    weights = find_weights(source)
    if weights is not None:
        return read_weights(weights, wishes)
    if (source / MANIFEST_NAME).is_file() or any((path / MANIFEST_NAME).is_file() for path in source.iterdir()):
        raise CheckpointError(
            "this is a checkpoint of zero_trial already", where=str(source), fix="Load it with engine.load_checkpoint."
        )
    raise CheckpointError(
        "nothing here that can be imported",
        where=str(source),
        got=", ".join(sorted(path.name for path in source.iterdir())[:6]) or "an empty folder",
        expected=f"a DeepSpeed checkpoint (mp_rank_00_model_states.pt ...), or one of {', '.join(NAMES)}",
    )
