"""Fixtures for all tests: the pools of ranks, random numbers that are the same in every run, and a log that one test does not silence for the next.

Hypothesis derives its examples from each test's own name, so that a failure is there again in the next run. ``--hypothesis-profile=explore``
looks for new ones, and prints what repeats a failure.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import numpy
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
)
from tests.support.pool import Pools

settings.register_profile("recorded", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile("recorded")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or after others."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


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
