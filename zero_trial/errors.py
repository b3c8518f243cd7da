"""The errors that zero_trial raises: each says where, what it got, what it expected, and how to fix
it.

A user mistake raises exactly one of these errors, printed as a few lines and turned into an exit
code; tracebacks are only for faults of zero_trial itself. If code written for torch or DeepSpeed
catches a builtin error for a mistake, the error here is a subclass of it: wrong values are
ValueErrors, wrong calls and loads RuntimeErrors. All three are also AssertionErrors, because
DeepSpeed checks them with ``assert``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ExitStatus(IntEnum):
    """The exit codes of zero-trial commands and of ranks. A run that is stopped by signal n exits
    with 128 + n."""

    OK = 0
    TRIAL_FAULT = 1
    USER_ERROR = 2
    DOES_NOT_FIT = 3
    DIVERGED = 4
    INFRASTRUCTURE = 5
    PREEMPTED = 75
    INTERRUPTED = 130
    BROKEN_PIPE = 141

    @property
    def meaning(self) -> str:
        """Return a few words for help texts and the reference."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitStatus.OK: "success",
    ExitStatus.TRIAL_FAULT: "an error in the trial's code, or in zero_trial",
    ExitStatus.USER_ERROR: "a mistake in the arguments, the experiment, the ds_config or the data",
    ExitStatus.DOES_NOT_FIT: "the model does not fit in memory",
    ExitStatus.DIVERGED: "training diverged: the loss or the gradients are not finite",
    ExitStatus.INFRASTRUCTURE: "infrastructure: a lost rank, a failed disk, a damaged checkpoint",
    ExitStatus.PREEMPTED: "preempted after saving; zero-trial resume continues the run",
    ExitStatus.INTERRUPTED: "interrupted with Ctrl-C",
    ExitStatus.BROKEN_PIPE: "the reader of the output has closed the pipe",
}


class ZeroTrialError(Exception):
    """Base class of all errors that a user may see.

    ``what`` is one sentence; ``where`` is a dotted ds_config key, a file with its line, or a rank
    and an operation; ``got`` and ``expected`` are short values; ``fix`` is an instruction, or a
    line to paste. ``exit_code`` is the exit code of the command.
    """

    exit_code: int = ExitStatus.TRIAL_FAULT

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.fix = fix
        # names may come from a file: an escape sequence must not reach the terminal of a reader
        super().__init__(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", self.describe()))

    def ending_with(self, exit_code: int | None) -> ZeroTrialError:
        """Return this error with another exit code, that of its cause; None leaves it unchanged."""
        if exit_code is not None:
            self.exit_code = exit_code
        return self

    def describe(self) -> str:
        """Return the message as it is printed: ``where: what: got G, expected E. Fix.``"""
        head = f"{self.where}: {self.what}" if self.where else self.what
        facts = []
        if self.got is not None:
            facts.append(f"got {self.got}")
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        text = head.rstrip(".")
        if facts:
            text += ": " + ", ".join(facts)
        text += "." if not text.endswith((".", "?", "!")) else ""
        return f"{text} {self.fix}" if self.fix else text


class ConfigError(ZeroTrialError, ValueError, AssertionError):
    """A value in ds_config, the experiment YAML or the hyperparameters is invalid."""

    exit_code: int = ExitStatus.USER_ERROR

    faults: tuple[ConfigError, ...] = ()

    @classmethod
    def many(cls, faults: Iterable[ConfigError]) -> ConfigError:
        """Return one error that contains all faults of a file, or the fault itself if there is only
        one."""
        listed = tuple(faults)
        if len(listed) == 1:
            return listed[0]
        error = cls(f"{len(listed)} faults:\n" + "\n".join(f"  {fault.describe()}" for fault in listed))
        error.faults = listed
        return error

    def describe(self) -> str:
        return self.what if "\n" in self.what else super().describe()


class InvalidHP(ConfigError):
    """This combination of hyperparameters cannot be trained; a search continues without it."""


class DataError(ZeroTrialError, ValueError):
    """A data loader or a batch does not meet the requirements of training."""

    exit_code: int = ExitStatus.USER_ERROR


class TrialError(ZeroTrialError, RuntimeError, AssertionError):
    """The user's trial or training loop broke a rule of the API, such as a step without a
    backward."""

    exit_code: int = ExitStatus.USER_ERROR


class DoesNotFit(ZeroTrialError):
    """The model, its state and its activations do not fit in the available memory."""

    exit_code: int = ExitStatus.DOES_NOT_FIT


class Diverged(ZeroTrialError):
    """Training cannot continue: the loss or the gradients are not finite."""

    exit_code: int = ExitStatus.DIVERGED


class MeshError(ZeroTrialError):
    """Ranks disagree, a rank is missing, or a collective did not finish in time."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class WorkerLost(ZeroTrialError, RuntimeError):
    """A worker process of a data loader has died, usually because the host ran out of memory."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class CheckpointError(ZeroTrialError, RuntimeError, AssertionError):
    """A checkpoint cannot be written, verified or loaded into this model."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class StorageError(ZeroTrialError):
    """The disk that holds offloaded state or a run's folder failed."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class MasterError(ZeroTrialError):
    """A master does not start, does not answer, or rejects a request."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class KernelUnavailable(ZeroTrialError):
    """A native kernel cannot be built or loaded here."""


class Preempted(ZeroTrialError):
    """The run was asked to stop; it has saved and can be resumed."""

    exit_code: int = ExitStatus.PREEMPTED
