"""What is live when: gathering, prefetching and freeing parameters. On one rank this is the same,
without the wire."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_model
from zero_trial.errors import TrialError
from zero_trial.sharding.grouping import GroupingLimits, ShardingSettings, UnshardLimits
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.module_hooks import ModuleHook
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.unshard import SideOutputs, UseOrder, tensors_in

WIDTH, BLOCKS = 8, 4
BLOCK = 96  # 8 x 8 and 8, each aligned to 32
ROOT = 2 * BLOCK
MANY = 1_000_000_000


class Net(nn.Module):
    """Root layers around a list of blocks that are called in ``order``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order = list(range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        out: torch.Tensor = self.head(x).square().mean()
        return out


@dataclass
class Watch:
    """The groups that live, or are on their way, while each block computes."""

    model: ShardedModel
    forward: list[tuple[str, set[str]]] = field(default_factory=list)
    backward: list[tuple[str, set[str]]] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        for index, block in enumerate(self.model.module.blocks):  # type: ignore[union-attr, arg-type]
            block.register_forward_pre_hook(lambda *_, name=f"blocks.{index}": self.note(self.forward, name))
            block.register_forward_hook(lambda m, i, out, name=f"blocks.{index}": self.watch(out, name))

    def watch(self, out: torch.Tensor, name: str) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: self.note(self.backward, name))

    def note(self, where: list[tuple[str, set[str]]], name: str) -> None:
        where.append((name, self.live()))
        self.most = max(self.most, self.model.unsharder.live_numel())

    def live(self) -> set[str]:
        return {group.name for group in self.model.groups if group.state is not GroupState.SHARDED}


AT_NEED = UnshardLimits(prefetch=0)


def build(
    reshard: str = "auto", live: UnshardLimits = AT_NEED, smallest_group: int = 0, frozen: int = 0
) -> tuple[ShardedModel, Watch]:
    torch.manual_seed(0)
    settings = ShardingSettings(limits=GroupingLimits(persistence=0, smallest_group=smallest_group), live=live)
    net = Net()
    net.blocks[:frozen].requires_grad_(False)
    model = make_model(net, 3, settings=settings, plan={"reshard_after": reshard})
    return model, Watch(model)


def step(model: ShardedModel, *, last: bool = True, turns: int = 1) -> float:
    """Micro-batches, and a step that changes nothing."""
    value = 0.0
    for turn in range(turns):
        loss = model.module(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
        model.begin_backward(reduce=True, last=last and turn == turns - 1)
        loss.backward()
        model.end_backward()
        value = loss.item()
    if last:
        model.wait_before_writing()
        model.reducer.reset()
        model.publish()
    return value


def test_only_the_block_at_work_and_the_root_are_live() -> None:
    model, watch = build("forward")
    assert watch.live() == set()
    step(model)
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    assert watch.forward == [(name, {"root", name}) for name in names]
    assert watch.backward == [(name, {"root", name}) for name in reversed(names)] and watch.live() == set()
    assert watch.most == ROOT + BLOCK


def test_with_room_blocks_stay_between_forward_and_backward() -> None:
    model, watch = build()
    step(model)
    assert watch.forward[-1][1] == {"root", *(f"blocks.{index}" for index in range(BLOCKS))}
    assert [len(live) for _, live in watch.backward] == [5, 4, 3, 2], "freed as soon as their gradients are complete"
    assert watch.live() == set()


ALL = ROOT + BLOCKS * BLOCK


@pytest.mark.parametrize(
    ("reshard", "live", "forward", "backward"),
    [
        ("auto", AT_NEED, ALL, ALL),
        ("step", AT_NEED, ALL, ALL),
        ("forward", AT_NEED, ROOT, 0),
        ("auto", UnshardLimits(max_live=0, prefetch=0), 0, 0),
        ("auto", UnshardLimits(max_reuse_distance=0, prefetch=0), 0, 0),
        ("auto", UnshardLimits(max_live=ROOT + 2 * BLOCK, prefetch=0), ROOT + 2 * BLOCK, ROOT + 2 * BLOCK),
        ("auto", UnshardLimits(max_reuse_distance=3 * BLOCK, prefetch=0), ROOT + BLOCK, ROOT + BLOCK),
    ],
)
def test_elements_that_live_between_the_phases_of_a_step(
    reshard: str, live: UnshardLimits, forward: int, backward: int
) -> None:
    """After a forward, and after a backward that another micro-batch follows."""
    model, _ = build(reshard, live)
    step(model, turns=3)  # the order is known from the second step on
    found = []
    for last in (False, False, True):
        loss = model.module(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
        found.append(model.unsharder.live_numel())
        model.begin_backward(reduce=True, last=last)
        loss.backward()
        model.end_backward()
        found.append(model.unsharder.live_numel())
    assert found == [forward, backward, forward, backward, forward, 0]


def test_what_comes_next_is_fetched_ahead_in_the_recorded_order() -> None:
    model, watch = build("forward", UnshardLimits(prefetch=BLOCK))
    step(model)
    assert all(live == {"root", name} for name, live in watch.forward), "nothing is known in the first step"
    watch.forward.clear()
    watch.backward.clear()
    step(model)
    assert watch.forward[0] == ("blocks.0", {"root", "blocks.0", "blocks.1"})
    assert watch.forward[1] == ("blocks.1", {"root", "blocks.1", "blocks.2"})
    assert watch.backward[0] == ("blocks.3", {"root", "blocks.3", "blocks.2"})
    assert watch.backward[1] == ("blocks.2", {"root", "blocks.2", "blocks.1"}) and watch.live() == set()


def test_small_neighbours_come_and_go_together() -> None:
    model, watch = build("forward", smallest_group=2 * (WIDTH * WIDTH + WIDTH))
    step(model)
    pairs = ["blocks.0..blocks.1", "blocks.0..blocks.1", "blocks.2..blocks.3", "blocks.2..blocks.3"]
    assert [live for _, live in watch.forward] == [{"root", pair} for pair in pairs]
    assert [live for _, live in watch.backward] == [{"root", pair} for pair in reversed(pairs)]
    assert watch.live() == set()


@pytest.mark.parametrize(
    ("most", "prefetch"), [(1, BLOCK), (ROOT + BLOCK, MANY), (ROOT + 2 * BLOCK, 0), (ROOT + 3 * BLOCK, MANY)]
)
def test_max_live_is_kept_unless_the_block_at_work_needs_more(most: int, prefetch: int) -> None:
    model, watch = build(live=UnshardLimits(max_live=most, prefetch=prefetch))
    for _ in range(3):
        step(model, turns=2)
    assert watch.most <= max(most, ROOT + BLOCK) + BLOCK, (
        "one block may be on top: whether to keep it is decided after it has worked"
    )


def test_evaluation_is_no_part_of_the_order_and_keeps_no_root() -> None:
    model, watch = build("forward", UnshardLimits(prefetch=BLOCK))
    step(model)
    with torch.no_grad():
        for _ in range(2):
            model.module(torch.ones(1, WIDTH))
    assert watch.live() == set()
    watch.forward.clear()
    step(model)
    assert watch.forward[0] == ("blocks.0", {"root", "blocks.0", "blocks.1"}), "still on track"


def test_everything_and_nothing() -> None:
    model, watch = build()
    for group in model.groups:
        group.unshard()
    assert len(watch.live()) == BLOCKS + 1 and model.unsharder.live_numel() == ROOT + BLOCKS * BLOCK
    model.unsharder.reshard_all()
    assert watch.live() == set()
    model.unsharder.remove_hooks()
    with pytest.raises(TrialError, match="freed"):
        model.module(torch.ones(1, WIDTH))


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_backward_pass_that_raises_leaves_the_next_one_whole(frozen: int) -> None:
    """What it left unsharded goes with its gradients, and later micro-batches free their own."""
    model, watch = build("forward", frozen=frozen)

    class Stop(RuntimeError):
        pass

    def stop(grad: torch.Tensor) -> None:
        raise Stop

    x = torch.ones(1, WIDTH, requires_grad=True)
    handle = model.module.blocks[1].register_forward_hook(lambda m, i, out: out.register_hook(stop) and None)  # type: ignore[index, union-attr]
    loss = model.module(x)
    model.begin_backward(reduce=True, last=True)
    with pytest.raises(Stop):
        loss.backward()
    handle.remove()
    assert watch.live()
    model.reset_gradients()
    assert watch.live() == set()
    for last in (False, True, True):
        step(model, last=last)
        assert watch.live() == set()


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


def test_tensors_in_all_kinds_of_outputs() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    found = tensors_in((a, [b, {"x": c, "n": 3}], None, "text"))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in(Output(a, {"deep": [d]}))] == [id(a), id(d)] and tensors_in(nn.Linear(2, 2)) == []
    assert tensors_in(nn.Linear) == [] and tensors_in(None) == []


SIZES = {"root": 50, "h0": 100, "h1": 100, "h2": 100}
STEP = ["root", "h0", "h1", "h2", "h2", "h1", "h0"]


def after_one_step(order: list[str] = STEP) -> UseOrder:
    uses = UseOrder(SIZES)
    uses.end_step()
    for block in order:
        uses.use(block)
    uses.end_step()
    return uses


@pytest.mark.parametrize(
    ("used_before", "budget", "expected"),
    [
        (1, 1, ["h0"]),  # the next always, however large
        (1, 199, ["h0"]),
        (1, 200, ["h0", "h1"]),
        (1, 10_000, ["h0", "h1", "h2"]),  # each once
        (4, 150, ["h2"]),
        (4, 200, ["h2", "h1"]),
        (7, 10_000, []),  # the step is over
    ],
)
def test_upcoming_within_a_budget(used_before: int, budget: int, expected: list[str]) -> None:
    uses = after_one_step()
    for block in STEP[:used_before]:
        uses.use(block)
    assert uses.upcoming(budget) == expected


def test_what_follows_is_known_block_by_block() -> None:
    uses = after_one_step()
    assert list(uses.following()) == ["root", "h0", "h1", "h2"]
    for block in STEP[:4]:
        uses.use(block)
    assert list(uses.following()) == ["h2", "h1", "h0"], "the one in use comes next"
    uses.use("h1")
    assert list(uses.following()) == []


def test_a_step_that_leaves_the_order_is_followed_and_becomes_the_next_prediction() -> None:
    uses = after_one_step()
    other = ["root", "h1", "h0", "h0", "h1"]
    uses.use("root")
    assert uses.on_track
    for block in other[1:]:
        uses.use(block)
        assert not uses.on_track and uses.upcoming(1000) == [] and uses.distance("h0") is None
    for _ in range(2):  # a step without any use forgets nothing
        uses.end_step()
    uses.use("root")
    assert uses.upcoming(100) == ["h1"]
    fresh = UseOrder(SIZES)
    fresh.use("root")
    assert not fresh.on_track and fresh.upcoming(1000) == [] and fresh.distance("h0") is None
    longer = after_one_step(["root"])
    longer.use("root")
    assert longer.on_track
    longer.use("h0")
    assert not longer.on_track


@pytest.mark.parametrize(
    ("used_before", "block", "expected"), [(2, "h0", 400), (3, "h1", 200), (4, "h2", 0), (6, "h1", None), (1, "h0", 0)]
)
def test_distance_counts_what_is_used_before(used_before: int, block: str, expected: int | None) -> None:
    uses = after_one_step()
    for used in STEP[:used_before]:
        uses.use(used)
    assert uses.distance(block) == expected


class Routed(nn.Module):
    """A module of a user's, with an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        self.balance = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.balance = out.square().mean()  # type: ignore[assignment]
        return out


def test_side_outputs_are_tensors_with_a_history_left_on_modules() -> None:
    """A user's module is always looked at; torch's if it has other attributes than it had."""
    net = nn.Sequential(Routed(), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].aux = None
    aside = SideOutputs(net)
    assert aside.tensors() == []
    net[0](torch.ones(1, 2))
    net[1].aux, net[2].aux = net[1].weight.sum(), net[2].weight.sum()
    net[1].plain = torch.ones(1)
    assert {id(t) for t in aside.tensors()} == {id(net[0].balance), id(net[1].aux), id(net[2].aux)}


def test_a_copy_of_a_hook_does_nothing() -> None:
    calls: list[Any] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(ModuleHook(lambda *args: calls.append(args)))
    twin = copy.deepcopy(layer)
    layer(torch.ones(2))
    assert len(calls) == 1
    twin(torch.ones(2))
    assert len(calls) == 1 and ModuleHook(lambda a, b=0: a + b)(1, b=2) == 3
