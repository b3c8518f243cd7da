"""The guard: the first code of every process of a run, which ties it to its parent, opens its log
and records its error.

    python -m zero_trial.launch.guard --parent PID [--run-dir DIR] [--cwd DIR] [--inject-local-rank]
    (-m MODULE | --exec PROGRAM | SCRIPT) arguments

With ``--run-dir`` the process is a rank: its output goes to ``<run>/logs/rank-<r>.log`` and an
error to ``<run>/errors/rank-<r>.json``. The guard runs the code in its own process, so there is
nothing between torch.distributed.run and the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zero_trial.errors import StorageError, ZeroTrialError
from zero_trial.trial.runs.events import append_line
from zero_trial.trial.runs.rank_records import ErrorRecord, RankRecord, write_error, write_rank
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.failures import error_in_worker, known_fault, with_user_line

PARENT = "ZERO_TRIAL_PARENT_PID"
"""Environment variable with the pid of torch.distributed.run, whose children the ranks are."""

RUN_DIR = "ZERO_TRIAL_RUN_DIR"
"""Environment variable in which a rank finds the run's folder, for a script that opens a run of its
own."""

ERROR_HEADER = "[zero_trial] this rank ends with an error:"
"""The line in a rank's log that its traceback follows."""

_OWN_FRAMES = (__file__, "<frozen runpy>")


def main(argv: Sequence[str], place: Mapping[str, str] | None = None) -> int:
    """Guard and run one process; return its exit code (``--exec`` does not return).

    ``place``: variables of the environment that a forked rank gets (RANK, MASTER_ADDR, ...); a
    process that was started by itself has them.
    """
    os.environ.update(place or {})
    options = _parse(argv)
    die_with_parent(options.parent or int(os.environ.get(PARENT, os.getppid())))
    if options.run_dir is None:
        os.environ[PARENT] = str(os.getpid())
        return _run_code(options)
    run_dir = Path(options.run_dir)
    record = _own_record(os.environ, watched=options.exec is None)
    _redirect_output(RunFolder(run_dir).log(record.rank))
    write_rank(run_dir, record)
    logging.getLogger("zero_trial.waits").addHandler(WaitEvents(RunFolder(run_dir.resolve()).events, record.rank))
    os.environ[RUN_DIR] = str(run_dir.resolve())
    if options.cwd:
        os.chdir(options.cwd)
    if options.inject_local_rank:
        options.arguments.insert(0, f"--local_rank={record.local_rank}")
    code = _run_rank(run_dir, record.rank, options)
    with contextlib.suppress(StorageError):  # a full disk does not change how the rank ended
        write_rank(run_dir, replace(record, exit_code=code))
    return code


class WaitEvents(logging.Handler):
    """Adds to the run's events what this rank reports about ranks that wait for each other: any
    rank may be the one that reports, and the console shows the log of at most one."""

    def __init__(self, events: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Add one event; the message is in the rank's log, whether this can be written or not."""
        event = {"time": record.created, "kind": "note", "message": record.getMessage(), "rank": self._rank}
        with contextlib.suppress(StorageError):
            append_line(self._events, event)


def _own_record(env: Mapping[str, str], *, watched: bool) -> RankRecord:
    """Return the record of this process, as torch.distributed.run has placed it."""
    return RankRecord(
        int(env.get("RANK", "0")), int(env.get("LOCAL_RANK", "0")), os.getpid(), watched, host=socket.gethostname()
    )


def _redirect_output(log: Path) -> None:
    """Send stdout and stderr of this process, those of native libraries too, line by line to the
    end of ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")
    os.close(target)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zero_trial.launch.guard", allow_abbrev=False)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--run-dir")
    parser.add_argument("--cwd")
    parser.add_argument("--inject-local-rank", action="store_true")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", dest="module", action="store_true")
    kind.add_argument("--exec", action="store_true", default=None)
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _run_rank(run_dir: Path, rank: int, options: argparse.Namespace) -> int:
    """Run the code and turn whatever ends it into an exit code and, if it is a failure, an error
    record."""
    try:
        return _run_code(options)
    except ZeroTrialError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _failed(run_dir, rank, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _failed(run_dir, rank, error, "interrupted", 130)
    except Exception as error:  # the last place where a rank's error can be recorded
        _print_traceback(error)
        if (known := known_fault(error)) is not None:
            return _failed(run_dir, rank, known, str(known), known.exit_code)
        said = error_in_worker(error) or with_user_line(f"{type(error).__name__}: {error}", error)
        return _failed(run_dir, rank, error, said, 1)


def _print_traceback(error: BaseException) -> None:
    """Print the traceback into the log, without the frames of this file and of runpy."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None and inner.tb_frame.f_code.co_filename in _OWN_FRAMES:
        inner = inner.tb_next
    sys.stderr.write(ERROR_HEADER + "\n")
    traceback.print_exception(type(error), error, inner)


def _failed(run_dir: Path, rank: int, error: BaseException, message: str, code: int) -> int:
    with contextlib.suppress(StorageError):
        write_error(run_dir, ErrorRecord(rank, type(error).__name__, message, code, time.time()))
    return code


def _run_code(options: argparse.Namespace) -> int:
    """Run a module, a script or a program as if it had been started directly; returns the code that
    it exits with."""
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
    except SystemExit as ending:
        return _exit_code(ending)
    return 0


def _exit_code(ending: SystemExit) -> int:
    """Return the code of a SystemExit by Python's own rule: None is 0, a number is itself, anything
    else is printed and is 1.
    """
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code
    sys.stderr.write(f"{ending.code}\n")
    return 1


_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_WATCH_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """Tie this process to ``parent`` (its pid): it is killed when the parent ends, at once if it
    has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            _watch_parent(parent)
    else:
        _watch_parent(parent)
    if os.getppid() != parent:  # it died between our start and the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    """Watch the parent from a daemon thread, every half second, on kernels without a parent-death
    signal."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="zero_trial-parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
