"""The errors that zero_trial raises: each says where, what it got, what it expected, and how to
fix it.

A user mistake ends in exactly one of these, printed as a few lines and turned into an exit code; a
traceback is for our own faults only. Where code for torch or DeepSpeed catches a builtin error for
the same mistake, ours is one: wrong values are ValueErrors, wrong calls and loads RuntimeErrors.
All three are AssertionErrors too, because DeepSpeed checks them with ``assert``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ExitStatus(IntEnum):
    """What a command of zero-trial, and a rank, ends with. A signal n ends a run with 128 + n."""

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
    ExitStatus.DOES_NOT_FIT: "the model does not fit into memory",
    ExitStatus.DIVERGED: "training diverged: the loss or the gradients are not finite",
    ExitStatus.INFRASTRUCTURE: "infrastructure: a lost rank, a failed disk, a damaged checkpoint",
    ExitStatus.PREEMPTED: "preempted after saving: zero-trial resume goes on",
    ExitStatus.INTERRUPTED: "interrupted with Ctrl-C",
    ExitStatus.BROKEN_PIPE: "the reader of the output has gone",
}


class ZeroTrialError(Exception):
    """Base of all errors that a user may see.

    ``what`` is one sentence; ``where`` is a dotted ds_config key, a file with its line, or a rank
    and an operation; ``got`` and ``expected`` are short values; ``fix`` is a line that can be
    pasted or done. ``exit_code`` is what a command line ends with.
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
        """Return this error with another exit code, that of its cause; None changes nothing."""
        if exit_code is not None:
            self.exit_code = exit_code
        return self

    def describe(self) -> str:
        """Return the message as it is shown: ``where: what: got G, expected E. Fix.``"""
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
    """Something in ds_config, the experiment YAML or the hyperparameters cannot be used."""

    exit_code: int = ExitStatus.USER_ERROR

    faults: tuple[ConfigError, ...] = ()

    @classmethod
    def many(cls, faults: Iterable[ConfigError]) -> ConfigError:
        """Return one error that holds all faults of a file; a single one as it is."""
        listed = tuple(faults)
        if len(listed) == 1:
            return listed[0]
        error = cls(f"{len(listed)} faults:\n" + "\n".join(f"  {fault.describe()}" for fault in listed))
        error.faults = listed
        return error

    def describe(self) -> str:
        return self.what if "\n" in self.what else super().describe()


class InvalidHP(ConfigError):
    """This combination of hyperparameters cannot be trained; a search goes on without it."""


class DataError(ZeroTrialError, ValueError):
    """A data loader or a batch is not what training needs."""

    exit_code: int = ExitStatus.USER_ERROR


class TrialError(ZeroTrialError, RuntimeError, AssertionError):
    """The user's trial or loop broke a rule of the API, such as a step without a backward."""

    exit_code: int = ExitStatus.USER_ERROR


class DoesNotFit(ZeroTrialError):
    """The model, its state and its activations do not fit into the memory that there is."""

    exit_code: int = ExitStatus.DOES_NOT_FIT


class Diverged(ZeroTrialError):
    """Training cannot go on: the loss or the gradients are not finite."""

    exit_code: int = ExitStatus.DIVERGED


class MeshError(ZeroTrialError):
    """Ranks disagree, one is missing, or a collective did not finish in time."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class WorkerLost(ZeroTrialError, RuntimeError):
    """A process of a data loader has died, mostly because the host's memory ran out."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class CheckpointError(ZeroTrialError, RuntimeError, AssertionError):
    """A checkpoint cannot be written, verified or loaded into this model."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class StorageError(ZeroTrialError):
    """A disk failed: the one that holds offloaded state, or a run's folder."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class MasterError(ZeroTrialError):
    """A master does not start, does not answer, or refuses what it is asked."""

    exit_code: int = ExitStatus.INFRASTRUCTURE


class KernelUnavailable(ZeroTrialError):
    """A native kernel cannot be built or loaded here; the pure-torch reference is used."""


class Preempted(ZeroTrialError):
    """The run was asked to stop; it has saved and can be resumed."""

    exit_code: int = ExitStatus.PREEMPTED
