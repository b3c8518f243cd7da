"""The moving average of the weights in an engine, against torch's AveragedModel: of each optimizer,
saved, resumed and exported. With offload and in pipelines it is in the sequences of
test_user_actions.py, next to plain torch in tests/exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.engine.offloaded import Net, differing, two_groups
from tests.engine.offloaded import loss as net_loss
from tests.engine.offloaded import train as train_net
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.cli.main import main
from zero_trial.errors import TrialError
from zero_trial.sharding.ema import KIND

DECAY = 0.9
EMA = {"ema": {"decay": DECAY}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
MUON = {"type": "Muon", "params": {"muon_lr": 2e-3, "adam_lr": 1e-3}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 2}}
NARROW = {"data_types": {"optimizer_states": "bf16"}}


def wrong(engine: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """What the averages of ``engine`` are not, by each way to them; and what the block has left
    changed. Collective."""
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    params = {name: param for name, param in engine.module.named_parameters() if name in expected}
    found = []
    for name, param in params.items():
        column = zero.safe_get_full_optimizer_state(param, KIND)
        if column is None or not torch.equal(column, expected[name]):
            found.append(f"column {name}")
    with engine.ema_weights():
        for name, value in engine.module_state_dict().items():
            if name in expected and not torch.equal(value, expected[name].to(value.dtype)):
                found.append(f"weight {name}")
        for name, param in params.items():
            if not torch.equal(zero.safe_get_full_fp32_param(param), expected[name]):
                found.append(f"master {name}")
    return found + [f"left {name}" for name in differing(before, dict(engine.module_state_dict()))]


class Masters(nn.Module):
    """The masters of an engine, whole; torch's average of them after every call of ``update``."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.named = [{name: param for name, param in engine.module.named_parameters() if param.requires_grad}]
        self.params = nn.ParameterList(self.read())
        self.average = AveragedModel(self.params, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def read(self) -> list[Any]:
        return [zero.safe_get_full_fp32_param(param) for param in self.named[0].values()]

    @torch.no_grad()
    def update(self) -> None:
        for param, value in zip(self.params, self.read(), strict=True):
            param.copy_(value)
        self.average.update_parameters(self.params)

    def expected(self) -> dict[str, torch.Tensor]:
        averages = (param.detach() for param in self.average.module.parameters())
        return dict(zip(self.named[0], averages, strict=True))


def against_torch(stage: str, optimizer: dict[str, Any], config: dict[str, Any], bad: tuple[int, ...]) -> list[str]:
    """The average of the masters after five steps, of which ``bad`` overflow on the last rank."""
    engine: Any = build_engine(Case(Tower, loss, None, optimizer, config=EMA | config), STAGES[stage])
    masters, last = Masters(engine), engine.global_rank == engine.world_size - 1
    for step in range(5):
        value = loss(engine, Turn(step, 0, engine.global_rank))
        engine.backward(value * float("inf") if step in bad and last else value)
        engine.step()
        if engine.was_step_applied():
            masters.update()
    assert engine.skipped_steps == len(bad)
    return wrong(engine, masters.expected())


@pytest.mark.parametrize(
    ("stage", "optimizer", "config"), [("zero3", ADAMW, FP16), ("zero1", MUON, {}), ("zero2", ADAMW, NARROW)]
)
def test_it_averages_the_masters(ranks: Pools, stage: str, optimizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Of every optimizer. A step that is skipped, the first one too, does not count."""
    bad = (0, 3) if config is FP16 else ()
    assert ranks(2).run(against_torch, stage, optimizer, config, bad) == [[], []]


def trained(stage: str = "zero2", steps: int = 2, config: dict[str, Any] = EMA, optimizer: Any = None) -> Any:
    """An engine that has trained on data that all ranks share."""
    engine = build_engine(Case(Tower, loss, None, optimizer or ADAMW, config=config), STAGES[stage])
    return train(engine, range(steps))


def train(engine: Any, steps: range) -> Any:
    for step in steps:
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
    return engine


def refused(folder: str, config: dict[str, Any]) -> list[str]:
    """What training, saving and edits in the averages raise; each leaves the weights."""
    engine = trained("zero3", config=EMA | config)
    param, said = engine.module.blocks[1].weight, []

    def edited(raises: bool = False) -> None:
        with zero.GatheredParameters(param, modifier_rank=0):
            param.data.copy_(param.data.flip(0))
        if raises:
            raise KeyError("no such metric")

    for act in (
        lambda: engine.backward(loss(engine, Turn(2, 0, 0))),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
        lambda: next(engine.optimizer.update(1.0)),
        edited,
        lambda: edited(raises=True),
        lambda: zero.safe_set_full_fp32_param(param, torch.zeros(param.shape)),
        lambda: engine.load_module_state_dict({k: v * 0.5 for k, v in engine.module_state_dict().items()}),
    ):
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with pytest.raises(TrialError) as caught, engine.ema_weights():
            act()
        said.append(str(caught.value))
        assert differing(weights, dict(engine.module_state_dict())) == []
    engine.zero_grad()
    train(engine, range(2, 3))
    assert engine.was_step_applied()
    return said


def test_training_saving_and_edits_inside_are_refused(ranks: Pools, tmp_path: Path) -> None:
    """An edit that is one rank's part alone, too; all ranks raise the same."""
    said, other = ranks(2).run(refused, str(tmp_path), BF16)
    assert said == other and [line.split(":")[0] for line in said] == [
        *("backward", "save_checkpoint", "load_checkpoint", "engine.step", *["engine.ema_weights"] * 4)
    ]
    assert not list(tmp_path.iterdir())


def test_without_a_step_or_the_key() -> None:
    engine = trained(steps=0)
    with engine.ema_weights():
        before = engine.module_state_dict()
    assert differing(before, engine.module_state_dict()) == []
    with pytest.raises(TrialError, match=r'"ema": \{"decay": 0.999\}'), trained(config={}).ema_weights():
        pass


def bits(engine: Any) -> list[str]:
    return [value.hex() for each in engine.module_state_dict().values() for value in each.flatten().tolist()]


def averages(engine: Any) -> list[str]:
    with engine.ema_weights():
        return bits(engine)


def save(folder: str, optimizer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    engine = trained("zero2", 3, config, optimizer)
    engine.save_checkpoint(folder)
    return averages(train(engine, range(3, 6))) if "ema" in config else bits(train(engine, range(3, 6)))


def resume(folder: str, stage: Any, optimizer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    zero = STAGES[stage] if isinstance(stage, str) else stage
    engine = build_engine(Case(Tower, loss, None, optimizer, config=config), zero)
    engine.load_checkpoint(folder)
    return averages(train(engine, range(3, 6))) if "ema" in config else bits(train(engine, range(3, 6)))


WARM = {"ema": {"decay": DECAY, "use_ema_warmup": True}}


@pytest.mark.parametrize(("optimizer", "config"), [(MUON, WARM), (ADAMW, NARROW)])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    ranks: Pools, tmp_path: Path, optimizer: dict[str, Any], config: dict[str, Any]
) -> None:
    """On as many ranks and on others, and offloaded; the warm-up goes on where it was. An engine
    without the key leaves the average."""
    folder = str(tmp_path)
    whole = ranks(2).run(save, folder, optimizer, config)[0]
    for size, stage in ((2, "zero2"), (1, "zero0"), (4, "zero1" if config is WARM else "zero3")):
        assert ranks(size).run(resume, folder, stage, optimizer, config) == [whole] * size
    if config is NARROW:
        away = STAGES["zero1"] | {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "sub_group_size": 4096}
        assert ranks(2).run(resume, folder, away, optimizer, config) == [whole] * 2
    else:
        plain = ranks(2).run(save, f"{folder}/plain", optimizer, {})
        assert ranks(2).run(resume, folder, "zero3", optimizer, {}) == plain


def exported(folder: str) -> dict[str, torch.Tensor]:
    case = Case(Net, net_loss, groups=two_groups, config=EMA | BF16, accumulation=2, clip=0.5)
    engine: Any = build_engine(case, STAGES["zero3"])
    train_net(engine, range(3))
    engine.save_checkpoint(folder)
    with engine.ema_weights():
        engine.save_16bit_model(folder, "averaged.safetensors")
        named = {name: param for name, param in engine.module.named_parameters() if param.numel()}
        masters = {name: zero.safe_get_full_fp32_param(param) for name, param in named.items()}
        with zero.GatheredParameters(named.values()):
            frozen = {name: param.detach().float().clone() for name, param in named.items() if not param.requires_grad}
        return masters | frozen


def test_it_is_exported(ranks: Pools, tmp_path: Path, capsys: Any) -> None:
    """With frozen, tied and empty parameters; a checkpoint without averages is refused."""
    folder = tmp_path / "checkpoints"
    expected = ranks(2).run(exported, str(folder))[0]
    assert main(["ckpt", "export", str(folder), str(tmp_path / "out.safetensors"), "--ema"]) == 0
    assert "averages of 9 of 12 parameters" in capsys.readouterr().out
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == {*expected, "empty"}
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value), name
    for name, value in load_file(folder / "averaged.safetensors").items():
        assert torch.equal(value, found[name].to(value.dtype)), name
    trained(config={}).save_checkpoint(tmp_path / "without")
    assert main(["ckpt", "export", str(tmp_path / "without"), str(tmp_path / "no"), "--weights", "ema"]) == 5
    assert "no averages" in capsys.readouterr().err and not (tmp_path / "no").exists()
