"""Optimizer states in bf16 in an engine: bytes, the same bits at every stage and on
every number of ranks, offloaded, saved and resumed; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import Net, differing, loss, two_groups, values_of
from tests.support.dense import STAGES, Turn
from tests.support.pool import Pools
from zero_trial.errors import CheckpointError, ConfigError, ZeroTrialError
from zero_trial.ops import FusedAdam, FusedSGD

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.999]}}
BF16 = {"bf16": {"enabled": True}}


def engine_of(stage: str = "zero0", states: str = "bf16", offload: dict[str, Any] | None = None, **config: Any) -> Any:
    zero_config = dict(STAGES[stage]) | ({"offload_optimizer": offload, "sub_group_size": 4096} if offload else {})
    torch.manual_seed(3)
    model = Net()
    given = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.5}
    given |= {"zero_optimization": zero_config, "data_types": {"optimizer_states": states}, **config}
    return zero_trial.initialize(model=model, model_parameters=two_groups(model), config=given)[0]


def train(engine: Any, steps: range, own_data: bool = False) -> list[float]:
    """``own_data``: each rank has its own; otherwise the mean over ranks is exact."""
    trace = []
    for step in steps:
        for number in range(engine.gradient_accumulation_steps()):
            torch.manual_seed(step)
            value = loss(engine, Turn(step, number, engine.global_rank if own_data else 0))
            engine.backward(value)
            engine.step()
        trace.append(value.item())
    return trace


def run(stage: str, offload: dict[str, Any] | None = None, **config: Any) -> tuple[list[float], Any]:
    engine = engine_of(stage, offload=offload, **config)
    return train(engine, range(6)), values_of(engine)


# --- bytes ----------------------------------------------------------------------------------------


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
    train(engine, range(1))
    count = 2 if optimizer["type"] == "AdamW" else 1
    sizes = [piece.numel for piece in engine.optimizer.pieces]
    each = 4 if states == "fp32" else 2
    return [(engine.optimizer.state_by_tensor.persistent_bytes(), count * each * sum(sizes))]


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "key of bf16", "DeepSpeed's"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
def test_bytes_per_parameter(ranks: Pools, name: str, states: str, stage: str) -> None:
    """data_types.optimizer_states, bf16_optimizer_states and fp32_optimizer_states: 4 or 2
    bytes per element and state."""
    if states == "DeepSpeed's" and name != "AdamW":
        pytest.skip("an argument of DeepSpeed's Adam")
    params = {"lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}
    for [(counted, formula)] in ranks(2).run(state_bytes, states, {"type": name, "params": params}, stage):
        assert counted == formula > 0


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_stages_and_numbers_of_ranks_have_the_same_bits(ranks: Pools, precision: dict[str, Any]) -> None:
    """All ranks have the same data, so that their mean is exact: what is left is where tensors are
    cut."""
    accumulation = {"gradient_accumulation_steps": 2}
    (trace, values), *_ = ranks(1).run(run, "zero0", **precision, **accumulation)
    for size, stage in ((2, "zero1"), (2, "zero2"), (2, "zero3"), (4, "zero3-free"), (4, "zero1")):
        for mine, theirs in ranks(size).run(run, stage, **precision, **accumulation):
            assert mine == trace and differing(values, theirs) == [], (size, stage)


def test_fp16_overflows_are_skipped(ranks: Pools) -> None:
    def same(results: list[Any]) -> None:
        (trace, values), *rest = results
        assert all(mine == trace and differing(values, theirs) == [] for mine, theirs in rest)

    # far too high a scale: the first steps are skipped, and leave no state and no count
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}}
    same([each for stage in ("zero0", "zero3") for each in ranks(2).run(run, stage, **fp16)])


# --- offload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_states_have_the_same_bits(
    ranks: Pools, tmp_path: Path, device: str, precision: dict[str, Any]
) -> None:
    offload = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    for (trace, values), (mine, theirs) in zip(
        ranks(2).run(run, "zero2", **precision),
        ranks(2).run(run, "zero2", offload, **precision),
        strict=True,
    ):
        assert mine == trace and differing(values, theirs) == []


# --- checkpoints ----------------------------------------------------------------------------------


def save(folder: str, states: str, stage: str) -> list[float]:
    engine = engine_of(stage, states)
    train(engine, range(3))
    engine.save_checkpoint(folder)
    return train(engine, range(3, 6))


def resume(folder: str, states: str, stage: str, offload: dict[str, Any] | None = None) -> list[float] | str:
    engine = engine_of(stage, states, offload)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return train(engine, range(3, 6))


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(ranks: Pools, tmp_path: Path) -> None:
    """At every stage, on another number of ranks, and offloaded."""
    whole = ranks(2).run(save, str(tmp_path / "checkpoints"), "bf16", "zero2")[0]
    for size, stage in ((2, "zero2"), (1, "zero0"), (4, "zero3")):
        assert ranks(size).run(resume, str(tmp_path / "checkpoints"), "bf16", stage) == [whole] * size
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert ranks(2).run(resume, str(tmp_path / "checkpoints"), "bf16", "zero1", nvme) == [whole] * 2


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_format_is_converted(ranks: Pools, tmp_path: Path, before: str, after: str) -> None:
    whole = ranks(1).run(save, str(tmp_path), before, "zero0")[0]
    (found,) = ranks(1).run(resume, str(tmp_path), after, "zero0")
    assert found == pytest.approx(whole, rel=0.01)


def save_as_8_bit(folder: str) -> None:
    engine = engine_of()
    train(engine, range(1))
    states = engine.optimizer.state_by_tensor
    facts = states.identity() | {"states": "8bit"}
    states.identity = lambda: facts
    engine.save_checkpoint(folder)


def test_a_checkpoint_with_8_bit_states_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(1).run(save_as_8_bit, str(tmp_path))
    (found,) = ranks(1).run(resume, str(tmp_path), "bf16", "zero0")
    assert isinstance(found, str) and "8bit, expected fp32 or bf16" in found


# --- values, and what is refused ------------------------------------------------------------------


def test_states_are_read_and_written_as_values() -> None:
    from zero_trial.zero import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    engine = engine_of()
    train(engine, range(1))
    param = engine.module.first.weight
    values = safe_get_full_optimizer_state(param, "exp_avg")
    assert values.dtype == torch.float32 and values.shape == param.shape and values.any()
    safe_set_full_optimizer_state(param, torch.ones_like(values), "exp_avg")
    torch.testing.assert_close(
        safe_get_full_optimizer_state(param, "exp_avg"), torch.ones_like(values), rtol=0.01, atol=0
    )


@pytest.mark.parametrize(
    ("optimizer", "client", "words"),
    [
        ({"type": "Lamb", "params": {"lr": 1e-3}}, None, "Lamb does not store"),
        ({"type": "SGD", "params": {"lr": 1e-3}}, None, "SGD without momentum"),
        ({"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, None, "AdamW with amsgrad"),
        ({"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, None, "torch_adam"),
        ({"type": "RMSprop", "params": {"lr": 1e-3}}, None, "RMSprop does not store"),
        ({"type": "Muon", "params": {"lr": 1e-3}}, None, "Muon does not store"),
        (None, FusedSGD, "client's optimizer"),
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
