"""Runs at the start of every Python process that has this folder on PYTHONPATH, and does what two
variables ask for; without them nothing.

``ZERO_TRIAL_AS_DEEPSPEED``: ``import deepspeed`` means zero_trial, also in the processes that a
script starts: see ``zero_trial_start.py``. ``pip install`` puts a line beside the package that does
the same; ``pip install -e``, and a tree on PYTHONPATH, have no such line.

``DET_RUN_ROOT``, of the embedded master's trials: the absolute paths that the harness has built in
are moved below it. The harness expects a container of its own: it reads and writes
``/run/determined``, stores checkpoints below ``/determined_shared_fs`` and links
``/tmp/tensorboard``. On a machine that is shared these would meet those of other trials, and the
first of them would make every other ``det`` program believe that it is on a cluster. So the
constants are changed while the modules are loaded, in memory only; a module that no longer has its
constant cannot be imported.

Another ``sitecustomize`` further down the path is run after this one.

This file is imported before anything else and stands alone: standard library only.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, TracebackType
from typing import Any, NamedTuple

_MOVED = {
    "determined._info": ("/run/determined",),
    "determined.constants": ("/run/determined",),
    "determined.common.constants": ("/determined_shared_fs",),
    "determined.exec.prep_container": ("/tmp/tensorboard",),
}
"""Module -> the starts of the paths in it that are moved."""

_MOVED_SOCKETS = {"determined.launch.torch_distributed": ("/tmp/pid_server-",)}
"""The same for DET_SOCKET_ROOT, a short path, of allocations with several nodes, which may be on
one machine."""

_REPEATED = ("Sending process", "failed (exitcode", "no error file defined for parent")
"""The starts of the launcher's log lines about ranks that fail."""

_PEER_FAILED = (
    r"another rank ended|connection (was )?(closed|reset|refused)|broken pipe|peer|socket|timed? ?out|process group"
)
"""What a rank reports if another rank failed before it."""


def _relocate(code: CodeType, starts: tuple[str, ...], root: str) -> tuple[CodeType, set[str]]:
    """Move constants that begin with one of ``starts`` below ``root``; return code and hits."""
    found: set[str] = set()
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            value, inner = _relocate(value, starts, root)
            found |= inner
        elif isinstance(value, str):
            # Only a path is one: a docstring that begins with it would have blanks.
            hits = {start for start in starts if value.startswith(start) and not set(value) & {" ", "\n"}}
            found |= hits
            value = root + value if hits else value
        constants.append(value)
    return code.replace(co_consts=tuple(constants)), found


class _RelocatingLoader(SourceFileLoader):
    """Loads a module from its source file, with its paths moved."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code. Raises ImportError if it no longer has the paths."""
        code = super().get_code(fullname)
        if code is None:
            return None
        sockets = fullname in _MOVED_SOCKETS
        starts = (_MOVED_SOCKETS if sockets else _MOVED)[fullname]
        moved, found = _relocate(code, starts, os.environ["DET_SOCKET_ROOT" if sockets else "DET_RUN_ROOT"])
        if found != set(starts):
            missing = ", ".join(sorted(set(starts) - found))
            raise ImportError(
                f"{fullname} has no path that begins with {missing}: this version of determined keeps its files elsewhere, "
                "and the embedded master cannot run it beside others. Install determined 0.38.1.",
                name=fullname,
            )
        return moved


class _RelocatingFinder(MetaPathFinder):
    """Finds the modules whose paths are moved, where they would be found anyway."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for all other modules."""
        if fullname not in _MOVED and not (fullname in _MOVED_SOCKETS and os.environ.get("DET_SOCKET_ROOT")):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _RelocatingLoader(fullname, spec.origin)
        return spec


def _run_next() -> None:
    """Import the ``sitecustomize`` that this one hides, in its place."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _wait_for_deepspeed() -> None:
    """Import zero_trial_start, which is beside the package, wherever that is."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "zero_trial_start.py")
    spec = spec_from_file_location("zero_trial_start", os.path.normpath(path))
    if spec is not None and spec.loader is not None and spec.name not in sys.modules:
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


# -- the launcher: one line about the rank that failed first, in place of a traceback and a table


def _is_launcher(arguments: list[str]) -> bool:
    """Return whether a process with these arguments is torch.distributed.run."""
    return any(arguments[at : at + 2] == ["-m", "torch.distributed.run"] for at in (1, 2))


def _install_failure_line() -> None:
    """Let this process print one line about ranks that fail."""
    import logging

    sys.excepthook = print_failure
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").addFilter(_is_not_repeated)


def _is_not_repeated(record: Any) -> bool:
    """Filter the launcher's log: leave out what the failure line repeats."""
    return not str(record.msg).startswith(_REPEATED)


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print which rank failed first and how; any other error as Python does."""
    failures = getattr(error, "failures", None) if kind.__name__ == "ChildFailedError" else None
    if not failures:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(first_failure([FailedRank.of(*item) for item in failures.items()]) + "\n")


class FailedRank(NamedTuple):
    """The end of one rank: its exit code, and the error report that it left, if any."""

    rank: int
    code: int
    report: str = ""
    printed: bool = False  # the rank has printed its report itself
    time: int = 0

    @classmethod
    def of(cls, rank: int, failure: Any) -> FailedRank:
        """Read torch's ProcessFailure."""
        message = failure.message
        if not isinstance(message, dict):  # torch's own text about the signal or its documentation
            return cls(rank, failure.exitcode, time=failure.timestamp)
        report = str(message.get("message", ""))
        return cls(rank, failure.exitcode, report, bool(message.get("printed")), failure.timestamp)

    @property
    def signal(self) -> int:
        """Return the number of the signal that ended it, 0 for none.

        A parent passes it on as 128 + n, or (``sys.exit(-n)``) as 256 - n.
        """
        return next((n for n in (-self.code, 256 - self.code, self.code - 128) if 0 < n < 32), 0)

    @property
    def suspicion(self) -> int:
        """Rank how likely this one ended the others, 0 first.

        First come ranks that report an error of their own, then those that died of a signal that no
        launcher sends.
        """
        import re

        if self.report:
            return 2 if re.search(_PEER_FAILED, self.report, re.IGNORECASE) else 0
        return 3 if self.signal == 15 else 1  # SIGTERM: the launcher ends the other ranks with it


def first_failure(failed: list[FailedRank]) -> str:
    """Return the line that says which rank failed first, and how. ``failed`` is not empty."""
    first = min(failed, key=lambda one: (one.suspicion, one.time, one.rank))
    others = [one.rank for one in failed if one is not first]
    ended = (
        f"; ended with it: {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}" if others else ""
    )
    reports = [one for one in failed if one.report]
    if first.report and (
        not first.printed or len(reports) > 1
    ):  # of several printed reports none is marked as the first
        return f"error   rank {first.rank}: {first.report.splitlines()[0]}{ended}"
    if not first.report and first.signal:
        return f"error   rank {first.rank}: {_killed_by(first.signal)}{ended}"
    return f"failed  rank {first.rank} with exit code {first.code}{ended}"


def _killed_by(number: int) -> str:
    import signal

    name = signal.Signals(number).name
    why = {
        "SIGKILL": ", from outside or by the kernel's OOM killer",
        "SIGSEGV": ": a native library crashed",
        "SIGBUS": ": a native library crashed, or /dev/shm is full",
        "SIGABRT": ": a native library gave up",
    }
    return f"killed by {name}{why.get(name, '')}"


if __name__ == "sitecustomize":
    if os.environ.get("DET_RUN_ROOT"):
        sys.meta_path.insert(0, _RelocatingFinder())
        if _is_launcher(sys.orig_argv):
            _install_failure_line()
    if os.environ.get("ZERO_TRIAL_AS_DEEPSPEED", "0") not in ("", "0"):
        _wait_for_deepspeed()
    _run_next()
