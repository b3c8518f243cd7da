"""Fixtures for all tests: the pools of ranks, random numbers that are the same in every run, and a
log that one test does not silence for the next.

Hypothesis derives its examples from each test's own name, so that a failure is there again in the
next run. ``--hypothesis-profile=explore`` looks for new ones, and prints what repeats a failure.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.cuda_fixtures import (  # noqa: F401
    cpu_kernels,
    cpu_library,
    cuda_built,
    cuda_driver,
    emulator,
    gpus,
    kept_kernels,
    threads,
)
from tests.support.pool import Nursery, Pools, seed_generators
from tests.support.tiers import (
    file_of,
    function_of,
    group,
    read_durations,
    seconds_by_file,
    slow_cases,
    write_durations,
)

# Until all tests are collected: the trees of their sources are made of objects that it would walk
# over and over, for more than half of the time.
gc.disable()

# Examples are not timed: a busy machine is no fault.
settings.register_profile("recorded", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile("recorded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write what each test takes to tests/durations.json"
    )
    parser.addoption(
        "--on",
        choices=("slurm", "ray"),
        help="run tests/master/test_det_cli*.py on a master of a real cluster of two nodes with two slots each",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The threads of one operation wait for each other in a loop, which beside another worker takes
    # ten times as long as the operation.
    torch.set_num_threads(1)
    if not _is_worker(config) and config.getoption("numprocesses", None):
        gc.enable()  # the workers collect the tests
    if config.getoption("--record-durations") and not _is_worker(config):
        config.pluginmanager.register(Recorder())


def _is_worker(config: pytest.Config) -> bool:
    """Tell whether this process runs tests for another one, as `pytest -n 2` arranges it."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what the recorded durations say `make test` has no time for; processes side by
    side begin with the files that take longest, so that they end together."""
    durations = read_durations()
    smoke = {function_of(item.nodeid) for item in items if item.get_closest_marker("smoke")}
    slow: set[str] = set()
    for name, cases in group((item.nodeid for item in items), durations).items():
        slow |= slow_cases(cases, name in smoke)
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if _is_worker(config):
        seconds = seconds_by_file(durations)
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def pytest_collection_finish() -> None:
    """Keep the cycle collector off what lives as long as the run: torch, the tests and their
    modules. Some tests collect, and each time it would look at all of that.
    """
    gc.freeze()
    gc.enable()


class Recorder:
    """Adds up what each test takes, set-up and teardown included, and writes it at the end of the
    run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        write_durations(self.seconds)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or after others."""
    seed_generators()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2).run(body, ...)`` runs a module-level function on two gloo ranks and returns their
    results."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def devices() -> Iterator[Pools]:
    """``devices(2).run(body, ...)``: as ``ranks``, on ranks that compute on the stand-in device."""
    pools = Pools(world="standin")
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Fork ranks that have libraries which take seconds to import: ``Pools(nursery, modules)``."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    """Engines, commands and tests change the package's loggers, which belong to the process."""
    logging.disable(logging.NOTSET)
    logging.getLogger("zero_trial").setLevel(logging.NOTSET)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "zero_trial" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
