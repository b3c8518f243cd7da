"""Fixtures for all tests: the pools of ranks, and a log that one test does not silence for the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.cuda_fixtures import (  # noqa: F401
    cpu_kernels,
    cpu_library,
    cuda_built,
    cuda_driver,
    emulator,
    gpus,
    kept_kernels,
)
from tests.support.pool import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2).run(body, ...)`` runs a module-level function on two gloo ranks and returns their results."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Engines and tests set the level of the package's logger, which belongs to the process."""
    log = logging.getLogger("zero_trial")
    before = log.level
    yield
    log.setLevel(before)
