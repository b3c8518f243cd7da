"""Activation checkpointing: the same numbers as without it, less kept; saved inputs cut over
model-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.test_activation_offload import Own
from tests.support.models import TinyLM, tokens
from tests.support.pool import Pools
from zero_trial.activation_checkpointing import CHECKPOINTING, ActivationCheckpointing, HostInputs
from zero_trial.errors import ConfigError


def gradients(run: Any) -> list[torch.Tensor]:
    """Of a block's parameters and of its input, after dropout from one seed."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    x = torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_()
    torch.manual_seed(7)
    run(layers, x).square().sum().backward()
    return [x.grad, *(param.grad for param in layers.parameters())]


SECTION = {"activation_checkpointing": {"cpu_checkpointing": True}}


class Counting(HostInputs):
    """Takes tensors of the CPU for those of a device, and copies at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def moves(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.numel())

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes.append(tensor.numel())
        return torch.empty_like(tensor)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> Any:
        into.copy_(source)
        return mock.Mock()


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"checkpoint_in_cpu": True}, [40]),
        ({"deepspeed_config": SECTION}, [40]),
        ({"deepspeed_config": SECTION, "checkpoint_in_cpu": False}, []),
    ],
)
def test_cpu_checkpointing_moves_the_inputs_and_nothing_else(given: dict[str, Any], moved: list[int]):
    checkpointing = ActivationCheckpointing()
    checkpointing.host = host = Counting()
    checkpointing.configure(None, **given)
    plain = gradients(lambda layers, x: layers(x))
    again = gradients(checkpointing.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert host.sizes == moved


def test_configured_until_forgotten_and_not_only_until_reset():
    checkpointing = ActivationCheckpointing()
    assert not checkpointing.is_configured()
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.reset()
    assert checkpointing.is_configured()
    checkpointing.forget()
    assert not checkpointing.is_configured()


def test_partitioning_over_a_stranger_is_refused():
    class Mpu:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match=r"Set mesh\.model"):
        ActivationCheckpointing().configure(Mpu(), partition_activations=True)
    ActivationCheckpointing().configure(Mpu(), checkpoint_in_cpu=True)


@pytest.fixture
def shared() -> Iterator[ActivationCheckpointing]:
    """The process's object, as it was before afterwards."""
    yield CHECKPOINTING
    CHECKPOINTING.forget()


def test_an_engine_configures_it_from_its_section(shared: ActivationCheckpointing, caplog: pytest.LogCaptureFixture):
    config = {"train_batch_size": 2, "activation_checkpointing": {"partition_activations": True}}
    assert not zero_trial.checkpointing.is_configured()
    zero_trial.initialize(model=TinyLM(), config={"train_batch_size": 2})
    assert not shared.is_configured()
    zero_trial.initialize(model=TinyLM(), config=config)
    assert shared.is_configured() and "partition_activations has no effect" in caplog.text


def train(config: dict[str, Any], checkpointed: bool) -> tuple[list[float], int]:
    """Losses of three steps, and the all-gathers over the model axis."""
    torch.manual_seed(1)
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = zero_trial.initialize(model=Own() if checkpointed else TinyLM(), config=base | config)[0]
    losses = []
    try:
        for step in range(3):
            loss = engine(tokens(step, 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    finally:
        CHECKPOINTING.forget()
    return losses, engine.mesh.counters.get("all_gather", "model").calls


def test_partition_activations_over_the_model_axis(ranks: Pools):
    """Both ranks of the model axis see the same batch, as tensor-parallel ranks do; each keeps half
    of every saved input."""
    mesh = {"mesh": {"model": 2}}
    expected, none = ranks(2).run(train, mesh, False)[0]
    for partition, gathers in ((False, 0), (True, 9)):
        section = {"activation_checkpointing": {"partition_activations": partition}}
        for losses, calls in ranks(2).run(train, mesh | section, True):
            assert losses == expected
            assert calls == none + gathers  # 3 blocks in 3 steps


class SecondOfTwo:
    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return 1


def test_model_parallel_ranks_draw_other_numbers_inside_the_fork_only():
    def draws(mpu: Any) -> list[torch.Tensor]:
        checkpointing = ActivationCheckpointing()
        checkpointing.configure(mpu)
        checkpointing.model_parallel_cuda_manual_seed(11)
        tracker = checkpointing.get_cuda_rng_tracker()
        first = torch.rand(3)
        with tracker.fork():
            inside = torch.rand(3)
        with tracker.fork():
            later = torch.rand(3)
        return [first, torch.rand(3), inside, later]

    mine, other = draws(None), draws(SecondOfTwo())
    assert [torch.equal(a, b) for a, b in zip(mine, other, strict=True)] == [True, True, False, False]
    torch.manual_seed(11)
    assert torch.equal(mine[0], torch.rand(3))
    assert torch.equal(mine[1], torch.rand(3))  # the forks drew nothing from it
    torch.manual_seed(11 + 2718)
    assert torch.equal(mine[2], torch.rand(3)) and torch.equal(mine[3], torch.rand(3))


def test_the_second_run_draws_what_the_first_drew():
    checkpointing = ActivationCheckpointing()
    tracker = checkpointing.get_cuda_rng_tracker()
    drawn = []

    def block(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        with tracker.fork():
            drawn.append(torch.rand(4))
        return scale * x * drawn[-1] * x

    checkpointing.model_parallel_cuda_manual_seed(5)
    x = torch.ones(4, requires_grad=True)
    y = checkpointing.checkpoint(block, x, scale=3.0)
    with tracker.fork():
        between = torch.rand(4)
    y.sum().backward()
    assert torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(x.grad, 6.0 * drawn[0])
    with tracker.fork():
        after = torch.rand(4)
    torch.manual_seed(5 + 2718)
    expected = [torch.rand(4) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip([drawn[0], between, after], expected, strict=True))
