"""What user code does to an engine's model besides training it: reads, edits, saves, loads, calls
parts of it, and trains on as plain torch would."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, adamw, build_engine, difference, train_dense
from tests.support.pool import Pools
from zero_trial import PipelineModule, zero
from zero_trial.errors import TrialError

WIDTH = 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("shift", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + self.shift


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(4, 5)).square().mean()


def stale(stage: str, client: bool) -> str:
    """A graph of before a step goes backward after it."""
    options = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)} if client else {}
    engine = build_engine(Case(Net, loss), STAGES[stage], **options)
    first, second = (loss(engine, Turn(step, 0, 0)) for step in range(2))
    engine.backward(first)
    engine.step()
    try:
        engine.backward(second)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(("stage", "client"), [("zero0", True), ("zero3", False)])
def test_a_graph_that_needs_weights_of_before_a_step_is_torchs_error(ranks: Pools, stage: str, client: bool) -> None:
    for text in ranks(2).run(stale, stage, client):
        assert "modified by an inplace operation" in text


LOSS_TERMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a view of a weight": lambda block, output: (block[2].weight.t() ** 2).sum(),
    "a weight": lambda block, output: (block[0].weight ** 2).sum(),
    "an output of a part, alone": lambda block, output: output.sum(),
}


def loss_beside(term: str) -> str:
    """A hook keeps a loss term where the engine does not see it."""
    engine = build_engine(Case(Net, loss), STAGES["zero3-free"])
    block, terms = engine.module.blocks[1], []
    alone = "alone" in term
    block[1 if alone else 2].register_forward_hook(
        lambda _, args, output: terms.append(LOSS_TERMS[term](block, output))
    )
    main = loss(engine, Turn(0, 0, 0))
    with pytest.raises(RuntimeError) as raised:
        engine.backward(terms[0] if alone else terms[0] + main)
    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("term", LOSS_TERMS)
def test_a_loss_term_that_needs_freed_weights_is_an_error(ranks: Pools, term: str) -> None:
    for notes in ranks(2).run(loss_beside, term):
        assert "returned by the block's forward" in notes


def masters_kept() -> None:
    """bf16: an edit of some elements, or loading a part, leaves the fp32 bits of all others as they
    are."""
    engine = build_engine(Case(Net, loss, config={"bf16": {"enabled": True}}), STAGES["zero3"])
    named = dict(engine.module.named_parameters())
    before = {name: zero.safe_get_full_fp32_param(param) for name, param in named.items()}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=1), torch.no_grad():
        named["head.weight"][0] = 2.0
    before["head.weight"][0] = 2.0
    engine.module.blocks[0][0].load_state_dict({"weight": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH)})
    before["blocks.0.0.weight"].fill_(1.0)
    before["blocks.0.0.bias"].fill_(1.0)
    for name, param in named.items():
        torch.testing.assert_close(zero.safe_get_full_fp32_param(param), before[name], rtol=0, atol=0)


def test_edits_keep_the_other_masters_bits(ranks: Pools) -> None:
    ranks(2).run(masters_kept)


def destroyed(stage: str, rank0_only: bool) -> tuple[str, float]:
    """What a use of the module raises on this rank after destroy(), and how far a new engine is
    from dense training."""
    engine = build_engine(Case(Net, loss), STAGES[stage])
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    engine.step()
    module, words = engine.module, ""
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for _ in range(2):
        engine.destroy(rank0_only=rank0_only)
    del engine
    try:  # the module is plain
        loss(module, Turn(1, 0, 0)).backward()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(param.grad is not None and torch.isfinite(param.grad).all() for param in module.parameters())
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        module.zero_grad()
        module.load_state_dict(before)
    except TrialError as error:
        words = str(error)
    again = build_engine(Case(lambda: module, loss), STAGES["zero3"])
    again.backward(loss(again, Turn(1, 0, again.global_rank)))
    again.step()
    plain = Net()
    plain.load_state_dict(before)
    for rank in range(2):
        (loss(plain, Turn(1, 0, rank)) / 2).backward()
    adamw(plain.parameters()).step()
    return words, difference(again, plain)


@pytest.mark.parametrize(
    ("stage", "rank0_only"), [("zero0", True), ("zero2", False), ("zero3", True), ("zero3-free", False)]
)
def test_a_destroyed_engine_leaves_a_plain_module(ranks: Pools, stage: str, rank0_only: bool) -> None:
    """At stage 3 on rank 0 alone, unless all ranks are to have it."""
    frees = stage.startswith("zero3")
    for rank, (words, gap) in enumerate(ranks(2).run(destroyed, stage, rank0_only)):
        assert gap <= TOLERANCE
        assert ("destroy(rank0_only=False)" in words) == (frees and rank0_only and rank > 0), words


def unsynced(stage: str) -> tuple[float, int, int]:
    """Three backward passes, of which only the last talks; (difference, elements reduced inside
    no_sync, outside)."""
    case = Case(Net, loss, accumulation=3)
    engine = build_engine(case, STAGES[stage])
    axis = "shard" if engine.mesh.shard.size > 1 else "replica"

    def reduced() -> int:
        return sum(engine.mesh.counters.get(kind, axis).elements for kind in ("reduce_scatter", "all_reduce"))

    dense, inside, outside = train_dense(case, 2), 0, 0
    for step in range(4):
        for number in range(3):
            before = reduced()
            with engine.no_sync() if number < 2 else contextlib.nullcontext():
                engine.backward(loss(engine, Turn(step, number, engine.global_rank)))
            spent = reduced() - before
            inside, outside = (inside + spent, outside) if number < 2 else (inside, outside + spent)
            engine.step()
        reference = next(dense)
    return difference(engine, reference), inside, outside


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_no_sync_only_accumulates(ranks: Pools, stage: str) -> None:
    for gap, inside, outside in ranks(2).run(unsynced, stage):
        assert gap <= TOLERANCE and inside == 0 and outside > 0


# ``aot_eager`` needs no compiler on the machine and traces the same graphs.


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A frame outside of torch, which torch.compile traces."""
        return super().forward(x)


class BlockNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(*block) for block in self.blocks])


def compiled(stage: str, form: str) -> tuple[float, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    section = {"enabled": form == "config", "backend": "aot_eager", "kwargs": {"dynamic": False}}

    engine = build_engine(Case(BlockNet, loss, config={"compile": section}), STAGES[stage])
    called = torch.compile(engine, backend="aot_eager") if form == "around the engine" else engine
    for step in range(3):
        engine.backward(loss(called, Turn(step, 0, engine.global_rank)))
        engine.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    reference = list(train_dense(Case(BlockNet, loss, steps=3), 2))[-1]
    state = {name.replace("_orig_mod.", ""): value for name, value in engine.module_state_dict().items()}
    engine.destroy()
    gaps = [(state[name] - value).abs().max().item() for name, value in reference.state_dict().items()]
    return max(gaps), graphs


@pytest.mark.parametrize(("stage", "form"), [("zero2", "config"), ("zero3-free", "around the engine")])
def test_compiled_models_train_alike(ranks: Pools, stage: str, form: str) -> None:
    """Other forms, at every stage: tests/exactness."""
    for gap, graphs in ranks(2).run(compiled, stage, form):
        assert gap <= TOLERANCE and graphs >= 1


def pipeline_losses(schedule: str, compiled: bool) -> list[float]:
    torch._dynamo.reset()
    layers = [*(Block(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), Block(nn.Linear(WIDTH, 3))]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), seed_layers=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "pipeline": {"schedule": schedule},
        "compile": {"enabled": compiled, "backend": "aot_eager", "kwargs": {"fullgraph": True}},
    }
    engine = zero_trial.initialize(model=model, config=config)[0]
    batches = [(Turn(step, 0, 0).normal(2, WIDTH), torch.tensor([0, 2])) for step in range(6)]
    data = iter(batches)
    return [engine.train_batch(data).item() for _ in range(2)]


def test_a_compiled_pipeline_trains_alike(ranks: Pools) -> None:
    compiled, plain = (ranks(2).run(pipeline_losses, "1f1b", value) for value in (True, False))
    for own, expected in zip(compiled, plain, strict=True):
        assert own == pytest.approx(expected, rel=1e-6)
