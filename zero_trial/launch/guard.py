"""The guard: runs first in every rank, ties the rank to its supervisor, and records its error.

    python -m zero_trial.launch.guard --parent PID --run-dir DIR [--cwd DIR] [--inject-local-rank]
    (-m MODULE | --exec PROGRAM | SCRIPT) arguments

Errors are written to ``<run>/errors/rank-<r>.json``. The guard runs the code in its own process, so
there is no extra process between supervisor and rank.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from zero_trial.errors import StorageError, ZeroTrialError
from zero_trial.trial.runs.events import append_line
from zero_trial.trial.runs.run_layout import ErrorRecord, RunFolder, write_error
from zero_trial.util.failures import error_in_worker, known_fault, with_user_line
from zero_trial.util.process_tree import die_with_parent

RUN_DIR = "ZERO_TRIAL_RUN_DIR"
"""Environment variable in which a rank finds the run's folder, for a script that opens a run of its
own."""

ERROR_HEADER = "[zero_trial] this rank ends with an error:"
"""The line in a rank's log that its traceback follows."""

_OWN_FRAMES = (__file__, "<frozen runpy>")


def main(argv: Sequence[str]) -> int:
    """Guard and run one rank; return its exit code (``--exec`` does not return)."""
    options = _parse(argv)
    die_with_parent(options.parent)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")
    run_dir, rank = Path(options.run_dir), int(os.environ.get("RANK", "0"))
    logging.getLogger("zero_trial.waits").addHandler(WaitEvents(RunFolder(run_dir.resolve()).events, rank))
    os.environ[RUN_DIR] = str(run_dir.resolve())
    if options.cwd:
        os.chdir(options.cwd)
    if options.inject_local_rank:
        options.arguments.insert(0, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    return _run_rank(run_dir, rank, options)


class WaitEvents(logging.Handler):
    """Adds this rank's reports about waiting ranks to the run's events: any rank can be the one
    that reports, but the console shows the log of at most one rank."""

    def __init__(self, events: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Add one event (best effort: the message is also in the rank's log)."""
        event = {"time": record.created, "kind": "note", "message": record.getMessage(), "rank": self._rank}
        with contextlib.suppress(StorageError):
            append_line(self._events, event)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zero_trial.launch.guard", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--cwd")
    parser.add_argument("--inject-local-rank", action="store_true")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", dest="module", action="store_true")
    kind.add_argument("--exec", action="store_true", default=None)
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _run_rank(run_dir: Path, rank: int, options: argparse.Namespace) -> int:
    """Run the code; return its exit code, and write an error record if it fails."""
    try:
        return _run_code(options)
    except ZeroTrialError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _failed(run_dir, rank, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _failed(run_dir, rank, error, "interrupted", 130)
    except Exception as error:  # the last place where a rank's error can be recorded
        inner = error.__traceback__  # without the frames of this file and of runpy
        while inner is not None and inner.tb_next is not None and inner.tb_frame.f_code.co_filename in _OWN_FRAMES:
            inner = inner.tb_next
        sys.stderr.write(ERROR_HEADER + "\n")
        traceback.print_exception(type(error), error, inner)
        if (known := known_fault(error)) is not None:
            return _failed(run_dir, rank, known, str(known), known.exit_code)
        said = error_in_worker(error) or with_user_line(f"{type(error).__name__}: {error}", error)
        said += _hint(error, str(error))
        return _failed(run_dir, rank, error, said, 1)


_HINTS = {
    "_cuda_setDevice|not compiled with CUDA|NCCL built in": ". Here torch has no GPU: leave out calls of torch.cuda, "
    "put batches on engine.device, and name no backend",
    "process group has not been initialized": ". Call zero_trial.init_distributed() before it",
}


def _hint(error: Exception, text: str) -> str:
    """Return the fix for a common error of torch or Python in scripts; "" if unknown."""
    if isinstance(error, ImportError) and "deepspeed" in text.lower() and not os.environ.get("ZERO_TRIAL_AS_DEEPSPEED"):
        return ". With zero-trial launch --as-deepspeed, import deepspeed means zero_trial."
    if isinstance(error, ModuleNotFoundError) and "is not a package" in text:
        hiding = getattr(sys.modules.get((error.name or "").rpartition(".")[0]), "__file__", "a file of yours")
        return f". {hiding} hides the package of that name: rename it."
    return next((hint for words, hint in _HINTS.items() if re.search(words, text)), "")


def _failed(run_dir: Path, rank: int, error: BaseException, message: str, code: int) -> int:
    with contextlib.suppress(StorageError):
        write_error(run_dir, ErrorRecord(rank, type(error).__name__, message, code, time.time()))
    return code


def _run_code(options: argparse.Namespace) -> int:
    """Run a module, a script or a program as if started directly; return its exit code."""
    if options.exec:
        sys.stdout.flush()
        os.execvp(options.target, [options.target, *options.arguments])
    sys.argv = [options.target, *options.arguments]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.target).resolve().parent))
            runpy.run_path(options.target, run_name="__main__")
    except SystemExit as ending:  # as Python itself does
        if isinstance(ending.code, int | None):
            return ending.code or 0
        sys.stderr.write(f"{ending.code}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
