"""Saved inputs of checkpointed layers on the host: the bits of training without them, no copy that
an event does not order, and bytes by formula, on the stand-in device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import zero_trial
from tests.support.dense import STAGES
from tests.support.device import device
from tests.support.memory_plans import memory_plan
from tests.support.models import ADAMW, TinyLM, tokens
from tests.support.pool import Pools
from zero_trial.activation_checkpointing import CHECKPOINTING, HostInputs, offload_checkpoints
from zero_trial.planning.pass_trace import PlannedInputs

BLOCKS = 8
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}


class Own(TinyLM):
    """Calls zero_trial's checkpoint function."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return zero_trial.checkpointing.checkpoint(block, x)


class Library(Own):
    """Has its checkpoint function where transformers puts it."""

    def __init__(self, blocks: int = BLOCKS, reentrant: bool = False) -> None:
        super().__init__(blocks)
        self._gradient_checkpointing_func: Callable[..., Any] = partial(checkpoint, use_reentrant=reentrant)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._gradient_checkpointing_func(block, x)


def wrapped() -> nn.Module:
    """A model whose blocks are in torch's CheckpointWrapper."""
    model = TinyLM(BLOCKS)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: Own(BLOCKS),
    "reentrant": lambda: Library(reentrant=True),
    "not reentrant": Library,
    "wrapper": wrapped,
    "enabled later": lambda: Library(reentrant=True),
}


def train(name: str, stage: str, on_host: bool, order: str = "late", accumulation: int = 1) -> dict[str, Any]:
    """Losses, weights, the peak of the last step, and its copies of inputs."""
    here = device.use()
    here.scheduler.order = order
    torch.manual_seed(1)
    config = {"train_batch_size": 8 * accumulation, "optimizer": ADAMW, "zero_optimization": STAGES[stage]}
    config |= {"gradient_accumulation_steps": accumulation, "comm_transport": "gloo"} | (ON_HOST if on_host else {})
    engine = zero_trial.initialize(model=MODELS[name](), config=config)[0]
    if name == "enabled later":  # as by transformers' gradient_checkpointing_disable() and _enable()
        engine.module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    losses = []
    try:
        for step in range(3):
            torch.standin.synchronize()
            here.scheduler.reset()
            here.library.standin_reset_peak()
            before = here.live
            for _ in range(accumulation):
                batch = tokens(step, 8)[engine.global_rank * 4 :][:4].to(engine.device)
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            peak, copies = here.peak - before, here.copies()
    finally:
        CHECKPOINTING.forget()
        here.scheduler.order = "late"
    inputs = [each for each in copies if each[1] == INPUT]
    state = {key: value.cpu() for key, value in engine.module_state_dict().items()}
    engine.destroy()
    return {"losses": losses, "state": state, "peak": peak, "copies": inputs}


INPUT = 4 * 8 * 48 * 4  # bytes of a block's input: rows, tokens, features


def both(name: str, stage: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(name, stage, False, **more), train(name, stage, True, **more)


@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [
        ("own", "zero0", {}),
        ("reentrant", "zero3", {"order": "random"}),
        ("not reentrant", "zero3-free", {"order": "early", "accumulation": 2}),
        ("wrapper", "zero2", {}),
        ("enabled later", "zero2", {}),
    ],
)
def test_the_same_bits_with_inputs_on_the_host(devices: Pools, name: str, stage: str, more: dict[str, Any]) -> None:
    for without, there in devices(2).run(both, name, stage, **more):
        assert there["losses"] == without["losses"]
        assert all(torch.equal(value, without["state"][key]) for key, value in there["state"].items())
        turns = more.get("accumulation", 1)
        down = [others for where, _, others in there["copies"] if where == "to the host"]
        up = [others for where, _, others in there["copies"] if where == "to the device"]
        assert not without["copies"]
        # the last two have not left when backward begins
        assert all(down) and all(up)  # the device computes while a copy is under way
        assert (len(down), len(up)) == (BLOCKS * turns, (BLOCKS - HostInputs.AT_ONCE) * turns)


ROWS, WIDTH = 4096, 16


def peaks(reentrant: bool, count: int) -> list[int]:
    """The most bytes that a device holds in addition to weights and gradients, without and with its
    inputs on the host."""
    here, found = device.use(), []
    host = HostInputs()
    for on_host in (False, True):
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)).to("standin")
        for layer in layers:
            vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=reentrant)
        offload_checkpoints(layers, everywhere=on_host)
        for _ in range(2):  # gradients have memory from the first pass on
            x = torch.ones(ROWS, WIDTH).to("standin").requires_grad_()
            torch.standin.synchronize()
            here.library.standin_reset_peak()
            before = here.live
            with CHECKPOINTING.planning(host, on_host=False):
                for layer in layers:
                    x = vars(layer)["_gradient_checkpointing_func"](layer, x)
                x.sum().backward()
            del x
        torch.standin.synchronize()
        found.append(here.peak - before)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_device_holds_a_few_inputs_whatever_the_depth(devices: Pools, reentrant: bool) -> None:
    """Two that leave, two that come back, the block's own, and its gradients."""
    one = 4 * ROWS * WIDTH
    for count in (8, 16):
        without, there = devices(2).run(peaks, reentrant, count)[0]
        assert without == pytest.approx((count + 1 + reentrant) * one, rel=0.01)
        assert there == pytest.approx((6 + reentrant) * one, rel=0.01)


@pytest.mark.parametrize("build", [Own, Library])
def test_a_plan_shows_the_bytes_on_the_host(build: type[Own]) -> None:
    """Of inputs of all blocks, less on the device; where ranks compute on the CPU, none."""
    rows, given = 4096, torch.zeros(4096, 9, dtype=torch.long)
    one = 4 * rows * 8 * 48
    config = {"train_micro_batch_size_per_gpu": rows, "optimizer": ADAMW, "zero_optimization": {"stage": 1}}

    def plan(blocks: int, more: dict[str, Any], kind: str = "cuda") -> Any:
        return memory_plan(build(blocks), config | more, 2, given, device=kind)

    without, there = plan(BLOCKS, {}), plan(BLOCKS, ON_HOST)
    assert (without.figures.host, there.figures.host) == (0, BLOCKS * one)
    assert "host memory" in there.table()
    assert without.figures.activations - there.figures.activations == BLOCKS * one
    deeper = plan(2 * BLOCKS, ON_HOST)
    more = deeper.figures.peak - deeper.figures.states - (there.figures.peak - there.figures.states)
    assert abs(more) < one / 2 and there.figures.peak < without.figures.peak
    here = [plan(BLOCKS, config, "cpu").figures for config in ({}, ON_HOST)]
    assert here[0] == here[1] and not here[1].host


def test_the_copies_of_transformers_go_to_the_other_stream() -> None:
    """``offload=True`` of gradient_checkpointing_kwargs, in whichever variant."""
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra 'libraries'")
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).train()
    given = torch.arange(24).view(2, 12)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=given, labels=given).loss.backward()
        return [param.grad for param in model.parameters()]

    plain, host = gradients(), PlannedInputs()
    if "offload" not in inspect.signature(model.activation_checkpointing_enable).parameters:
        pytest.skip("this version of transformers has no offload")
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant}, offload=True)
        offload_checkpoints(model, everywhere=False)
        host.most = 0
        with CHECKPOINTING.planning(host, on_host=False):
            model(input_ids=given, labels=given)
        assert host.most == 2 * 4 * given.numel() * 32
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
