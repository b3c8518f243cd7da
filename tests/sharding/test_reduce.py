"""Gradients are summed over ranks, group by group, in one order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_trial
from tests.sharding.parts import mesh_for, parameters
from tests.support.pool import Pools
from zero_trial.comm import Mesh
from zero_trial.comm.backends import Call, SharedTransport
from zero_trial.sharding import reduce
from zero_trial.sharding.build_groups import fill_shard
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import lay_out, square_sum
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import plan_for_stage
from zero_trial.sharding.reduce import GradReducer

SHAPES = [[(6, 10), (6,)], [(200, 90)], [(3,), (40, 3)]]


class Rig:
    """Three groups, their gradient buffers and a reducer, without a model around them."""

    def __init__(
        self,
        stage: int,
        *,
        every: str = "auto",
        shard: int | None = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        self.mesh: Mesh = mesh_for(stage, shard)
        plan = plan_for_stage(stage, reduce_every=every)
        self.params = [parameters(shapes, dtype, seed=index) for index, shapes in enumerate(SHAPES)]
        self.launched: list[str] = []
        self.grad_buffers = []
        for index, params in enumerate(self.params):
            layout = lay_out(
                [(f"u{index}.p{number}", tuple(p.shape)) for number, p in enumerate(params)],
                self.mesh.shard.size,
                self.mesh.replica.size,
            )
            group = ParamGroup(
                f"u{index}", layout, params, plan=plan.persistent(), dtype=dtype, device=torch.device("cpu"),
                comm=self.mesh.shard, runs={0: (0, layout.numel)},
                fill=partial(fill_shard, layout, params, None, self.mesh.shard.index),
            )  # fmt: skip
            self.grad_buffers.append(GradBuffer(group, dtype=dtype, shard_dtype=dtype))
        self.reducer = GradReducer(self.grad_buffers, self.mesh.shard, self.mesh.replica, **kwargs)
        launch = self.reducer._launch

        def watched(grad_buffer: GradBuffer) -> None:
            self.launched.append(grad_buffer.group.name)
            launch(grad_buffer)

        self.reducer._launch = watched  # type: ignore[method-assign]

    @property
    def rank(self) -> int:
        return self.mesh.rank

    def backward(self, order: list[int], *, reduce: bool = True, factor: float = 1.0) -> None:
        """A pass in which the groups get gradients one after the other: (rank + 1) * (group + 1) *
        factor everywhere."""
        self.reducer.begin_pass(reduce=reduce)
        for index in order:
            scale = (self.rank + 1) * (index + 1) * factor
            torch.stack([(scale * p).sum() for p in self.params[index]]).sum().backward()
        self.reducer.finish_pass()

    def sums(self) -> list[float]:
        """The value that fills each group's reduced gradient; NaN if it is not one value with zeros
        in the padding."""
        found = []
        for grad_buffer in self.grad_buffers:
            inside = torch.zeros(grad_buffer.shard.numel(), dtype=torch.bool)
            for piece in grad_buffer.group.layout.pieces(self.mesh.shard.index):
                inside[piece.offset : piece.offset + piece.numel] = True
            payload, padding = grad_buffer.shard[inside], grad_buffer.shard[~inside]
            same = payload.numel() == 0 or bool(payload.eq(payload[0]).all())
            clean = bool(padding.eq(0).all())
            found.append(
                payload[0].item() if same and clean and payload.numel() else float("nan") if payload.numel() else -1.0
            )
        return found


def fits(found: list[float], expected: list[float]) -> bool:
    """A rank whose shard is padding alone says -1."""
    return all(value in (want, -1.0) for value, want in zip(found, expected, strict=True))


# what 1 + 2 + ... ranks contribute
TOTAL = {1: 1.0, 2: 3.0, 4: 10.0}


def summed(stage: int, every: str, shard: int | None) -> list[float]:
    rig = Rig(stage, every=every, shard=shard)
    rig.backward([2, 1, 0])
    rig.reducer.reduce_missing()
    return rig.sums()


@pytest.mark.parametrize(
    ("stage", "every", "shard"),
    [(0, "auto", None), (1, "auto", None), (1, "micro", None), (3, "auto", None), (2, "auto", 2)],
)
def test_at_every_stage_and_mesh(ranks: Pools, stage: int, every: str, shard: int | None) -> None:
    assert shard or summed(stage, every, None) == [1.0, 2.0, 3.0], "on one rank nothing is added"
    for world in (2, 4):
        for found in ranks(world).run(summed, stage, every, shard):
            assert fits(found, [TOTAL[world] * (index + 1) for index in range(3)]), (world, found)


def orders() -> dict[str, Any]:
    """The second rank's groups become complete in another order."""
    rig = Rig(2)
    own = [2, 1, 0] if rig.rank == 0 else [0, 2, 1]
    out: dict[str, Any] = {"before": rig.reducer.order_by_name()}
    rig.backward(own)
    out["first"], rig.launched = rig.launched, []
    out["order"] = rig.reducer.order_by_name()
    rig.reducer.reset()
    rig.backward(own)
    out["second"] = rig.launched
    out["sums"] = rig.sums()
    return out


def test_groups_go_in_one_order_on_all_ranks_and_from_the_second_step_in_that_of_rank_0(ranks: Pools) -> None:
    for found in ranks(2).run(orders):
        assert found["before"] is None and found["first"] == ["u0", "u1", "u2"]
        assert found["order"] == found["second"] == ["u2", "u1", "u0"] and fits(found["sums"], [3.0, 6.0, 9.0])


def test_a_checkpoints_order_is_continued_if_it_is_one_of_these_groups() -> None:
    rig = Rig(2)
    rig.reducer.set_order(["u1", "u2", "u0"])
    assert rig.reducer.order_by_name() == ["u1", "u2", "u0"]
    for wrong in (None, [], ["u0"], ["u0", "u1", "u3"], ["u0", "u0", "u1", "u2"]):
        rig.reducer.set_order(wrong)
        assert rig.reducer.order_by_name() == ["u1", "u2", "u0"]


PAIRS = [(0, "boundary"), (1, "micro"), (2, "boundary"), (3, "micro")]
SUMS = {
    "three micro-batches": [333.0, 666.0, 999.0],
    "left alone": [3.0, 6.0, 9.0],
    "second sum": [3.0, 36.0, 9.0],
    "one-sided": [3.0, 26.0, 29.0],
    "unused": [3.0, 0.0, 6.0],
    "after it": [3.0, 6.0, 9.0],
    "reduced by no pass": [6.0, 12.0, 18.0],
}


def all_sums(stage: int, every: str) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The sums after each of these, and what is counted on the way."""
    found, counts = {}, {}
    rig = Rig(stage, every=every)
    for turn in range(3):
        rig.backward([2, 1, 0], reduce=every == "micro" or turn == 2, factor=10.0**turn)
    found["three micro-batches"], counts["launches"] = rig.sums(), len(rig.launched)
    rig = Rig(stage, every=every)  # from another loss, after the reduction
    rig.backward([2, 1, 0])
    (10.0 * (rig.rank + 1) * rig.params[1][0]).sum().backward()
    found["left alone"] = rig.sums()
    rig.reducer.reduce_missing()
    rig.reducer.reduce_late()
    found["second sum"] = rig.sums()
    rig = Rig(stage, every=every)  # of group 2 on rank 0 alone, and of group 1 on rank 1 alone
    rig.backward([2, 1, 0])
    torch.stack([(20.0 * p).sum() for p in rig.params[2 - rig.rank]]).sum().backward()
    rig.reducer.reduce_missing()
    counts["late groups"] = rig.reducer.late_groups()
    rig.reducer.reduce_late()
    found["one-sided"] = rig.sums()
    rig = Rig(stage, every=every)  # group 1 by all ranks, group 2 by rank 0
    rig.backward([0, 2] if rig.rank == 1 else [0])
    rig.reducer.reduce_missing()
    found["unused"] = rig.sums()
    rig.reducer.reset()
    rig.backward([2, 1, 0])
    found["after it"] = rig.sums()
    rig = Rig(stage, every=every)
    for _ in range(2):
        rig.backward([2, 1, 0], reduce=False)
    counts["launched without a reduction"] = len(rig.launched)
    rig.reducer.reduce_missing()
    found["reduced by no pass"] = rig.sums()
    return found, counts


@pytest.mark.parametrize(("stage", "every"), PAIRS)
def test_sums(ranks: Pools, stage: int, every: str) -> None:
    """Of micro-batches, of gradients that come late on all ranks or on one, of groups that no rank
    or one has not used, and of passes that reduced nothing."""
    launches = 9 if every == "micro" else 3
    for found, counts in ranks(2).run(all_sums, stage, every):
        assert {name: fits(sums, SUMS[name]) for name, sums in found.items()} == dict.fromkeys(SUMS, True), found
        assert counts == {"launches": launches, "late groups": 1, "launched without a reduction": 0}


def flying(in_flight: int, shard: int | None = None) -> int:
    """How many full gradient buffers live at most while groups complete one after the other."""
    rig = Rig(2, in_flight=in_flight, shard=shard)
    most = 0
    offer = rig.reducer.grad_ready

    def watched(grad_buffer: GradBuffer) -> None:
        nonlocal most
        offer(grad_buffer)
        most = max(most, sum(grad_buffer.live for grad_buffer in rig.grad_buffers))

    for grad_buffer in rig.grad_buffers:
        grad_buffer._on_ready = watched
    rig.backward([0, 1, 2])
    rig.reducer.reset()
    return most


@pytest.mark.parametrize(("world", "in_flight", "shard"), [(2, 0, None), (2, 2, None), (4, 0, 2)])
def test_in_flight_bounds_the_full_buffers(ranks: Pools, world: int, in_flight: int, shard: int | None) -> None:
    assert ranks(world).run(flying, in_flight, shard) == [in_flight] * world


def passed_on() -> list[str]:
    """The collectives over replica that start before backward ends."""
    rig = Rig(0, in_flight=1)
    started: list[str] = []
    start = rig.mesh.replica._start

    def watched(kind: str, *args: Any, **kwargs: Any) -> Any:
        started.append(kind)
        return start(kind, *args, **kwargs)

    rig.mesh.replica._start = watched  # type: ignore[method-assign]
    finish = rig.reducer.finish_pass
    seen: list[str] = []

    def finished() -> None:
        seen.extend(started)
        finish()

    rig.reducer.finish_pass = finished  # type: ignore[method-assign]
    rig.backward([0, 1, 2])
    return seen


def test_a_sum_goes_to_the_other_replicas_while_backward_still_runs(ranks: Pools) -> None:
    for started in ranks(2).run(passed_on):
        assert started == ["all_reduce"] * 3


def square_sums(stage: int, passes: int, replicated: bool) -> tuple[float, int, int]:
    """The sum of squares of the reduced gradient, how many elements were read for it, and how many
    the gradient has."""
    rig = Rig(stage, **({"shard": 2} if replicated else {}))
    read: list[int] = []

    def counting(values: torch.Tensor) -> torch.Tensor:
        read.append(values.numel())
        return square_sum(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "square_sum", counting)
        for _ in range(passes):
            rig.backward([2, 1, 0])
    total = torch.stack(list(rig.reducer.square_sums.values())).sum().reshape(1)
    for axis in (rig.mesh.shard, rig.mesh.replica):
        axis.all_reduce_small(total, "norm")
    return float(total), sum(read), sum(grad_buffer.group.layout.numel for grad_buffer in rig.grad_buffers)


SIZES = [66, 18000, 123]


@pytest.mark.parametrize(("stage", "world", "passes"), [(0, 2, 1), (2, 2, 1), (2, 4, 1), (0, 2, 2), (2, 4, 2)], ids=str)
def test_square_sums_are_those_of_the_whole_gradient(ranks: Pools, stage: int, world: int, passes: int) -> None:
    """Also over both axes, and of a second sum on top. Each rank reads its part once, whether that
    is a shard, or the slice of a replica that it summed up."""
    total = passes * sum(range(1, world + 1))
    expected = sum(n * (total * (index + 1.0)) ** 2 for index, n in enumerate(SIZES))
    for found, read, numel in ranks(world).run(square_sums, stage, passes, world == 4):
        assert found == pytest.approx(expected, rel=1e-6)
        if passes == 1:  # with replicas the slice for the norm, the shard in search of what is not finite
            assert read == (numel // 2 if world == 2 else numel // 4 + numel // 2)


def culprits(stage: int, every: str, bad_rank: int, position: int, value: float) -> list[tuple[int, str]]:
    """One element of one rank's gradient is ``value``."""
    rig = Rig(stage, every=every)
    rig.reducer.begin_pass()
    weight = torch.ones(200 * 90)
    if rig.rank == bad_rank:
        weight[position] = value
    torch.stack([p.sum() for p in rig.params[2]]).sum().backward()
    (rig.params[1][0] * weight.view(200, 90)).sum().backward()
    torch.stack([p.sum() for p in rig.params[0]]).sum().backward()
    rig.reducer.finish_pass()
    return list(rig.reducer.nonfinite.values())


@pytest.mark.parametrize(
    ("stage", "bad_rank", "position", "value"),
    [(0, 1, 3, float("nan")), (1, 0, 17_999, float("inf")), (2, 1, 17_999, float("nan")), (3, 0, 3, float("inf"))],
)
def test_a_bad_gradient_names_its_rank_and_its_parameter(
    ranks: Pools, stage: int, bad_rank: int, position: int, value: float
) -> None:
    found = [
        culprit for answer in ranks(2).run(culprits, stage, "auto", bad_rank, position, value) for culprit in answer
    ]
    assert found == [(bad_rank, "u1.p0")]


def test_finite_gradients_have_no_culprits(ranks: Pools) -> None:
    assert ranks(2).run(culprits, 2, "auto", 0, 0, 5.0) == [[], []]


def test_resetting_forgets_sums_and_culprits() -> None:
    rig = Rig(2)
    rig.backward([2, 1, 0])
    rig.reducer.nonfinite[0] = 0, "u0.p0"
    rig.reducer.reset()
    assert rig.reducer.nonfinite == {} and rig.reducer.square_sums == {}
    assert not any(grad_buffer.shard_filled or grad_buffer.has_gradients for grad_buffer in rig.grad_buffers)
    rig.backward([2, 1, 0])
    assert rig.sums() == [1.0, 2.0, 3.0]


def count_copies() -> list[int]:
    """Bytes of tensors that this rank copies for its peers from now on, in one entry for each."""
    found: list[int] = []
    post = SharedTransport._post

    def counted(self: SharedTransport, values: torch.Tensor, tag: int) -> Call:
        call = post(self, values, tag)
        if call.sent is not values and values.dtype != torch.float64:  # as a step's control values are
            found.append(values.nbytes)
        return call

    SharedTransport._post = counted  # type: ignore[method-assign]
    return found


def train(stage: int, wire: str, transport: str) -> tuple[int, list[float]]:
    """Bytes copied out in two steps after a first one, and the weights."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "communication_data_type": wire,
        "comm_transport": transport,
        "prescale_gradients": True,
    }
    engine, *_ = zero_trial.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    post = SharedTransport._post
    copies = count_copies()
    for step in range(3):
        loss = engine(torch.randn(2, 64, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 0:
            copies.clear()
    SharedTransport._post = post  # type: ignore[method-assign]
    written = sum(copies)
    with torch.no_grad():
        probe = engine(torch.ones(1, 64))
    return written, probe.flatten().tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_training_copies_no_gradient_out(ranks: Pools, stage: int) -> None:
    ours = ranks(2).run(train, stage, "bf16", "auto")
    by_messages = ranks(2).run(train, stage, "bf16", "gloo")
    assert [written for written, _ in ours] == [0, 0]
    assert ours[0][1] == ours[1][1] == by_messages[0][1], "the same bits on any way"
    assert ours[0][1] != ranks(2).run(train, stage, "fp32", "auto")[0][1], "the wire's dtype counts"
