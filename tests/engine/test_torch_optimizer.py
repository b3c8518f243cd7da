"""The optimizer that initialize() returns, used as torch's and as DeepSpeed's: schedulers around
it, settings written into its groups, its state taken and given back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import differing, engine_of, train, values_of
from tests.support.dense import STAGES
from tests.support.pool import Pools
from zero_trial.engine.compat import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from zero_trial.errors import CheckpointError, ConfigError, TrialError
from zero_trial.ops import FusedAdam
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.zero import GatheredParameters

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}


def engine_with(client: Any = None, **config: Any) -> Any:
    torch.manual_seed(1)
    net = nn.Linear(3, 3)
    adam = {} if client is not None else {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    config = {"train_batch_size": 1} | adam | config
    return zero_trial.initialize(model=net, config=config, optimizer=client)[0]


def step(engine: Any, value: float = 1.0) -> None:
    engine.backward(engine(torch.full((1, 3), value)).float().square().sum())
    engine.step()


def test_it_is_an_optimizer_that_a_scheduler_of_torch_takes(recwarn: pytest.WarningsRecorder) -> None:
    engine, dense = engine_with(gradient_clipping=0), nn.Linear(3, 3)
    dense.load_state_dict(engine.module_state_dict())
    adam = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=0.0)
    ours, theirs = (torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (engine.optimizer, adam))
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    for _ in range(3):
        step(engine)
        dense(torch.ones(1, 3)).square().sum().backward()
        adam.step()
        adam.zero_grad()
        ours.step()
        theirs.step()
    assert engine.get_lr() == ours.get_last_lr() == theirs.get_last_lr() == [0.0125]
    torch.testing.assert_close(engine.module.weight, dense.weight, rtol=1e-5, atol=1e-6)
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


def test_its_names_are_those_of_the_optimizer_inside() -> None:
    engine = engine_with()
    optimizer = engine.optimizer
    step(engine)
    assert optimizer.optimizer is optimizer.base
    assert isinstance(optimizer, FusedAdam) and isinstance(optimizer, ShardedOptimizer)
    assert optimizer.__class__.step is ShardedOptimizer.step, "for wrappers that derive from it"
    assert isinstance(engine_with(torch.optim.RAdam).optimizer, torch.optim.RAdam)
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.state is optimizer.base.state and optimizer.state
    masters = torch.cat([*optimizer.fp32_partitioned_groups_flat])
    assert all(bool(torch.isin(param, masters).all()) for param in engine.parameters())
    assert optimizer.defaults["lr"] == 0.1
    assert "lr: 0.1" in repr(optimizer)
    assert optimizer.get_lr() == 0.1
    optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    with pytest.raises(TrialError, match=r"engine\.step"):
        optimizer.step()
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("client", [False, True])
def test_a_tensor_lr_that_is_filled_in_place_counts(client: bool) -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    made = (lambda params: torch.optim.SGD(params, lr=lr)) if client else None
    engine = engine_with(made, **({} if client else {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}))
    if not client:
        engine.optimizer.param_groups[0]["lr"] = lr
    before = engine.module.weight.detach().clone()
    engine.optimizer.param_groups[0]["lr"].fill_(0.0)
    step(engine)
    assert torch.equal(engine.module.weight, before)
    lr.fill_(0.5)
    step(engine)
    assert not torch.equal(engine.module.weight, before)


def test_overflow_and_scale_say_what_the_last_step_did() -> None:
    engine = engine_with(**FP16)
    optimizer = engine.optimizer
    scaler = optimizer.loss_scaler  # scripts keep it
    assert (scaler.cur_scale, scaler.cur_iter, engine.get_global_grad_norm()) == (16.0, 0, None)
    assert (optimizer.overflow, optimizer.needs_scaler(), optimizer.dynamic_loss_scale) == (False, True, True)
    engine.backward(engine(torch.ones(1, 3).half()).float().sum() * float("inf"))
    engine.step()
    assert optimizer.overflow and optimizer.loss_scale == optimizer.cur_scale == 8.0
    assert engine.get_global_grad_norm() is None
    step(engine)
    assert not optimizer.overflow
    norm = engine.get_global_grad_norm()
    engine.backward(engine(torch.ones(1, 3).half()).float().sum() * float("inf"))
    engine.step()
    assert (optimizer.overflow, optimizer.loss_scale, engine.get_global_grad_norm()) == (True, 4.0, norm)
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic_loss_scale, scaler.cur_iter) == (4.0, 4.0, True, 3)
    assert scaler.scale_window == engine.config.fp16.loss_scale_window and scaler == optimizer.loss_scale_config
    assert (scaler.min_loss_scale, scaler.last_overflow_iter, hasattr(scaler, "scale_factor")) == (1.0, 2, False)
    plain = engine_with().optimizer
    assert (plain.loss_scaler.loss_scale, plain.loss_scaler.dynamic) == (1.0, False)
    assert (plain.overflow, plain.needs_scaler(), plain.dynamic_loss_scale, plain.cur_scale) == (False, False, False, 1)


def resumed(stage: str, config: dict[str, Any], folder: str | None) -> list[str]:
    """What differs after two steps between an engine and one that went on from its state."""
    for name in "ab" if folder is not None else "":
        Path(f"{folder}/{name}").mkdir(exist_ok=True)
    engine = engine_of(stage, config, folder and f"{folder}/a")
    train(engine, range(2))
    written = io.BytesIO()
    torch.save(engine.optimizer.state_dict(), written)
    other = engine_of(stage, config, folder and f"{folder}/b")
    train(other, range(5, 6))
    other.optimizer.load_state_dict(torch.load(io.BytesIO(written.getvalue()), weights_only=True))
    found = differing(values_of(engine), values_of(other))
    torch.manual_seed(3)
    first = train(engine, range(2, 4))
    torch.manual_seed(3)
    second = train(other, range(2, 4))
    found += [] if first == second else [f"{first} {second}"]
    found += differing(values_of(engine), values_of(other))
    engine.destroy()
    other.destroy()
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "fp16": FP16,
    "bf16 moments in bf16": {"bf16": {"enabled": True}, "data_types": {"optimizer_states": "bf16"}},
    "whole": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_state_that_is_given_back_goes_on_with_the_same_bits(ranks: Pools, stage: str, config: str) -> None:
    assert ranks(2).run(resumed, stage, CONFIGS[config], None) == [[], []]


def test_state_on_a_disk_is_given_back(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(resumed, "zero3", {}, str(tmp_path)) == [[], []]


def test_the_state_of_another_model_changes_nothing() -> None:
    engine = engine_with()
    step(engine)
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    other = nn.Linear(4, 4)
    foreign = zero_trial.initialize(
        model=other, config={"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    )[0].optimizer.state_dict()
    for state in (foreign, torch.optim.AdamW(nn.Linear(3, 3).parameters()).state_dict()):
        with pytest.raises(CheckpointError):
            engine.optimizer.load_state_dict(state)
    assert engine.get_lr() == [0.1] and not differing(before, dict(engine.module_state_dict()))


def refreshed(stage: str) -> list[bool]:
    engine = engine_of(stage, {"bf16": {"enabled": True}}, None)
    with zero_trial.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.copy_(torch.full_like(param, 0.75))
    engine.optimizer.refresh_fp32_params()
    params = [param for param in engine.module.parameters() if param.requires_grad and param.numel()]
    masters = [zero_trial.zero.safe_get_full_fp32_param(param) for param in params]
    return [bool((master == 0.75).all()) for master in masters if master is not None]


@pytest.mark.parametrize("stage", STAGES)
def test_masters_follow_parameters_that_were_written_past_the_engine(ranks: Pools, stage: str) -> None:
    for found in ranks(2).run(refreshed, stage):
        assert found and all(found)


@pytest.mark.parametrize("stage", STAGES)
def test_scripts_ask_for_its_class_by_stage(stage: str) -> None:
    optimizer, number = engine_of(stage, {}, None).optimizer, STAGES[stage]["stage"]
    assert isinstance(optimizer, DeepSpeedZeroOptimizer) is (number in (1, 2))
    assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) is (number == 3)
    assert not isinstance(optimizer.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))


@pytest.mark.parametrize("stage", [2, 3])
def test_libraries_take_the_hooks_off_while_parameters_are_gathered(stage: int) -> None:
    """What TRL does around a generation; below stage 3 it finds that there are no such hooks."""
    engine = engine_with(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
    assert hasattr(engine.optimizer, "parameter_offload") == (stage == 3)
    if stage < 3:
        return
    whole = {name: value.clone() for name, value in engine.module_state_dict().items()}
    inputs = torch.ones(1, 3)
    with torch.no_grad(), GatheredParameters(engine.parameters()):
        offload = engine.optimizer.parameter_offload
        for param in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        inside = engine.module(inputs)
        torch.testing.assert_close(inside, inputs @ whole["weight"].T + whole["bias"])
        offload = engine.optimizer.parameter_offload
        assert not hasattr(offload, "param_coordinator")
        offload._register_deepspeed_module(offload.module)
    assert torch.equal(engine.module(inputs), inside)
    step(engine)
