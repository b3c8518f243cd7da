"""A rank that reads its peers' tensors late sees what they sent: whatever they do to parameters
and gradients in the meantime.

Every read of rank 1 is held up until rank 0 has come as far as it can. Each against plain torch
with the same edits.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, difference, train_dense, train_ranks
from tests.support.models import TinyLM, Tower, make_engine, tokens, train_engine
from tests.support.pool import Pools
from zero_trial.comm.backends import SharedTransport
from zero_trial.comm.mesh import _HOSTS
from zero_trial.sharding.param_access import GatheredParameters

LATE_SECONDS = 0.003  # in which rank 0 is far ahead, if nothing stops it


def wide_tower() -> Tower:
    return Tower(4, 40, 1)


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(3, 4)).square().mean()


@contextmanager
def slow_reader(rank: int, index: int = 1) -> Iterator[None]:
    """``rank``'s reads from its peers' memory come late, if it is ``index``."""
    verbs = ("all_gather", "reduce_scatter", "all_reduce", "broadcast") if rank == index else ()
    kept = {verb: getattr(SharedTransport, verb) for verb in verbs}

    def held_up(start: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            steps = start(*args, **kwargs)
            yield next(steps)
            time.sleep(LATE_SECONDS)
            yield from steps

        return late

    for verb, start in kept.items():
        setattr(SharedTransport, verb, held_up(start))
    try:
        yield
    finally:
        for verb, start in kept.items():
            setattr(SharedTransport, verb, start)


def clamp(module: nn.Module) -> None:
    """As a critic's weights are clipped."""
    for param in module.parameters():
        param.data.clamp_(-0.1, 0.1)


def shrink(module: nn.Module) -> None:
    """After a look at what the module makes of the new values."""
    with torch.no_grad():
        module(torch.ones(1, 4))
        for param in module.parameters():
            param.mul_(0.9)


def load(module: nn.Module) -> None:
    module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()})


class Skipping(Tower):
    """Skips its third block where the input says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, skip = self.blocks, bool((x == 0).all())
        x = torch.tanh(self.first(x))
        for block in kept[:2] if skip else kept:
            x = x + torch.tanh(block(x))
        return self.last(x)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "clamp": clamp,
    "shrink": shrink,
    "load": load,
    "a block is skipped": lambda module: None,
}


def edited(stage: str, edit: str) -> float:
    """The largest difference after steps with two micro-batches, each followed by ``edit``; or of
    which every second skips a block that is gathered ahead, as it was used in the step before."""
    case = Case(wide_tower, loss, accumulation=2, steps=3)
    if edit == "a block is skipped":
        case = Case(
            lambda: Skipping(4, 40, 1),
            lambda model, turn: (model(turn.normal(3, 4) * (1 - turn.step % 2)) - 1).square().mean(),
        )
    engine = build_engine(case, STAGES[stage])
    with slow_reader(engine.global_rank):
        steps = zip(train_dense(case, engine.dp_world_size), train_ranks(case, engine), strict=True)
        for dense, _ in steps:
            EDITS[edit](dense)
            frees = engine.sharded.frees_parameters and edit != "load"
            with GatheredParameters(engine.module.parameters() if frees else [], modifier_rank=0):
                EDITS[edit](engine.module)
        gap = difference(engine, dense)
        engine.destroy()
    return gap


@pytest.mark.parametrize(
    ("stage", "edit"),
    [
        *(("zero0", "clamp"), ("zero0", "load"), ("zero1", "shrink"), ("zero2", "clamp"), ("zero2", "load")),
        *(("zero3", "clamp"), ("zero3-free", "shrink"), ("zero3", "a block is skipped")),
    ],
)
def test_edits_between_steps(ranks: Pools, stage: str, edit: str) -> None:
    assert max(ranks(2).run(edited, stage, edit)) <= TOLERANCE


def gone_on(stage: str) -> float:
    """A backward pass that raises with reductions under way, and another one in its place. What the
    first one left counts, as in plain torch: it is forgotten by zero_grad, or is nothing because
    its loss is."""
    case = Case(wide_tower, loss, steps=2)
    engine = build_engine(case, STAGES[stage])
    armed = [False]

    def fail(grad: torch.Tensor) -> None:
        if armed[0]:
            armed[0] = False
            raise RuntimeError("no memory")

    engine.module.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with slow_reader(engine.global_rank):
        steps = list(zip(train_dense(case, engine.dp_world_size), (1.0, 0.0), strict=True))
        for _, scale in steps:
            turn = Turn(engine.global_steps, 0, engine.global_rank)
            failing = loss(engine, turn) * scale
            armed[0] = True
            with pytest.raises(RuntimeError, match="no memory"):
                engine.backward(failing)
            if scale:
                engine.zero_grad()
            engine.backward(loss(engine, turn))
            engine.step()
        gap = difference(engine, steps[-1][0])
        engine.destroy()
    return gap


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_a_step_after_a_backward_pass_that_raised(ranks: Pools, stage: str) -> None:
    assert max(ranks(2).run(gone_on, stage)) <= TOLERANCE


def homes_bytes() -> int:
    """Bytes of this rank's arena that tensors have."""
    host = _HOSTS.get(dist.group.WORLD)
    return 0 if host is None or host.arena is None else host.arena.in_use


def engines_come_and_go(stage: int, count: int) -> list[tuple[int, int, int]]:
    """After each engine: bytes of this rank's arena that tensors have, bytes of its pages, and
    descriptors of this process."""
    found = []
    for _ in range(count):
        engine = make_engine(
            TinyLM,
            {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0, "reduce_bucket_size": 9000}},
        )
        train_engine(engine, range(2))
        engine.destroy()
        del engine
        gc.collect()
        arena = _HOSTS[dist.group.WORLD].arena
        assert arena is not None
        arena.trim()
        pages = os.fstat(arena.descriptor).st_blocks * 512
        found.append((arena.in_use, pages, len(os.listdir("/proc/self/fd"))))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_six_engines_leave_no_more_than_one(ranks: Pools, stage: int) -> None:
    for rows in ranks(2).run(engines_come_and_go, stage, 6):
        assert len(set(rows[2:])) == 1, rows


def forgotten(stage: int, ending: str) -> tuple[bool, bool, int]:
    """An engine that was not destroyed: whether it and its parameters are gone, and bytes of living
    tensors that peers can read."""
    gc.collect()
    before = homes_bytes()
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0}})
    train_engine(engine, range(2))
    if ending == "in mid-step":
        engine.backward(engine(tokens(2, 4)))
    if ending == "an output is kept by the model":
        engine.module.kept = engine(tokens(2, 4))
    watch, parameter = weakref.ref(engine), weakref.ref(engine.module.embed.weight)
    del engine
    gc.collect()
    return watch() is None, parameter() is None, homes_bytes() - before


@pytest.mark.parametrize(
    ("stage", "ending"), [(0, "in mid-step"), (3, "after a step"), (3, "an output is kept by the model")]
)
def test_an_engine_that_was_not_destroyed_goes_too(ranks: Pools, stage: int, ending: str) -> None:
    assert ranks(2).run(forgotten, stage, ending) == [(True, True, 0)] * 2


def workers(stage: int) -> list[int]:
    """Rows from forked workers of a DataLoader, between steps."""
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": stage}})
    train_engine(engine, range(1))
    data = TensorDataset(torch.arange(16))
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a pool's rank may have no children otherwise
    rows = [int(value) for (batch,) in loader for value in batch]
    train_engine(engine, range(1, 3))
    return rows


def test_workers_are_forked_from_a_rank(ranks: Pools) -> None:
    assert ranks(2).run(workers, 2) == [list(range(16))] * 2
