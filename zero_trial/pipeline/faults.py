"""What went wrong in a pipeline, in words: which rank, stage, micro-batch and action, and the line of the layer."""

from __future__ import annotations

import traceback

from zero_trial.errors import TrialError
from zero_trial.pipeline.actions import NONE, Action


def layer_fault(error: Exception, rank: int, stage: int, stages: int, action: Action | None) -> TrialError:
    """The error for an exception that a layer or the loss function raised."""
    where = f"rank {rank}, pipeline stage {stage} of {stages}"
    if action is not None:
        number = f", micro-batch {action.micro_batch}" if action.micro_batch != NONE else ""
        where += f"{number}, action {action}"
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
    return TrialError("a pipeline stage failed", where=where, got=got, fix=_place(error))


def _place(error: Exception) -> str | None:
    """The innermost line that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename and "/zero_trial/" not in frame.filename]
    if not own:
        return None
    return f"It was raised in {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"
