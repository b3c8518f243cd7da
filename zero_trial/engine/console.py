"""Where the engine's lines go: the logger "zero_trial", with a handler of its own where the program has set up no logging.

Progress goes to the standard output, warnings to the standard error; ``log_level`` says from which level on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from zero_trial.errors import ConfigError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ConsoleHandler(logging.Handler):
    """One line per record. The streams are looked up when a record comes, so that a redirection made later counts.

    Where ``elsewhere`` says that lines are shown by others (a program that sets up the root logger after initialize()), it is silent.
    """

    def __init__(self, elsewhere: Callable[[], bool] = lambda: bool(logging.getLogger().handlers)) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def emit(self, record: logging.LogRecord) -> None:
        if self._elsewhere():
            return
        stream: TextIO = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        stream.write(f"{self.format(record)}\n")
        stream.flush()


def open_console(
    level: str | None, logger: logging.Logger | None = None, handler: logging.Handler | None = None
) -> None:
    """Makes lines from ``level`` (default info) on visible. A level that the program has set itself is kept unless ``level`` is given.

    Raises ConfigError for an unknown level.
    """
    log = logger if logger is not None else logging.getLogger("zero_trial")
    if level is not None and level.lower() not in LEVELS:
        raise ConfigError("no such level", where="log_level", got=repr(level), expected=f"one of {', '.join(LEVELS)}")
    if not log.hasHandlers():
        log.addHandler(handler if handler is not None else ConsoleHandler())
    if level is not None:
        log.setLevel(LEVELS[level.lower()])
    elif log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
