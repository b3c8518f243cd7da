"""Fixtures for all tests: the pools of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pool import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2).run(body, ...)`` runs a module-level function on two gloo ranks and returns their results."""
    pools = Pools()
    yield pools
    pools.close()
