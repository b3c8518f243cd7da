"""Optimizers that look at whole tensors: what they send, their state in checkpoints and for user
code, and what is refused. tests/exactness trains with them next to plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zero_trial
from tests.engine.offloaded import PRECISIONS
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, difference, train_dense, train_ranks
from tests.support.dense import tower_loss as loss
from tests.support.models import TinyLM, Tower
from tests.support.pool import Pools, logged_lines
from tests.support.whole_optimizers import (
    GlobalNorm,
    LayerWise,
    MuonAndAdamW,
    MuonLike,
    ScheduleFree,
    ShampooLike,
    Unprobed,
)
from zero_trial import zero as access
from zero_trial.errors import ConfigError, TrialError
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.sharding.offload.moved_states import tensors_inside
from zero_trial.sharding.whole_tensors import parts_of

MUON = {"type": "Muon", "params": {"muon_lr": 2e-3, "adam_lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}}

LAMB = {"type": "Lamb", "params": {"lr": 3e-3, "weight_decay": 0.01}}
BY_NAME = {"Muon by name": MUON, "LAMB by name": LAMB}

OPTIMIZERS: dict[str, Any] = {
    "Muon by name": MuonAndAdamW,
    "LAMB by name": partial(FusedLamb, **LAMB["params"]),
    "LAMB": partial(FusedLamb, **LAMB["params"]),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "Muon-like": lambda groups: MuonLike(groups, lr=0.01),
    "Shampoo-like": lambda groups: ShampooLike(groups, lr=0.01),
    "layer-wise": lambda groups: LayerWise(groups, lr=0.01),
    "global norm": lambda groups: GlobalNorm(groups, lr=0.01),
    "schedule-free": lambda groups: ScheduleFree(groups, lr=0.05),
    "unprobed": lambda groups: Unprobed(groups, lr=0.01),
}


def build(name: str, zero: dict[str, Any], config: dict[str, Any], as_object: bool = False, **case: Any) -> Any:
    """(the case, its engine)"""
    make = OPTIMIZERS[name]
    case = {"clip": 0.2, **case}
    given = Case(Tower, loss, dense_optimizer=make, config=config, optimizer=BY_NAME.get(name, MUON), **case)
    if name in BY_NAME:
        return given, build_engine(given, zero)
    torch.manual_seed(1)
    model = Tower()
    here = Case(lambda: model, loss, config=config, **case)
    return given, build_engine(
        here, zero, optimizer=make([{"params": list(model.parameters())}]) if as_object else make
    )


def ready(groups: Any) -> torch.optim.Optimizer:
    optimizer = ScheduleFree(groups, lr=0.05)
    optimizer.train()
    return optimizer


class ByAttribute(LayerWise):
    """As fast as an attribute of the parameter says."""

    def direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return super().direction(param, group) * param.speed  # type: ignore[attr-defined]


def marked() -> Tower:
    model = Tower()
    for number, param in enumerate(model.parameters()):
        param.speed = 1.0 + number  # type: ignore[attr-defined]
    return model


class Replacing(LayerWise):
    """Puts new tensors into the place of the old values, columns first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            moved = param.data - 0.01 * param.grad * (1 + param.dim())
            param.data = moved.T.contiguous().T if moved.dim() == 2 else moved


class ReplacingElements(Replacing):
    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data = param.data - 0.01 * param.grad


def compared(zero: dict[str, Any], cls: Any, build: Any) -> tuple[float, list[str]]:
    """The largest difference to plain torch, and what is logged."""
    case = Case(build, loss, dense_optimizer=cls)
    found = logged_lines()
    engine = build_engine(Case(build, loss), zero, optimizer=cls)
    steps = list(zip(train_dense(case, engine.dp_world_size), train_ranks(case, engine), strict=True))
    return difference(engine, steps[-1][0]), found


@pytest.mark.parametrize(
    ("cls", "build", "stage"),
    [(ByAttribute, marked, "zero1"), (Replacing, Tower, "zero3"), (ReplacingElements, Tower, "zero1")],
)
def test_a_step_reads_attributes_and_may_replace_the_values(ranks: Pools, cls: Any, build: Any, stage: str) -> None:
    for gap, found in ranks(2).run(compared, STAGES[stage], cls, build):
        assert gap <= TOLERANCE and (build is Tower or not any("could not be tested" in line for line in found))


def step_traffic(zero: dict[str, Any], optimizer: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """(elements that the formula says, elements of matrices, what a step moved)."""
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": optimizer, "zero_optimization": zero}
    torch.manual_seed(1)
    engine = zero_trial.initialize(model=TinyLM(), config=config)[0]
    tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(engine.global_rank))
    for _ in range(3):
        engine.mesh.counters.reset()
        engine.backward(engine(tokens))
        engine.step()
    whole = engine.optimizer.whole
    matrices = sum(tensor.slot.numel for tensor in whole.tensors) if whole is not None else 0
    weights = [tensor.weight for tensor in whole.own] if whole is not None else []
    assert all(weight.untyped_storage().nbytes() == 4 for weight in weights), "nothing stays between steps"
    me, sent = engine.mesh.shard.index, 0
    for tensor in whole.tensors if whole else ():
        for rank, start, stop, _ in parts_of(tensor.group.layout, tensor.slot):
            sent += (stop - start) * (2 * (rank == me != tensor.owner) + (tensor.owner == me != rank))
    return sent, matrices, engine.mesh.counters.table()


def test_whole_tensors_travel_by_the_formula_and_nothing_else_changes(ranks: Pools) -> None:
    flat = ranks(2).run(step_traffic, STAGES["zero1"], {"type": "AdamW", "params": {}})
    for (sent, matrices, table), (*_, usual) in zip(
        ranks(2).run(step_traffic, STAGES["zero1"], {"type": "Muon", "params": {}}), flat, strict=True
    ):
        moved = table.pop("all_to_all/shard")
        assert moved["elements"] == sent <= matrices and moved["calls"] == 3 and table == usual


def away(zero: dict[str, Any], folder: str, places: Sequence[str] = ("optimizer",)) -> dict[str, Any]:
    """``zero`` with optimizer state, or parameters, in files of ``folder``."""
    sections = {f"offload_{place}": {"device": "nvme", "nvme_path": folder, "buffer_count": 2} for place in places}
    if "param" in places:
        sections["offload_param"] |= {"max_in_cpu": 0}
    return zero | sections


def trained(name: str, zero: dict[str, Any], config: dict[str, Any], most: int) -> tuple[Any, list[float], list[Any]]:
    """The engine, how far it is from plain torch in each step, and all that it has in the end.
    ``most``: elements of an owner that are updated together."""
    with mock.patch("zero_trial.engine.build.ROUND", most):
        case, engine = build(name, zero, config)
    gaps = []
    for reference, _ in zip(train_dense(case, engine.dp_world_size), train_ranks(case, engine), strict=True):
        gaps.append(difference(engine, reference))
    if "LAMB" in name:  # flat pieces in memory
        kinds = ("exp_avg", "exp_avg_sq", *(["ema"] if engine.optimizer.ema else []))
        params = list(engine.module.parameters())
        kept = [access.safe_get_full_optimizer_state(param, kind) for param in params for kind in kinds]
        kept += [access.safe_get_full_fp32_param(param) for param in params]
    else:
        state = engine.optimizer.state_dict()
        kept = [*state["masters"], *tensors_inside(state["state"])]
    values = [*kept, *engine.module_state_dict().values()]
    return engine, gaps, [(value.shape, value.dtype, value.flatten().tolist()) for value in values]


OFFLOADED = [("zero0", ("optimizer",)), ("zero0", ("optimizer", "param")), ("zero1", ("optimizer",))]
OFFLOADED += [("zero2", ("optimizer",)), ("zero3", ("optimizer",)), ("zero3-free", ("optimizer", "param"))]
OFFLOADED += [("zero3-free", ("param",))]


def offloaded(name: str, folder: str, precision: str) -> list[str]:
    """What is wrong with offloaded training: other bits than in memory, or memory that stays."""
    wrong = []
    for stage, places in OFFLOADED:
        config = PRECISIONS[precision] | ({"ema": {"decay": 0.9}} if precision == "bf16" else {})
        here, gaps, known = trained(name, STAGES[stage], config, 1 << 26)
        there, _, found = trained(name, away(STAGES[stage], folder, places), config, 150)
        if found != known:
            wrong.append(f"{stage} {places}: other bits")
        if precision == "fp32" and max(gaps) > TOLERANCE:
            wrong.append(f"{stage}: {max(gaps)} from plain torch")
        masters = there.optimizer.store.homes.masters
        resident = there.persistent_bytes()["optimizer"] - sum(each.nbytes for each in there.optimizer.store.buffers)
        if (masters is None) is ("optimizer" in places) or (masters is not None and resident):
            wrong.append(f"{stage} {places}: {resident} bytes of state in memory")
        weights = [each.weight.untyped_storage().nbytes() for each in there.optimizer.whole.own]
        if masters is not None and precision != "fp32" and max(weights, default=0) > 8:
            wrong.append(f"{stage} {places}: masters in memory")
        here.destroy()
        there.destroy()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Muon by name", "fp32"),
        ("Muon by name", "bf16"),
        ("Adafactor", "fp16"),
        ("Shampoo-like", "fp32"),
        ("global norm", "bf16"),
        ("LAMB by name", "fp32"),
        ("LAMB", "bf16"),
    ],
)
def test_offloaded_training_has_the_bits_of_training_in_memory(
    ranks: Pools, tmp_path: Path, name: str, precision: str, world: int
) -> None:
    """At every stage, also in rounds; without offload they are those of plain torch."""
    assert ranks(world).run(offloaded, name, str(tmp_path), precision) == [[]] * world


def saved_or_resumed(name: str, zero: dict[str, Any], folder: str, resume: bool) -> list[str]:
    """Four steps; saved after two of them, or resumed there."""
    _, engine = build(name, zero, {}, True)
    if name == "schedule-free":
        engine.optimizer.train()
    if resume:
        engine.load_checkpoint(folder)
    for step in range(2 if resume else 0, 4):
        engine.backward(loss(engine, Turn(step, 0, 0)))
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder)
    weights = [each.hex() for value in engine.module_state_dict().values() for each in value.flatten().tolist()]
    engine.destroy()
    return weights


@pytest.mark.parametrize("name", ["Muon by name", "Shampoo-like", "global norm", "schedule-free", "unprobed", "LAMB"])
def test_state_of_whole_tensors_moves_to_new_owners(ranks: Pools, tmp_path: Path, name: str) -> None:
    """All ranks have the same data, so that any number of them trains alike (gradients are summed
    over 2 and 1 ranks exactly)."""
    folder = str(tmp_path)
    unbroken = ranks(2).run(saved_or_resumed, name, away(STAGES["zero1"], folder), folder, False)[0]
    for world, zero in ((2, away(STAGES["zero3"], folder)), (1, away(STAGES["zero2"], folder)), (4, STAGES["zero1"])):
        for weights in ranks(world).run(saved_or_resumed, name, zero, folder, True):
            assert weights == unbroken, (world, zero)


def fails_with_values(groups: Any) -> torch.optim.Optimizer:
    """Fails with a matrix of the model, and not with those that it is tried out with."""
    if any(param.numel() > 24 and bool(param.detach().any()) for group in groups for param in group["params"]):
        raise ValueError("not this one")
    return LayerWise(groups, lr=0.01)


def refused_on_every_rank() -> str:
    with pytest.raises(ConfigError) as error:
        build_engine(Case(Tower, loss), STAGES["zero1"], optimizer=fails_with_values)
    return str(error.value)


def test_a_callable_that_fails_with_the_tensors_of_one_rank_is_an_error_on_all(ranks: Pools) -> None:
    for message in ranks(2).run(refused_on_every_rank):
        assert "not this one" in message and "stage 0" in message


def accessed(zero_stage: dict[str, Any]) -> tuple[float, list[int]]:
    """How far the states are from plain torch's, in both ways; the elements that this rank has."""
    _, engine = build("Muon-like", zero_stage, {}, True, clip=0.0)
    torch.manual_seed(1)
    plain = Tower()
    optimizer = MuonLike(plain.parameters())
    weight = engine.module.blocks[0].weight
    assert access.safe_get_full_optimizer_state(weight, "momentum_buffer") is None
    with pytest.raises(TrialError, match="does not have this state yet"):
        access.safe_set_full_optimizer_state(weight, torch.zeros(11, 11), "momentum_buffer")
    turn = Turn(0, 0, 0)
    loss(plain, turn).backward()
    optimizer.step()
    engine.backward(loss(engine, turn))
    engine.step()
    worst, held = 0.0, []
    for param, reference in zip(engine.module.parameters(), plain.parameters(), strict=True):
        state = access.safe_get_full_optimizer_state(param, "momentum_buffer")
        assert state is not None
        worst = max(worst, (state - optimizer.state[reference]["momentum_buffer"]).abs().max().item())
        local = access.safe_get_local_optimizer_state(param, "momentum_buffer")
        held.append(local.numel() if local is not None else 0)
    access.safe_set_full_optimizer_state(weight, torch.full((11, 11), 0.5), "momentum_buffer")
    again = access.safe_get_full_optimizer_state(weight, "momentum_buffer")
    assert again is not None and bool((again == 0.5).all())
    with pytest.raises(TrialError, match="shape"):
        access.safe_set_full_optimizer_state(weight, torch.zeros(11), "momentum_buffer")
    return worst, held


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_state_of_whole_tensors_is_read_and_set_on_every_rank(ranks: Pools, stage: str) -> None:
    answers = ranks(2).run(accessed, STAGES[stage])
    sizes = [param.numel() for param in Tower().parameters()]
    for gap, held in answers:
        assert gap <= TOLERANCE and (stage != "zero0" or held == sizes)
    if stage != "zero0":
        assert [a + b for a, b in zip(answers[0][1], answers[1][1], strict=True)] == sizes


def lines(name: str, zero: dict[str, Any]) -> list[str]:
    found = logged_lines()
    _, engine = build(name, zero, {}, True)
    owners = {tensor.owner for tensor in engine.optimizer.whole.tensors} if engine.optimizer.whole else set()
    return [*found, f"owners {sorted(owners)}"]


@pytest.mark.parametrize(
    ("name", "said"), [("global norm", "couples tensors"), ("unprobed", "could not be tested"), ("layer-wise", "")]
)
def test_a_step_that_couples_tensors_or_may_do_so_has_one_owner(ranks: Pools, name: str, said: str) -> None:
    first, second = ranks(2).run(lines, name, STAGES["zero2"])
    assert any(said in line for line in first) and (not said or not any(said in line for line in second))
    assert first[-1] == second[-1] == ("owners [0]" if said else "owners [0, 1]")


def declared(zero: dict[str, Any]) -> tuple[bool, int]:
    _, engine = build("layer-wise", zero | {"elementwise_optimizer": True}, {}, True)
    return engine.optimizer.whole is None, max(piece.weight.dim() for piece in engine.optimizer.pieces)


def test_ds_config_can_say_that_an_optimizer_is_elementwise(ranks: Pools) -> None:
    assert ranks(2).run(declared, STAGES["zero1"]) == [(True, 1)] * 2


def evaluated(zero: dict[str, Any]) -> tuple[float, float, str]:
    """How far the weights for evaluation, and those for training after them, are from plain
    torch's."""
    case, engine = build("schedule-free", zero, {}, True, clip=0.0)
    engine.optimizer.train()
    case = Case(Tower, loss, dense_optimizer=ready)
    steps = zip(train_dense(case, 2), train_ranks(case, engine), strict=True)
    *_, (reference, _) = steps
    training = difference(engine, reference)
    before = [param.clone() for param in reference.parameters()]
    engine.optimizer.eval()
    moved = max(
        (engine.module_state_dict()[name] - value).abs().max().item() for name, value in reference.state_dict().items()
    )
    engine.optimizer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))
    return training, moved, str(difference(engine, reference) <= TOLERANCE)


@pytest.mark.parametrize("stage", ["zero2", "zero3-free"])
def test_schedule_free_weights_are_switched_on_all_ranks(ranks: Pools, stage: str) -> None:
    for training, moved, back in ranks(2).run(evaluated, STAGES[stage]):
        assert training <= TOLERANCE and moved > 1e-3 and back == "True"
