"""Runs at the start of every Python process of a trial: moves the absolute paths that the harness has built in below ``DET_RUN_ROOT``.

The harness expects a container of its own: it reads and writes ``/run/determined``, stores checkpoints below ``/determined_shared_fs`` and
links ``/tmp/tensorboard``. On a machine that is shared these would meet those of other trials, and the first of them would make every other
``det`` program believe that it is on a cluster. So the constants are changed while the modules are loaded, in memory only; a module that no
longer has its constant cannot be imported. Without ``DET_RUN_ROOT`` nothing happens. Another ``sitecustomize`` further down the path is run
after this one.

This file is imported before anything else and stands alone: standard library only.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from types import CodeType, TracebackType
from typing import Any

MOVED = {
    "determined._info": ("/run/determined",),
    "determined.constants": ("/run/determined",),
    "determined.common.constants": ("/determined_shared_fs",),
    "determined.exec.prep_container": ("/tmp/tensorboard",),
}
"""Module -> the starts of the paths in it that are moved."""

SAID_LAST = ("Sending process", "failed (exitcode", "no error file defined for parent")
"""How lines of the launcher begin that tell of ranks which fail."""


def relocate(code: CodeType, starts: tuple[str, ...], root: str) -> tuple[CodeType, set[str]]:
    """The code with all string constants that begin with one of ``starts`` moved below ``root``, and the starts that were found."""
    found: set[str] = set()
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            value, inner = relocate(value, starts, root)
            found |= inner
        elif isinstance(value, str):
            # Only a path is one: a docstring that begins with it would have blanks.
            hits = {start for start in starts if value.startswith(start) and not set(value) & {" ", "\n"}}
            found |= hits
            value = root + value if hits else value
        constants.append(value)
    return code.replace(co_consts=tuple(constants)), found


class RelocatingLoader(SourceFileLoader):
    """Loads a module from its source file, with its paths moved."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code; ImportError if it no longer has the paths."""
        code = super().get_code(fullname)
        if code is None:
            return None
        starts = MOVED[fullname]
        moved, found = relocate(code, starts, os.environ["DET_RUN_ROOT"])
        if found != set(starts):
            missing = ", ".join(sorted(set(starts) - found))
            raise ImportError(
                f"{fullname} has no path that begins with {missing}: this version of determined keeps its files elsewhere, "
                "and the embedded master cannot run it beside others. Install determined 0.38.1.",
                name=fullname,
            )
        return moved


class RelocatingFinder(MetaPathFinder):
    """Finds the modules whose paths are moved, where they would be found anyway."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None for all other modules."""
        if fullname not in MOVED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = RelocatingLoader(fullname, spec.origin)
        return spec


def next_sitecustomize() -> ModuleSpec | None:
    """The ``sitecustomize`` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    return PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])


def run_next() -> None:
    """Import the hidden ``sitecustomize`` in this one's place."""
    spec = next_sitecustomize()
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def is_launcher(words: list[str]) -> bool:
    """Whether a process that was started with ``words`` is torch.distributed.run."""
    return any(words[at : at + 2] == ["-m", "torch.distributed.run"] for at in (1, 2))


def last_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An ``excepthook``: of ranks that failed, which was the first and how, in place of a traceback of the launcher's own lines."""
    failures = getattr(error, "failures", None) if kind.__name__ == "ChildFailedError" else None
    if not failures:
        sys.__excepthook__(kind, error, trace)
        return
    from zero_trial.master.agent.supervisor import of_failure, verdict

    sys.stderr.write(verdict([of_failure(*item) for item in failures.items()]) + "\n")


def is_news(record: Any) -> bool:
    """A logging filter of the launcher's: what the last line says better is left out."""
    return not str(record.msg).startswith(SAID_LAST)


def speak_briefly() -> None:
    """Of ranks that fail, this process says one line."""
    import logging

    sys.excepthook = last_line
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").addFilter(is_news)


if __name__ == "sitecustomize":
    if os.environ.get("DET_RUN_ROOT"):
        sys.meta_path.insert(0, RelocatingFinder())
        if is_launcher(sys.orig_argv):
            speak_briefly()
    run_next()
