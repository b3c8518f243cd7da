"""The console of the engine's lines."""

from __future__ import annotations

import logging

import pytest

from zero_trial.engine.build import ConsoleHandler, open_console
from zero_trial.errors import ConfigError


@pytest.fixture
def logger() -> logging.Logger:
    """One without a parent, which nobody has set up."""
    return logging.Logger("alone")


def test_progress_on_stdout_and_warnings_on_stderr(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    open_console(None, logger, ConsoleHandler(lambda: False))
    logger.debug("hidden")
    logger.info("step=%d", 3)
    logger.warning("careful")
    captured = capsys.readouterr()
    assert captured.out == "step=3\n"
    assert captured.err == "careful\n"


def test_the_level_decides_what_is_shown(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    open_console("Warning", logger, ConsoleHandler(lambda: False))
    logger.info("hidden")
    open_console("debug", logger)
    logger.debug("shown")
    assert capsys.readouterr().out == "shown\n"


def test_what_the_program_has_set_up_is_kept(logger: logging.Logger):
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.ERROR)
    open_console(None, logger)
    open_console(None, logger)
    assert logger.level == logging.ERROR
    assert not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers)


def test_one_handler_for_many_engines(logger: logging.Logger):
    open_console(None, logger)
    open_console("info", logger)
    assert len(logger.handlers) == 1


def test_an_unknown_level(logger: logging.Logger):
    with pytest.raises(ConfigError, match="log_level: no such level: got 'loud', expected one of debug"):
        open_console("loud", logger)


def test_silent_when_the_program_shows_lines_itself(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    """Else every line would come twice."""
    taken_over = [False]
    open_console(None, logger, ConsoleHandler(lambda: taken_over[0]))
    logger.info("one")
    taken_over[0] = True
    logger.info("two")
    assert capsys.readouterr().out == "one\n"
    assert ConsoleHandler()._elsewhere() == bool(logging.getLogger().handlers)
