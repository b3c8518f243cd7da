"""Whether a run that has crashed is started again: ``max_restarts`` of the experiment, as far as it can help.

A master starts a crashed trial again whatever the reason. Here somebody looks on, so a run is started again only if the reason may
pass (a process that was killed, a lost connection, an error that nobody expected) and the run has saved something since it began:
without a new checkpoint it would fail at the same place, after the same time.
"""

from __future__ import annotations

from pathlib import Path

from zero_trial.launch.cause import INFRASTRUCTURE
from zero_trial.launch.supervisor import Outcome

UNEXPECTED = 1


def newest_step(folder: Path) -> int | None:
    """The step of the newest finished checkpoint in a run's folder."""
    found = [
        int(path.name.removeprefix("step-"))
        for path in (folder / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdigit() and (path / "metadata.json").is_file()
    ]
    return max(found, default=None)


def has_checkpoints(folder: Path) -> bool:
    """Whether a run's folder has any checkpoint, damaged or not."""
    return any(path.name.removeprefix("step-").isdigit() for path in (folder / "checkpoints").glob("step-*"))


def may_help(outcome: Outcome, before: int | None, now: int | None) -> bool:
    """Whether to start again, given the newest checkpoint's step when the run began and now. Pure."""
    if outcome.exit_code not in (INFRASTRUCTURE, UNEXPECTED):
        return False  # it ended well, was asked to stop, or would fail in the same way
    return now is not None and (before is None or now > before)


def restart_line(outcome: Outcome, number: int, most: int, step: int | None) -> str:
    """What the person who watches is told."""
    cause = outcome.cause.headline.splitlines()[0] if outcome.cause is not None else f"exit code {outcome.exit_code}"
    return f"restart {number} of {most}, from step {step}: {cause}"
