"""Ranks of an engine compute alike: with the native kernels, or all with torch's. What kernels
compute is in tests/ops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools, logged_lines
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import Backend, backend, cpu_library

pytestmark = pytest.mark.skipif(backend().native is None, reason=f"no native kernels: {backend().why}")


CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


@contextmanager
def kernels_of_this_rank(mine: Backend) -> Iterator[list[str]]:
    """For a rank of the pool, which others use later: its own choice comes back."""
    real, lines = cpu_library.backend(), logged_lines(logging.WARNING)
    kept = (real.native, real.why, real.strict)
    real.native, real.why, real.strict = mine.native, mine.why, mine.strict
    try:
        yield lines
    finally:
        real.native, real.why, real.strict = kept


def one_is_blind(blind: int, strict: bool) -> tuple[str, list[str]]:
    """The class of the optimizer, or the error, and what is logged."""
    native = cpu_library.backend().native
    mine = Backend(None, "no C++ compiler") if dist.get_rank() == blind else Backend(native, strict=strict)
    with kernels_of_this_rank(mine) as said:
        try:
            engine = make_engine(TinyLM, CONFIG)
        except KernelUnavailable as trouble:
            return str(trouble), said
        train_engine(engine, range(2), 8)
        assert "plain torch" in cpu_library.backend().describe()
        return type(engine.optimizer.base).__name__, said


def test_one_rank_without_kernels_takes_them_from_all(ranks: Pools) -> None:
    (name, (line,)), (other, nothing) = ranks(2).run(one_is_blind, 1, False)  # rank 0 says it, once
    assert name == other == "AdamW" and not nothing  # torch's own
    assert line.endswith("so that they compute identically: rank 1 has none (no C++ compiler)")


def test_native_or_nothing_is_one_error_on_every_rank(ranks: Pools) -> None:
    for text, _ in ranks(2).run(one_is_blind, 1, True):
        assert "ZERO_TRIAL_OPS=native" in text and "rank 1 has none (no C++ compiler)" in text
