"""Tests for zero_trial/sharding/unshard.py: what is live when. On one rank: freeing and gathering are the same there, without the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_model
from zero_trial.sharding.grouping import GroupingLimits, ShardingSettings, UnshardLimits
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.unshard import tensors_in

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
        return {group.name for group in self.model.groups if group.live or group.unsharding}


AT_NEED = UnshardLimits(prefetch=0)


def build(reshard: str = "auto", live: UnshardLimits = AT_NEED, smallest_group: int = 0) -> tuple[ShardedModel, Watch]:
    torch.manual_seed(0)
    settings = ShardingSettings(limits=GroupingLimits(persistence=0, smallest_group=smallest_group), live=live)
    model = make_model(Net(), 3, settings=settings, plan={"reshard_after": reshard})
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
        model.wait()
    return value


def test_only_the_block_at_work_and_the_root_are_live() -> None:
    model, watch = build("forward")
    assert watch.live() == set()
    step(model)
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    assert watch.forward == [(name, {"root", name}) for name in names]
    assert watch.backward == [(name, {"root", name}) for name in reversed(names)]
    assert watch.live() == set()
    assert watch.most == ROOT + BLOCK


def test_with_room_blocks_stay_between_forward_and_backward() -> None:
    model, watch = build()
    step(model)
    assert watch.forward[-1][1] == {"root", *(f"blocks.{index}" for index in range(BLOCKS))}
    assert [len(live) for _, live in watch.backward] == [5, 4, 3, 2], "freed as soon as their gradients are complete"
    assert watch.live() == set()


def test_kept_until_the_step() -> None:
    model, watch = build("step")
    step(model, last=False)
    everything = {"root", *(f"blocks.{index}" for index in range(BLOCKS))}
    assert watch.live() == everything
    step(model)
    assert watch.live() == set()


@pytest.mark.parametrize("reshard", ["auto", "forward", "step"])
def test_between_micro_batches(reshard: str) -> None:
    model, watch = build(reshard)
    step(model, last=False)
    assert bool(watch.live()) is (reshard != "forward")


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
    assert watch.backward[1] == ("blocks.2", {"root", "blocks.2", "blocks.1"})
    assert watch.live() == set()


def test_a_larger_budget_fetches_further_ahead() -> None:
    model, watch = build("forward", UnshardLimits(prefetch=2 * BLOCK))
    step(model)
    watch.forward.clear()
    step(model)
    assert watch.forward[0] == ("blocks.0", {"root", "blocks.0", "blocks.1", "blocks.2"})


def test_small_neighbours_come_and_go_together() -> None:
    model, watch = build("forward", smallest_group=2 * (WIDTH * WIDTH + WIDTH))
    step(model)
    pairs = ["blocks.0..blocks.1", "blocks.0..blocks.1", "blocks.2..blocks.3", "blocks.2..blocks.3"]
    assert [live for _, live in watch.forward] == [{"root", pair} for pair in pairs]
    assert [live for _, live in watch.backward] == [{"root", pair} for pair in reversed(pairs)]
    assert watch.live() == set()


@pytest.mark.parametrize("smallest", [0, 100, MANY])
@pytest.mark.parametrize("reshard", ["auto", "forward", "step"])
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 0, 1, 1], [2], [], [0, 1, 2, 3, 0]])
def test_another_order_gives_the_same_loss_as_without_sharding(reshard: str, order: list[int], smallest: int) -> None:
    model, watch = build(reshard, UnshardLimits(prefetch=BLOCK), smallest)
    torch.manual_seed(0)
    plain = Net()
    plain.order = order
    step(model)
    model.module.order = order  # type: ignore[assignment]
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    for _ in range(2):
        assert step(model) == plain(x).item()
        assert watch.live() == set()


@pytest.mark.parametrize("most", [1, ROOT + BLOCK, ROOT + 2 * BLOCK, ROOT + 3 * BLOCK])
@pytest.mark.parametrize("prefetch", [0, BLOCK, MANY])
def test_max_live_is_kept_unless_the_block_at_work_needs_more(most: int, prefetch: int) -> None:
    model, watch = build(live=UnshardLimits(max_live=most, prefetch=prefetch))
    for _ in range(3):
        step(model, turns=2)
    assert watch.most <= max(most, ROOT + BLOCK) + BLOCK, (
        "one block may be on top: whether to keep it is decided after it has worked"
    )


def test_reuse_distance() -> None:
    """Blocks that are needed again soon stay, others go; known from the second step on."""
    model, watch = build(live=UnshardLimits(max_reuse_distance=2 * BLOCK + ROOT, prefetch=0))
    step(model)
    watch.backward.clear()
    step(model)
    kept = watch.backward[0][1]
    assert "blocks.3" in kept
    assert "blocks.0" not in kept
    model, watch = build(live=UnshardLimits(max_reuse_distance=0, prefetch=0))
    step(model)
    assert watch.backward[0][1] == {"root", "blocks.3"}


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
    model.unsharder.unshard_all()
    assert len(watch.live()) == BLOCKS + 1
    assert model.unsharder.live_numel() == ROOT + BLOCKS * BLOCK
    model.unsharder.reshard_all()
    assert watch.live() == set()
    model.unsharder.remove_hooks()
    assert model.module(torch.ones(1, WIDTH)).isnan()


def test_a_backward_pass_that_raises_leaves_the_next_one_whole() -> None:
    model, watch = build("forward")

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
    model.reducer.reset()
    for _ in range(2):
        step(model)
        assert watch.live() == set()


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


def test_tensors_in_all_kinds_of_outputs() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    found = tensors_in((a, [b, {"x": c, "n": 3}], None, "text"))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in(Output(a, {"deep": [d]}))] == [id(a), id(d)]
    assert tensors_in(nn.Linear(2, 2)) == []
    assert tensors_in(nn.Linear) == []
    assert tensors_in(None) == []


@pytest.mark.parametrize("reshard", ["auto", "forward", "step"])
def test_a_backward_pass_through_a_backward_pass(reshard: str) -> None:
    """A gradient penalty (WGAN-GP): the graph of the first backward pass needs the weights again."""
    model, watch = build(reshard)
    torch.manual_seed(0)
    plain = Net()
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)

    def penalty(net: nn.Module) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        loss: torch.Tensor = net(inputs)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    expected = penalty(plain)
    expected.backward()
    for _ in range(2):
        loss = penalty(model.module)
        model.begin_backward(reduce=True, last=True)
        loss.backward()
        model.end_backward()
        assert loss.item() == expected.item()
        for grad_buffer in model.grad_buffers:
            for piece in grad_buffer.group.layout.pieces(0):
                grad = plain.get_parameter(piece.slot.name).grad
                assert grad is not None
                assert torch.allclose(
                    grad_buffer.shard[piece.offset : piece.offset + piece.numel], grad.reshape(-1), atol=1e-7
                )
        model.wait_before_writing()
        model.reducer.reset()
        model.publish()
        assert watch.live() == set()
