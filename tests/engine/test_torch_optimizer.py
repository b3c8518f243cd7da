"""The optimizer that initialize() returns, used as torch's and as DeepSpeed's: schedulers around
it, settings written into its groups, its state taken and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import Net, differing, engine_of, loss
from tests.support.dense import STAGES, Turn
from tests.support.pool import Pools
from zero_trial.engine.compat import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from zero_trial.errors import CheckpointError, ConfigError, ZeroTrialError
from zero_trial.ops import FusedAdam, FusedSGD
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


@pytest.mark.parametrize("stage", ["zero0", "zero3-free"])
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


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.999]}}


def state_bytes(states: str, optimizer: dict[str, Any], stage: str) -> list[tuple[int, int]]:
    """(counted, by the formula) of this rank."""
    given = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": STAGES[stage]}
    if states == "key of bf16":
        given |= {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    elif states == "DeepSpeed's":
        given["optimizer"] = {**optimizer, "params": {**optimizer["params"], "fp32_optimizer_states": False}}
    else:
        given |= {"data_types": {"optimizer_states": states}}
    engine = zero_trial.initialize(model=Net(), config=given)[0]
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    count = 2 if optimizer["type"] == "AdamW" else 1
    sizes = [piece.numel for piece in engine.optimizer.pieces]
    each = 4 if states == "fp32" else 2
    return [(engine.optimizer.state_by_tensor.persistent_bytes(), count * each * sum(sizes))]


@pytest.mark.parametrize(
    ("name", "states", "stage"),
    [
        *(("AdamW", states, "zero3") for states in ("fp32", "bf16", "key of bf16", "DeepSpeed's")),
        *(("Lion", "bf16", "zero0"), ("SGD", "bf16", "zero3")),
    ],
)
def test_bytes_per_parameter(ranks: Pools, name: str, states: str, stage: str) -> None:
    """data_types.optimizer_states, bf16_optimizer_states and fp32_optimizer_states: 4 or 2
    bytes per element and state."""
    params = {"lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}
    for [(counted, formula)] in ranks(2).run(state_bytes, states, {"type": name, "params": params}, stage):
        assert counted == formula > 0


def test_a_checkpoint_with_8_bit_states_is_refused(tmp_path: Path) -> None:
    engine = engine_with(data_types={"optimizer_states": "bf16"})
    step(engine)
    states = engine.optimizer.state_by_tensor
    facts = states.identity() | {"states": "8bit"}
    states.identity = lambda: facts
    engine.save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="8bit, expected fp32 or bf16"):
        engine_with(data_types={"optimizer_states": "bf16"}).load_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("optimizer", "client", "words"),
    [
        ({"type": "Lamb", "params": {"lr": 1e-3}}, None, "Lamb cannot store"),
        ({"type": "SGD", "params": {"lr": 1e-3}}, None, "SGD without momentum"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, None, "AdamW with amsgrad"),
        ({"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, None, "torch_adam"),
        ({"type": "RMSprop", "params": {"lr": 1e-3}}, None, "RMSprop cannot store"),
        ({"type": "Muon", "params": {"lr": 1e-3}}, None, "Muon cannot store"),
        (None, FusedSGD, "an optimizer passed to initialize"),
    ],
)
def test_optimizers_without_such_states_are_refused(optimizer: Any, client: Any, words: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "data_types": {"optimizer_states": "bf16"}}
    model = Net()
    given = {"optimizer": client(model.parameters())} if client is not None else {}
    with pytest.raises(ZeroTrialError, match=words):
        zero_trial.initialize(model=model, config=config | ({"optimizer": optimizer} if optimizer else {}), **given)


def test_what_contradicts_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "data_types": {"optimizer_states": "bf16"}}
    params = {"lr": 1e-3, "fp32_optimizer_states": False}
    fp32 = config | {"data_types": {"optimizer_states": "fp32"}}
    with pytest.raises(ConfigError, match="fp32_optimizer_states: contradicts"):
        zero_trial.initialize(model=Net(), config=fp32 | {"optimizer": {"type": "AdamW", "params": params}})
    with pytest.raises(ConfigError, match=r"bf16, and .* in float64"):
        zero_trial.initialize(model=Net().double(), config=config | {"optimizer": ADAM})
    with pytest.raises(ConfigError, match="fp32 weights only"):
        FusedAdam([nn.Parameter(torch.zeros(2).double())], states="bf16")


def test_each_step_has_a_noise_of_its_own() -> None:
    """200 steps from v = 1 with gradients of 0: the mean of v is 0.999^200."""
    weight = nn.Parameter(torch.zeros(4096))
    optimizer: Any = FusedAdam([weight], lr=0.0, states="bf16")
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].fill_(1.0)
    for _ in range(200):
        optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**200, rel=2e-3)
