"""All ranks compute alike: native kernels where every rank has them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.engine import build
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import Backend, backend, cpu_library

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
pytestmark = pytest.mark.skipif(backend().native is None, reason=f"no native kernels: {backend().why}")


class Lines(logging.Handler):
    """Warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def kernels_of_this_rank(mine: Backend) -> Iterator[list[str]]:
    """For a rank of the pool, which others use later: its own choice comes back."""
    real, lines = cpu_library.backend(), Lines()
    kept = (real.native, real.why, real.strict)
    real.native, real.why, real.strict = mine.native, mine.why, mine.strict
    logging.getLogger("zero_trial").addHandler(lines)
    try:
        yield lines.lines
    finally:
        logging.getLogger("zero_trial").removeHandler(lines)
        real.native, real.why, real.strict = kept


def one_is_blind(blind: int) -> tuple[str, str, list[str]]:
    native = cpu_library.backend().native
    mine = Backend(None, "no C++ compiler") if dist.get_rank() == blind else Backend(native)
    with kernels_of_this_rank(mine) as said:
        engine = make_engine(TinyLM, CONFIG)
        assert engine.optimizer is not None
        assert len(train_engine(engine, range(2), 8)) == 2
        return type(engine.optimizer.base).__name__, cpu_library.backend().describe(), list(said)


@pytest.mark.parametrize("blind", [0, 1])
def test_one_rank_without_kernels_takes_them_from_all(ranks: Pools, blind: int) -> None:
    everyone = ranks(2).run(one_is_blind, blind)
    assert [name for name, _, _ in everyone] == ["AdamW", "AdamW"]  # torch's own
    assert all("plain torch" in described for _, described, _ in everyone)
    (line,), nothing = (said for _, _, said in everyone)  # rank 0 says it, once
    assert line.endswith(f"so that they compute alike: rank {blind} has none (no C++ compiler)") and not nothing


def none_is_blind() -> tuple[str, list[str]]:
    with kernels_of_this_rank(Backend(cpu_library.backend().native)) as said:
        engine = make_engine(TinyLM, CONFIG)
        assert engine.optimizer is not None
        return type(engine.optimizer.base).__name__, list(said)


def test_where_all_have_them_nothing_is_said(ranks: Pools) -> None:
    assert ranks(2).run(none_is_blind) == [("FusedAdam", [])] * 2


def strict_and_blind() -> str:
    native = cpu_library.backend().native
    mine = Backend(native, strict=True) if dist.get_rank() == 0 else Backend(None, "no C++ compiler")
    with kernels_of_this_rank(mine):
        try:
            make_engine(TinyLM, CONFIG)
        except KernelUnavailable as trouble:
            return str(trouble)
    return "no error"


def test_native_or_nothing_is_one_error_on_every_rank(ranks: Pools) -> None:
    for text in ranks(2).run(strict_and_blind):
        assert "ZERO_TRIAL_OPS=native" in text and "rank 1 has none (no C++ compiler)" in text


class World:
    """What the other ranks of a world tell."""

    index, ranks = 0, (0, 1)

    def __init__(self, **other: Any) -> None:
        self.other = other
        self.told: dict[str, Any] = {}

    def gather_json(self, value: dict[str, Any], label: str) -> list[Any]:
        self.told = value
        return [value, self.other]


def test_a_rank_that_must_and_cannot_tells_the_others_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Backend:
        raise KernelUnavailable("no C++ compiler")

    monkeypatch.setattr(build, "backend", refuse)
    world = World(native=True, why="", strict=False)
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler"):
        build.agree_on_kernels(world)  # type: ignore[arg-type]
    assert world.told == {"native": False, "why": "no C++ compiler", "strict": True}


def test_plain_torch_everywhere_is_nothing_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Backend(None, "ZERO_TRIAL_OPS=reference")
    monkeypatch.setattr(build, "backend", lambda: own)
    build.agree_on_kernels(World(native=False, why="no C++ compiler", strict=False))  # type: ignore[arg-type]
    assert own.why == "ZERO_TRIAL_OPS=reference"
