"""States that a script moves to the host's memory: training goes on bit for bit after the reload, a
use in between is an error in words, and memory is freed. A CPU rank is its own host, so that here
its memory counts as a device's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.offloaded import PRECISIONS, differing, engine_of, loss, values_of
from tests.support.dense import Turn
from tests.support.pipelines import batches, layers, make_engine
from zero_trial import zero
from zero_trial.compat.deepspeed.deepspeed_utils import OffloadDeviceEnum, OffloadStateTypeEnum, get_state_devices
from zero_trial.errors import CheckpointError, TrialError
from zero_trial.sharding.offload import moved_states
from zero_trial.sharding.offload.moved_states import KINDS

STAGES = ["zero0", "zero1", "zero2", "zero3", "zero3-free"]
OPENRLHF = ["optim_states", "contiguous_grad_buffer", "hp_params", "lp_grads"]


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_states, "on_device", lambda storage: True)


def trained(engine: Any, between: Callable[[Any], None], steps: int = 3) -> list[float]:
    """Train; ``between`` is called in mid-accumulation, before a step and after it."""
    losses = []
    for step in range(steps):
        for turn in range(2):
            here = loss(engine, Turn(step, turn, engine.global_rank))
            engine.backward(here)
            losses.append(here.item())
            between(engine)
            engine.step()
            between(engine)
    return losses


def away_and_back(engine: Any, include: Any = None) -> None:
    engine.offload_states(include=include, pin_memory=False)
    engine.reload_states()


def memory(engine: Any) -> int:
    """Count the bytes behind the engine's buffers and its optimizer's state."""
    tensors = [group.full for group in engine.sharded.groups]
    tensors += [each for group in engine.sharded.groups for each in (group.shard, group.master)]
    tensors += [each for buffer in engine.sharded.grad_buffers for each in (buffer.full, buffer.shard)]
    tensors += [each for state in engine.optimizer.base.state.values() for each in state.values() if each.dim()]
    return sum({one._cdata: one.nbytes() for one in (each.untyped_storage() for each in tensors)}.values())


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize(
    ("stage", "precision"), list(zip(STAGES, ["bf16", "fp32", "bf16", "fp32", "bf16"], strict=True))
)
def test_training_goes_on_to_the_bit(stage: str, precision: str) -> None:
    expected = engine_of(stage, PRECISIONS[precision], None)
    numbers = trained(expected, lambda engine: None)
    engine = engine_of(stage, PRECISIONS[precision], None)
    turns = itertools.cycle([None, OPENRLHF, ["lp_params", "hp_params"], ["optim_states"], ["lp_grads"]])
    assert trained(engine, lambda engine: away_and_back(engine, next(turns))) == numbers
    assert not differing(values_of(expected), values_of(engine))


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize(
    ("stage", "precision", "first", "when"),
    [
        ("zero0", "fp32", None, "before"),
        ("zero0", "bf16", ["lp_params"], "between"),
        ("zero1", "fp32", ["hp_params"], "between"),
        ("zero1", "bf16", None, "meanwhile"),
        ("zero2", "fp32", ["lp_params"], "meanwhile"),
        ("zero2", "bf16", ["hp_params"], "before"),
    ],
)
def test_values_put_elsewhere_count(stage: str, precision: str, first: Any, when: str) -> None:
    """``param.data = new``: before states move, between two moves, and while they are away."""
    found = []
    for moves in (False, True):
        engine = engine_of(stage, PRECISIONS[precision], None)
        trained(engine, lambda engine: None, steps=1)
        for place in ("before", "between", "meanwhile"):
            if place == when:
                for param in (engine.module.first.weight, engine.module.frozen.bias):
                    param.data = param.detach() * 1.25
            if moves and place != "meanwhile":
                engine.offload_states(first if place == "before" else None, pin_memory=False)
        engine.reload_states()
        found.append((trained(engine, lambda engine: None, steps=1), values_of(engine)))
    assert found[0][0] == found[1][0] and not differing(found[0][1], found[1][1])


@pytest.mark.usefixtures("as_device")
def test_values_of_another_shape_are_refused_after_the_reload(tmp_path: Path) -> None:
    engine = engine_of("zero2", {}, None)
    engine.offload_states(pin_memory=False)
    engine.module.first.weight.data = torch.zeros(3)
    engine.reload_states()
    with pytest.raises((TrialError, CheckpointError), match="another shape"):
        engine.save_checkpoint(str(tmp_path))


@pytest.mark.usefixtures("as_device")
def test_a_pipeline_says_that_its_states_are_away() -> None:
    engine = make_engine(layers(blocks=1), 1, {"stage": 1}, 2)
    data = list(batches(0, 2, 1))
    engine.train_batch(iter(data))
    for kinds, uses in {
        "lp_params": [engine.train_batch, engine.eval_batch],
        "optim_states": [engine.train_batch],
    }.items():
        engine.offload_states([kinds, "hp_params"], pin_memory=False)
        for use in uses:
            with pytest.raises(TrialError, match="reload_states"):
                use(iter(data))
        engine.reload_states()
    engine.train_batch(iter(data))


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_memory_is_freed_and_says_where_it_is(stage: str) -> None:
    engine = engine_of(stage, PRECISIONS["bf16"], None)
    trained(engine, lambda engine: None, steps=1)
    engine.empty_partition_cache()
    before = memory(engine)
    here = {kind: get_state_devices(engine, kind) for kind in OffloadStateTypeEnum}
    existing = {kind.value for kind, devices in here.items() if devices == {torch.device("cpu")}}
    assert existing >= {*KINDS} - {"contiguous_grad_buffer"}
    engine.offload_states(OPENRLHF, device=OffloadDeviceEnum.cpu, pin_memory=False)
    params = sum(2 * group.layout.numel for group in engine.sharded.groups)
    assert params <= memory(engine) <= 1.1 * params < before / 3
    assert engine.optimizer.offloaded_states == {OffloadStateTypeEnum(kind) for kind in OPENRLHF}
    loss(engine, Turn(9, 0, 0))  # parameters are there
    engine.empty_partition_cache()
    engine.offload_states([OffloadStateTypeEnum.lp_params], pin_memory=False)
    assert memory(engine) == 0
    for kind, devices in here.items():
        assert get_state_devices(engine, kind) == devices
    engine.reload_states()
    assert memory(engine) == before and engine.optimizer.offloaded_states == set()


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("stage", ["zero1", "zero3-free"])
def test_a_use_without_reload_is_an_error_that_changes_nothing(stage: str, tmp_path: Path) -> None:
    engine = engine_of(stage, PRECISIONS["bf16"], None)
    trained(engine, lambda engine: None, steps=1)
    before = values_of(engine)
    for turn in range(2):
        engine.backward(loss(engine, Turn(1, turn, 0)))
        if not turn:
            engine.step()
    param = next(engine.module.parameters())
    uses: dict[str, list[Callable[[], Any]]] = {
        "optim_states": [
            lambda: engine.save_checkpoint(str(tmp_path)),
            lambda: engine.optimizer.state_dict(),
            lambda: zero.safe_get_full_optimizer_state(param, "exp_avg"),
        ],
        "hp_params": [lambda: engine.save_checkpoint(str(tmp_path)), lambda: zero.safe_get_full_fp32_param(param)],
        "lp_params": [
            lambda: loss(engine, Turn(1, 0, 0)),
            lambda: engine.save_checkpoint(str(tmp_path)),
            lambda: zero.GatheredParameters([param], modifier_rank=0).__enter__(),
        ],
        "lp_grads": [lambda: zero.safe_get_full_grad(param)],
        "contiguous_grad_buffer": [],
    }
    for kind in KINDS:
        engine.offload_states([kind], pin_memory=False)
        for use in [engine.step, *uses[kind]]:
            with pytest.raises((TrialError, CheckpointError), match="reload_states"):
                use()
        engine.reload_states()
    engine.step()
    assert differing(before, values_of(engine))
    engine.offload_states(pin_memory=False)
    engine.destroy(rank0_only=False)
    assert all(
        torch.isfinite(param).all() and param.numel() for param in engine.module.parameters() if param.dim() == 1
    )


def test_a_rank_on_the_cpu_moves_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("zero2", PRECISIONS["bf16"], None)
    with caplog.at_level(logging.INFO, "zero_trial"):
        engine.offload_states()
        engine.offload_states(non_blocking=True)
    assert sum("offload_states" in record.message for record in caplog.records) == 1
    trained(engine, lambda engine: None, steps=1)
    engine.reload_states()


def test_what_cannot_be_moved_is_refused() -> None:
    engine = engine_of("zero2", {}, None)
    with pytest.raises(TrialError, match="optim_states"):
        engine.offload_states(["optim_state"])
    with pytest.raises(TrialError, match="cpu"):
        engine.offload_states(device="nvme")
