"""The moving average of the weights in an engine, against torch's AveragedModel: at every stage, in
every precision, sharded, offloaded, in pipelines; evaluated, saved, resumed and exported; and what
it costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.engine.offloaded import Net, differing, two_groups, values_of
from tests.engine.offloaded import loss as net_loss
from tests.engine.offloaded import train as train_net
from tests.engine.test_offload import staged
from tests.support.dense import STAGES, Case, Turn, build_engine, train_dense, train_ranks
from tests.support.dense import tower_loss as loss
from tests.support.memory_plans import memory_plan
from tests.support.models import Tower
from tests.support.pipelines import batches, layers
from tests.support.pipelines import make_engine as make_pipeline
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.cli.main import main
from zero_trial.errors import TrialError
from zero_trial.sharding.ema import KIND

DECAY = 0.9
EMA = {"ema": {"decay": DECAY}}
SGD = {"type": "SGD", "params": {"lr": 0.05}}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05)


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

    def __init__(self, engine: Any, decay: float = DECAY) -> None:
        super().__init__()
        self.engine = [engine]
        self.names = [name for name, param in engine.module.named_parameters() if param.requires_grad and param.numel()]
        self.params = nn.ParameterList(self.read())
        self.average = AveragedModel(self.params, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def read(self) -> list[torch.Tensor]:
        named = dict(self.engine[0].module.named_parameters())
        return [zero.safe_get_full_fp32_param(named[name]) for name in self.names]

    @torch.no_grad()
    def update(self) -> None:
        for param, value in zip(self.params, self.read(), strict=True):
            param.copy_(value)
        self.average.update_parameters(self.params)

    def expected(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, (param.detach() for param in self.average.module.parameters()), strict=True))


# --- the dense run --------------------------------------------------------------------------------


def against_dense(stage: str, accumulation: int, mesh: dict[str, int] | None = None) -> list[str]:
    """All ranks have the same data, so that their mean is exact, and with it every weight."""
    config = EMA | ({"mesh": mesh} if mesh else {})
    case = Case(Tower, same_loss, None, SGD, sgd, config, accumulation=accumulation)
    average: Any = None
    for model in train_dense(case, 1):
        if average is None:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average.update_parameters(model)
    engine = build_engine(case, STAGES[stage])
    *_, engine = train_ranks(case, engine)
    dense = dict(average.module.named_parameters())
    found = wrong(engine, {name: param.detach() for name, param in dense.items()})
    engine.destroy()
    return found


def same_loss(model: Any, turn: Turn) -> torch.Tensor:
    return loss(model, Turn(turn.step, turn.turn, 0))


@pytest.mark.parametrize(("world", "stage"), [(1, "zero0"), *((2, stage) for stage in STAGES), (4, "zero1")])
def test_it_has_the_bits_of_a_dense_run(ranks: Pools, world: int, stage: str) -> None:
    mesh = {"shard": 2, "replica": 2} if world == 4 else None
    assert ranks(world).run(against_dense, stage, 2, mesh) == [[]] * world


# --- every precision, optimizer and store ---------------------------------------------------------

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 2}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
MUON = {"type": "Muon", "params": {"muon_lr": 2e-3, "adam_lr": 1e-3}}
LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}
NARROW = {"data_types": {"optimizer_states": "bf16"}}
CLIENTS: dict[str, Any] = {
    "callable": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "lazy": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
}


def against_torch(
    stage: str, optimizer: dict[str, Any], config: dict[str, Any], client: str = "", bad: tuple[int, ...] = ()
) -> list[str]:
    """The average of the masters after five steps, of which ``bad`` overflow on the last rank."""
    case = Case(Tower, loss, None, optimizer, config=EMA | config)
    kwargs = {"optimizer": CLIENTS[client]} if client else {}
    engine: Any = build_engine(case, STAGES[stage] | config.get("zero_optimization", {}), **kwargs)
    masters, last = Masters(engine), engine.global_rank == engine.world_size - 1
    for step in range(5):
        value = loss(engine, Turn(step, 0, engine.global_rank))
        engine.backward(value * float("inf") if step in bad and last else value)
        engine.step()
        if engine.was_step_applied():
            masters.update()
    assert engine.skipped_steps == len(bad)
    found = wrong(engine, masters.expected())
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "optimizer", "config", "client"),
    [
        *(("zero0", ADAMW, BF16, ""), ("zero2", ADAMW, FP16, ""), ("zero3", ADAMW, FP16, "")),
        *(("zero1", MUON, {}, ""), ("zero3", LAMB, {}, ""), ("zero2", ADAMW, NARROW, "")),
        *(("zero1", ADAMW, {}, "callable"), ("zero0", ADAMW, {}, "lazy")),
    ],
)
def test_it_averages_the_masters(
    ranks: Pools, stage: str, optimizer: dict[str, Any], config: dict[str, Any], client: str
) -> None:
    """Of every optimizer. A step that is skipped, the first one too, does not count."""
    bad = (0, 3) if config is FP16 else ()
    assert ranks(2).run(against_torch, stage, optimizer, config, client, bad) == [[], []]


def engine_of(stage: str, config: dict[str, Any], offload: dict[str, Any] | None = None) -> Any:
    case = Case(Net, net_loss, groups=two_groups, config=EMA | config, accumulation=2, clip=0.5)
    return build_engine(case, STAGES[stage] | ({"sub_group_size": 4096} | offload if offload else {}))


def values_and_average(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, masters, moments and averages by name, and what evaluation computes with."""
    found = values_of(engine)
    with engine.ema_weights():
        found |= {f"averaged {name}": value.clone() for name, value in engine.module_state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel():
            found[f"column {name}"] = zero.safe_get_full_optimizer_state(param, KIND)
    return found | {f"after {name}": value.clone() for name, value in engine.module_state_dict().items()}


def offloaded(stage: str, config: dict[str, Any], offload: dict[str, Any] | None, on_device: bool = False) -> Any:
    """``on_device``: a device that is played by the CPU has the parameters."""
    with pytest.MonkeyPatch.context() as patched:
        if on_device:
            patched.setattr(sys.modules["zero_trial.engine.build"], "plan_offload", staged)
        engine = engine_of(stage, config, offload)
    train_net(engine, range(2))
    with engine.ema_weights():  # the steps that follow read the file again
        engine.module_state_dict()
    train_net(engine, range(2, 4))
    found = values_and_average(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("where", "config"),
    [
        *(("state", {}), ("state", BF16), ("ratio", BF16), ("parameters", BF16), ("host", {})),
        *(("device to file", BF16), ("device to host", {})),
    ],
)
def test_it_follows_the_state_that_is_offloaded(
    ranks: Pools, tmp_path: Path, where: str, config: dict[str, Any]
) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    offload: dict[str, Any] = {
        "state": {"offload_optimizer": nvme},
        "ratio": {"offload_optimizer": nvme | {"ratio": 0.5}},
        "parameters": {"offload_optimizer": nvme, "offload_param": nvme},
        "host": {"offload_optimizer": {"device": "cpu"}},
    }[where.replace("device to file", "state").replace("device to host", "host")]
    stage = "zero3-free" if where in ("parameters", "device to host") else "zero2"
    plain = ranks(2).run(offloaded, stage, config, None)
    away = ranks(2).run(offloaded, stage, config, offload, where.startswith("device"))
    for one, other in zip(plain, away, strict=True):
        assert differing(one, other) == []


def pipelined(stages: int, stage: int) -> dict[str, torch.Tensor]:
    engine = make_pipeline(layers(), stages, {"stage": stage}, 2, **EMA)
    data = batches(engine.mpu.get_data_parallel_rank(), 2, 8) if engine.is_first_stage() else None
    masters = Masters(engine)
    for _ in range(4):
        engine.train_batch(data)
        masters.update()
    found = wrong(engine, masters.expected())
    with engine.ema_weights():
        averaged = engine.eval_batch(data).item()
        with pytest.raises(TrialError, match="train_batch"):
            engine.train_batch(data)
    assert averaged != engine.eval_batch(data).item()
    return found


def test_pipelines(ranks: Pools) -> None:
    assert ranks(2).run(pipelined, 2, 3) == [[], []]


# --- the keys -------------------------------------------------------------------------------------


def with_keys(keys: dict[str, Any]) -> list[list[str]]:
    """The averages of one weight after each of six steps."""
    engine: Any = build_engine(Case(Tower, loss, None, SGD, config={"ema": keys}), STAGES["zero1"])
    found = []
    for step in range(6):
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
        column = zero.safe_get_full_optimizer_state(engine.module.last.bias, KIND)
        weight = zero.safe_get_full_fp32_param(engine.module.last.bias)
        found.append([f"{value:.9g}" for value in (*column.tolist(), *weight.tolist())])
    return found


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({"decay": 0.5, "update_after_step": 1, "update_every": 2}, (1, 1, 0, 0.5, 0, 0.5)),
        (
            {"decay": 0.6, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.5},
            [1 - min(0.6, 1 - (1 + step / 2.0) ** -0.5) for step in range(6)],
        ),
    ],
)
def test_what_the_keys_mean(keys: dict[str, Any], shares: Sequence[float]) -> None:
    average: torch.Tensor | None = None
    for row, share in zip(with_keys(keys), shares, strict=True):
        column, weight = (torch.tensor([float(value) for value in half]) for half in (row[:4], row[4:]))
        average = weight if average is None else average + share * (weight - average)
        torch.testing.assert_close(column, average, rtol=1e-6, atol=1e-7)


# --- inside and around the block ------------------------------------------------------------------


def trained(stage: str = "zero2", steps: int = 2, config: dict[str, Any] = EMA) -> Any:
    engine = build_engine(Case(Tower, loss, None, ADAMW, config=config), STAGES[stage])
    for step in range(steps):
        engine.backward(loss(engine, Turn(step, 0, engine.global_rank)))
        engine.step()
    return engine


def refusals(folder: str, stage: str) -> list[str]:
    engine = trained(stage)
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    said = []
    for act in (
        lambda: engine.backward(loss(engine, Turn(2, 0, 0))),
        lambda: loss(engine, Turn(2, 0, 0)).backward(),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
        lambda: next(engine.optimizer.update(1.0)),
    ):
        with pytest.raises(TrialError, match="ema_weights") as caught, engine.ema_weights():
            act()
        said.append(str(caught.value))
        assert differing(weights, dict(engine.module_state_dict())) == []
    engine.zero_grad()
    engine.backward(loss(engine, Turn(2, 0, 0)))
    engine.step()
    assert engine.was_step_applied()
    return said


@pytest.mark.parametrize("stage", ["zero3"])
def test_an_error_leaves_the_weights_and_training_is_refused(ranks: Pools, tmp_path: Path, stage: str) -> None:
    said, other = ranks(2).run(refusals, str(tmp_path), stage)
    assert said == other and [line.split(":")[0] for line in said] == [
        *("backward", "backward", "save_checkpoint", "load_checkpoint", "engine.step")
    ]
    assert not list(tmp_path.iterdir())


def edited_inside(stage: str, config: dict[str, Any]) -> list[str]:
    """What is said of edits inside the block; the weights are back after each."""
    engine = trained(stage, config=EMA | config)
    param = engine.module.blocks[1].weight
    said = []

    def in_place() -> None:
        with zero.GatheredParameters(param, modifier_rank=0):
            param.data.mul_(0.5)

    def permuted() -> None:
        with zero.GatheredParameters(param, modifier_rank=0):
            param.data.copy_(param.data.flip(0))

    def raising() -> None:
        in_place()
        raise KeyError("no such metric")

    for edit in (
        in_place,
        permuted,
        raising,
        lambda: zero.safe_set_full_fp32_param(param, torch.zeros(param.shape)),
        lambda: engine.load_module_state_dict({k: v * 0.5 for k, v in engine.module_state_dict().items()}),
    ):
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        with pytest.raises(TrialError, match="the averages have the change") as caught, engine.ema_weights():
            edit()
        said.append(str(caught.value))
        assert differing(weights, dict(engine.module_state_dict())) == []
    return said


@pytest.mark.parametrize(("stage", "config"), [("zero0", {}), ("zero1", BF16), ("zero3", {}), ("zero3", BF16)])
def test_weights_are_not_edited_in_the_averages(ranks: Pools, stage: str, config: dict[str, Any]) -> None:
    """The tensor is one rank's part alone; all ranks say so."""
    said, other = ranks(2).run(edited_inside, stage, config)
    assert said == other and len(said) == 5


def destroyed(stage: str) -> list[str]:
    """What is left after an engine is destroyed inside the block: the averages."""
    engine = trained(stage, steps=3)
    with engine.ema_weights():
        averages = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy(rank0_only=False)
    return differing(averages, dict(engine.module.state_dict()))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_module_that_is_released_inside_keeps_the_averages(ranks: Pools, stage: str) -> None:
    assert ranks(2).run(destroyed, stage) == [[], []]


def test_without_a_step_or_the_key() -> None:
    engine = trained(steps=0)
    with engine.ema_weights():
        before = engine.module_state_dict()
    assert differing(before, engine.module_state_dict()) == []
    with pytest.raises(TrialError, match=r'"ema": \{"decay": 0.999\}'), trained(config={}).ema_weights():
        pass


def interrupted(stage: str, optimizer: dict[str, Any], evaluates: bool) -> list[str]:
    """Evaluation between micro-batches, and between a backward and its step, changes no bit."""
    engine: Any = build_engine(Case(Tower, loss, None, optimizer, config=EMA, accumulation=2), STAGES[stage])
    for step in range(3):
        for number in range(2):
            engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            if evaluates:
                mode = torch.inference_mode() if step == 1 else torch.no_grad()
                with mode, engine.ema_weights(), engine.ema_weights():
                    loss(engine, Turn(9, 0, 0))
            engine.step()
    return [value.hex() for each in engine.module_state_dict().values() for value in each.flatten().tolist()]


@pytest.mark.parametrize(("stage", "optimizer"), [("zero0", ADAMW), ("zero2", MUON), ("zero3-free", ADAMW)])
def test_evaluation_changes_nothing_of_a_step(ranks: Pools, stage: str, optimizer: dict[str, Any]) -> None:
    plain = ranks(2).run(interrupted, stage, optimizer, False)
    assert ranks(2).run(interrupted, stage, optimizer, True) == plain


# --- checkpoints ----------------------------------------------------------------------------------


def averages(engine: Any, steps: range) -> list[str]:
    """Train on data that all ranks share; the bits of the averages."""
    for step in steps:
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
    found = []
    with engine.ema_weights():
        for value in engine.module_state_dict().values():
            found += [each.hex() for each in value.flatten().tolist()]
    return found


def built(stage: str, optimizer: dict[str, Any], config: dict[str, Any]) -> Any:
    zero_config = STAGES[stage] | config.get("zero_optimization", {})
    return build_engine(Case(Tower, loss, None, optimizer, config=config), zero_config)


def save(folder: str, stage: str, optimizer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    engine = built(stage, optimizer, config)
    averages(engine, range(3)) if "ema" in config else trained_on(engine, range(3))
    engine.save_checkpoint(folder)
    return averages(engine, range(3, 6)) if "ema" in config else []


def trained_on(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()


def resume(folder: str, stage: str, optimizer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    engine = built(stage, optimizer, config)
    engine.load_checkpoint(folder)
    return averages(engine, range(3, 6))


WARM = {"ema": {"decay": DECAY, "use_ema_warmup": True}}


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["AdamW", "Muon"])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    ranks: Pools, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    """On as many ranks, on others, and from a file; the warm-up goes on where it was."""
    folder = str(tmp_path / "checkpoints")
    whole = ranks(2).run(save, folder, "zero2", optimizer, WARM)[0]
    for size, stage in ((1, "zero0"), (2, "zero3"), (4, "zero1")):
        assert ranks(size).run(resume, folder, stage, optimizer, WARM) == [whole] * size
    if optimizer is not MUON:
        nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
        assert ranks(2).run(resume, folder, "zero2", optimizer, WARM | nvme) == [whole] * 2


def from_old(folder: str, stage: str, optimizer: dict[str, Any]) -> list[str]:
    engine: Any = built(stage, optimizer, {"ema": {"decay": DECAY, "update_after_step": 100}})
    engine.load_checkpoint(folder)
    masters = Masters(engine)
    masters.update()
    for step in range(3, 6):
        trained_on(engine, range(step, step + 1))
        masters.update()
    return wrong(engine, masters.expected())


@pytest.mark.parametrize(("stage", "optimizer"), [("zero0", ADAMW), ("zero3", MUON)])
def test_without_an_average_in_it_a_checkpoint_s_weights_begin_one(
    ranks: Pools, tmp_path: Path, stage: str, optimizer: dict[str, Any]
) -> None:
    """Whatever update_after_step is: these weights have been trained."""
    ranks(2).run(save, str(tmp_path), "zero1", optimizer, {})
    assert ranks(2).run(from_old, str(tmp_path), stage, optimizer) == [[], []]


def without(folder: str) -> list[list[str]]:
    ends = []
    for saved in ("with", "plain"):
        engine: Any = built("zero3", ADAMW, {})
        engine.load_checkpoint(f"{folder}/{saved}")
        trained_on(engine, range(3, 5))
        ends.append([each.hex() for value in engine.module_state_dict().values() for each in value.flatten().tolist()])
        assert all(KIND not in state for state in engine.optimizer.base.state.values())
    return ends


def test_an_engine_without_the_key_leaves_the_average_of_a_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path / "with"), "zero1", ADAMW, EMA)
    ranks(2).run(save, str(tmp_path / "plain"), "zero1", ADAMW, {})
    for one, other in ranks(2).run(without, str(tmp_path)):
        assert one == other


def weights_alone(folder: str) -> list[str]:
    """Weights that another run begins with: its average begins with its first step."""
    engine: Any = trained(steps=3)
    engine.load_checkpoint(folder, load_module_only=True)
    assert zero.safe_get_full_optimizer_state(engine.module.last.bias, KIND) is None
    trained_on(engine, range(1))
    return wrong(engine, {"last.bias": zero.safe_get_full_fp32_param(engine.module.last.bias)})


def test_without_optimizer_state_the_average_begins_again(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), "zero1", ADAMW, EMA)
    assert ranks(2).run(weights_alone, str(tmp_path)) == [[], []]


def exported(folder: str, stage: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(stage, config)
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
    """With frozen, tied and empty parameters."""
    folder = tmp_path / "checkpoints"
    expected = ranks(2).run(exported, str(folder), "zero3", BF16)[0]
    assert main(["ckpt", "export", str(folder), str(tmp_path / "out.safetensors"), "--ema"]) == 0
    assert "averages of 9 of 12 parameters" in capsys.readouterr().out
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == {*expected, "empty"}
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value), name
    for name, value in load_file(folder / "averaged.safetensors").items():
        assert torch.equal(value, found[name].to(value.dtype)), name


def test_an_export_without_averages_is_refused(tmp_path: Path, capsys: Any) -> None:
    trained(config={}).save_checkpoint(tmp_path / "checkpoints")
    assert main(["ckpt", "export", str(tmp_path / "checkpoints"), str(tmp_path / "out"), "--weights", "ema"]) == 5
    assert "no averages" in capsys.readouterr().err and not (tmp_path / "out").exists()


# --- what it costs --------------------------------------------------------------------------------


def prices(stage: str) -> tuple[int, int, bool]:
    """(Bytes more than without, by the formula), and whether the steps send the same."""
    engines = [trained(stage, config=config) for config in ({}, EMA)]
    before, after = (engine.persistent_bytes() for engine in engines)
    assert before.keys() == after.keys() and before["parameters"] == after["parameters"]
    numel = sum(piece.numel for piece in engines[1].optimizer.pieces)
    same = engines[0].comms_summary() == engines[1].comms_summary()
    return after["optimizer"] - before["optimizer"], 4 * numel, same


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_four_bytes_per_parameter_of_the_shard_and_no_collective(ranks: Pools, stage: str) -> None:
    for more, formula, same in ranks(2).run(prices, stage):
        assert more == formula > 0 and same


def test_the_plan_has_its_bytes() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "zero_optimization": {"stage": 1}}
    without, planned = (memory_plan(Tower(), config | more, 2) for more in ({}, EMA))
    numel = sum(-(-param.numel() // 16) * 16 for param in Tower().parameters()) // 2
    assert numel * 4 <= planned.figures.optimizer - without.figures.optimizer <= numel * 4 + 4096
    assert planned.figures.parameters == without.figures.parameters
