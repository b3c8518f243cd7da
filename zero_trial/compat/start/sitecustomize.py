"""Runs at the start of every Python process that has this folder on PYTHONPATH. Does nothing unless
one of two variables is set.

``ZERO_TRIAL_AS_DEEPSPEED``: ``import deepspeed`` imports zero_trial, also in the processes that a
script starts: see ``zero_trial_start.py``. ``pip install`` adds a .pth line with the same effect;
``pip install -e``, and a source tree on PYTHONPATH, have no such line.

``DET_RUN_ROOT``, set for the embedded master's trials: relocates the harness's hard-coded absolute
paths below it. The harness expects its own container: it reads and writes ``/run/determined``,
stores checkpoints below ``/determined_shared_fs`` and links ``/tmp/tensorboard``. On a shared
machine these would collide with other trials', and ``/run/determined`` would make every other
``det`` program believe that it runs on a cluster. So the constants are changed in memory while the
modules load; importing a module that no longer contains its constant raises ImportError.

Another ``sitecustomize`` later on the path runs after this one.

This file is imported before anything else and uses only the standard library.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, TracebackType
from typing import Any

_MOVED = {
    "determined._info": ("/run/determined",),
    "determined.constants": ("/run/determined",),
    "determined.common.constants": ("/determined_shared_fs",),
    "determined.exec.prep_container": ("/tmp/tensorboard",),
}
"""Module -> the prefixes of the paths in it that are moved."""

_MOVED_SOCKETS = {"determined.launch.torch_distributed": ("/tmp/pid_server-",)}
"""The same for DET_SOCKET_ROOT, a short path, of allocations with several nodes, which may be on
one machine."""

_REPEATED = ("Sending process", "failed (exitcode", "no error file defined for parent")
"""The starts of the launcher's log lines about ranks that fail."""


def _relocate(code: CodeType, starts: tuple[str, ...], root: str) -> tuple[CodeType, set[str]]:
    """Move constants that begin with one of ``starts`` below ``root``; return code and matches."""
    found: set[str] = set()
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            value, inner = _relocate(value, starts, root)
            found |= inner
        elif isinstance(value, str):
            # Skip strings with blanks: docstrings may start with the path.
            hits = {start for start in starts if value.startswith(start) and not set(value) & {" ", "\n"}}
            found |= hits
            value = root + value if hits else value
        constants.append(value)
    return code.replace(co_consts=tuple(constants)), found


class _RelocatingLoader(SourceFileLoader):
    """Loads a module from its source file and relocates its paths."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code. Raises ImportError if the code no longer contains the paths."""
        code = super().get_code(fullname)
        if code is None:
            return None
        sockets = fullname in _MOVED_SOCKETS
        starts = (_MOVED_SOCKETS if sockets else _MOVED)[fullname]
        moved, found = _relocate(code, starts, os.environ["DET_SOCKET_ROOT" if sockets else "DET_RUN_ROOT"])
        if found != set(starts):
            missing = ", ".join(sorted(set(starts) - found))
            raise ImportError(
                f"{fullname} has no path that starts with {missing}: this version of determined keeps its files elsewhere, and the embedded "
                "master cannot run several of its trials at once. Install determined 0.38.1.",
                name=fullname,
            )
        return moved


class _RelocatingFinder(MetaPathFinder):
    """Finds the modules whose paths are relocated, in their usual locations."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for all other modules."""
        if fullname not in _MOVED and not (fullname in _MOVED_SOCKETS and os.environ.get("DET_SOCKET_ROOT")):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _RelocatingLoader(fullname, spec.origin)
        return spec


def _run_next() -> None:
    """Import the ``sitecustomize`` that this one shadows."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _wait_for_deepspeed() -> None:
    """Import zero_trial_start, which is next to the package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "zero_trial_start.py")
    spec = spec_from_file_location("zero_trial_start", os.path.normpath(path))
    if spec is not None and spec.loader is not None and spec.name not in sys.modules:
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


# -- the launcher: one line about the rank that failed first, instead of a traceback and a table


def _install_failure_line() -> None:
    """Make this process print one line about failed ranks."""
    import logging

    sys.excepthook = print_failure
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").addFilter(_is_not_repeated)


def _is_not_repeated(record: Any) -> bool:
    """Filter the launcher's log: drop records that the failure line repeats."""
    return not str(record.msg).startswith(_REPEATED)


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the first failed rank and the reason; print any other error as Python does."""
    failures = getattr(error, "failures", None) if kind.__name__ == "ChildFailedError" else None
    if not failures:
        sys.__excepthook__(kind, error, trace)
        return
    from zero_trial.launch.first_cause import launcher_line

    sys.stderr.write(launcher_line(failures) + "\n")


if __name__ == "sitecustomize":
    if os.environ.get("DET_RUN_ROOT"):
        sys.meta_path.insert(0, _RelocatingFinder())
        if any(sys.orig_argv[at : at + 2] == ["-m", "torch.distributed.run"] for at in (1, 2)):
            _install_failure_line()
    if os.environ.get("ZERO_TRIAL_AS_DEEPSPEED", "0") not in ("", "0"):
        _wait_for_deepspeed()
    _run_next()
