"""Chunked losses and tiled modules: the numbers of the plain ones at every ZeRO stage, the bytes of
the formulas, and causal models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_trial
from tests.support.dense import STAGES, TOLERANCE
from tests.support.memory_plans import memory_plan
from tests.support.models import ADAMW, Block, TinyLM, tokens
from tests.support.pool import Pools
from zero_trial import chunked_cross_entropy, long_samples, tiled
from zero_trial.errors import ConfigError, TrialError
from zero_trial.planning.live_bytes import LiveBytes


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, kwargs.pop("bias", None)).float()
    kwargs.pop("rows", None)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **kwargs)


def head(rows: int = 70, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    given = {"hidden": torch.randn(2, rows // 2, 24), "weight": torch.randn(90, 24), "bias": torch.randn(90)}
    return {name: value.to(dtype).requires_grad_() for name, value in given.items()}


def labels(rows: int = 70) -> torch.Tensor:
    found = torch.randint(0, 90, (2, rows // 2), generator=torch.Generator().manual_seed(1))
    found[0, ::3] = -100
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 5}],
    ids=["mean", "sum", "smoothing", "ignored"],
)
def test_loss_and_gradients_are_those_of_the_plain_loss(options: dict[str, Any]) -> None:
    """Also in a second backward pass through one graph, and times a factor."""
    given, wanted = head(), labels().clamp(min=0) if "ignore_index" in options else labels()
    found = []
    for loss in (plain, chunked_cross_entropy):
        value = loss(labels=wanted, rows=16, **given, **options)
        value = value / 100 if "reduction" in options else value
        gradients = [torch.autograd.grad(3 * value, list(given.values()), retain_graph=True) for _ in range(2)]
        found.append([value, *gradients[0], *gradients[1]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_whose_probability_underflows_has_its_whole_loss(smoothing: float) -> None:
    given = head()
    given["weight"] = (60 * given["weight"].detach()).requires_grad_()
    ours, theirs = (
        loss(labels=labels(), label_smoothing=smoothing, **given) for loss in (chunked_cross_entropy, plain)
    )
    assert theirs > 400
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found, wanted = (torch.autograd.grad(loss, list(given.values())) for loss in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_labels_that_are_all_ignored_leave_no_gradient() -> None:
    given = head()
    loss = chunked_cross_entropy(labels=torch.full((2, 35), -100), **given)
    loss.backward()
    assert loss.isnan() and all(not each.grad.any() for each in given.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_as_near_to_fp32_as_the_plain_loss(dtype: torch.dtype) -> None:
    """Sums over chunks are in fp32, and in fp16 a loss scale comes before rounding."""
    given, scale = head(2000, dtype), 2.0**14 if dtype is torch.float16 else 1.0
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    wanted = torch.autograd.grad(F.cross_entropy(
        F.linear(*exact.values()).flatten(0, 1), labels(2000).flatten()), list(exact.values()))  # fmt: skip
    errors = []
    for loss in (plain, chunked_cross_entropy):
        gradients = torch.autograd.grad(scale * loss(labels=labels(2000), rows=100, **given), list(given.values()))
        errors.append([(g.double() / scale - w).norm() / w.norm() for g, w in zip(gradients, wanted, strict=True)])
    assert all(ours <= 1.1 * theirs + 1e-4 for theirs, ours in zip(*errors, strict=True)), errors


def test_autocast_casts_as_it_casts_a_linear_layer() -> None:
    given = head()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (loss(labels=labels(), **given) for loss in (chunked_cross_entropy, plain))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.grad(ours, given["weight"])[0].dtype == torch.float32


def test_arguments_that_cannot_be_used_are_refused() -> None:
    given = head()
    with pytest.raises(ConfigError, match="expected mean or sum"):
        chunked_cross_entropy(labels=labels(), reduction="none", **given)
    with pytest.raises(TrialError, match="do not match"):
        chunked_cross_entropy(labels=labels().flatten(), **given)
    with pytest.raises(ConfigError, match="1 or more"):
        tiled(Block(), 0)


# --- bytes ----------------------------------------------------------------------------------------

ROWS, WIDTH, VOCABULARY = 1 << 15, 64, 128_000
PLAIN = 12 * ROWS * VOCABULARY  # bytes of the plain loss: logarithmic softmax, and two gradients of it


def most_bytes(loss: Callable[..., torch.Tensor], *, trains: bool = True) -> int:
    """Return the most bytes that a loss of 32 k tokens needs in addition to its arguments."""
    live = LiveBytes()
    with FakeTensorMode(), live:
        hidden, weight = (torch.empty(n, WIDTH, requires_grad=trains) for n in (ROWS, VOCABULARY))
        wanted = torch.empty(ROWS, dtype=torch.long)
        live.restart()
        start = live.live
        value = loss(hidden, weight, wanted)
        if trains:
            torch.autograd.grad(value, (hidden, weight))
    return live.peak - start


def test_the_bytes_of_a_loss_are_those_of_the_formula() -> None:
    dense, chunked = most_bytes(plain), most_bytes(chunked_cross_entropy)
    assert dense == pytest.approx(PLAIN, rel=0.01)
    chunk = (1 << 26) // VOCABULARY * VOCABULARY
    assert chunked == pytest.approx(4 * (chunk + VOCABULARY * WIDTH + ROWS * WIDTH), rel=0.01)
    assert chunked <= dense / 16
    assert most_bytes(chunked_cross_entropy, trains=False) == pytest.approx(4 * chunk, rel=0.01)


class LongLM(TinyLM):
    """TinyLM with everything in parts."""

    def __init__(self, blocks: int = 3, tied: bool = True) -> None:
        super().__init__(blocks, tied)
        for block in self.blocks:
            tiled(block, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return chunked_cross_entropy(self.norm(x), self.head.weight, tokens[:, 1:], rows=10)


class Sized(nn.Module):
    """An embedding, an MLP and a head, for plans."""

    def __init__(self, tiles: int, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.GELU(), nn.Linear(64 * WIDTH, WIDTH))
        self.loss = loss
        if tiles > 1:
            tiled(self.mlp, tiles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.loss(self.mlp(self.embed(tokens)), self.embed.weight, tokens)


def test_a_plan_counts_chunks_and_tiles() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}
    given = torch.zeros(1, ROWS, dtype=torch.long)
    inner = 4 * ROWS * 64 * WIDTH  # one activation inside the MLP

    def peak(tiles: int, loss: Callable[..., torch.Tensor]) -> tuple[int, int]:
        figures = memory_plan(Sized(tiles, loss), config, 2, given).figures
        assert figures.peak is not None and figures.activations is not None
        return figures.peak - figures.states, figures.activations

    assert PLAIN < peak(1, plain)[0] < 1.1 * PLAIN
    (whole, kept), (tiles, fewer) = peak(1, chunked_cross_entropy), peak(8, chunked_cross_entropy)
    assert 2 * inner < kept < whole < PLAIN / 8
    assert fewer < inner / 2 and tiles < PLAIN / 16


# --- engines --------------------------------------------------------------------------------------


def trained(model: type[TinyLM], stage: str, tied: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of four steps, the weights after them, and the all-gathers of the last step."""
    torch.manual_seed(1)
    config = {"train_batch_size": 8, "optimizer": ADAMW, "zero_optimization": STAGES[stage]}
    engine = zero_trial.initialize(model=model(tied=tied), config=config)[0]
    losses, gathers = [], 0
    for step in range(4):
        gathers = engine.mesh.counters.get("all_gather", "shard").calls
        loss = engine(tokens(step, 8)[engine.global_rank * 4 :][:4])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    gathers = engine.mesh.counters.get("all_gather", "shard").calls - gathers
    return losses, engine.module_state_dict(), gathers


@pytest.mark.parametrize(("stage", "tied"), [("zero0", True), ("zero3", True), ("zero3-free", False)])
def test_training_is_that_of_the_plain_model_and_gathers_no_more(ranks: Pools, stage: str, tied: bool) -> None:
    """A block is a tiled module itself: it is gathered once for all its tiles."""
    dense, long = (ranks(2).run(trained, model, stage, tied)[0] for model in (TinyLM, LongLM))
    torch.testing.assert_close(long[0], dense[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(long[1], dense[1], rtol=0, atol=TOLERANCE)
    assert long[2] == dense[2] and bool(dense[2]) is (stage != "zero0")


def test_a_tiled_module_returns_a_tensor_and_its_copy_is_its_own() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x

    with pytest.raises(TrialError, match="must return one tensor"):
        tiled(Pair(), 2)(torch.zeros(4, 2))
    block = tiled(tiled(Block(), 2), 3)  # the last number counts
    twin = copy.deepcopy(block)
    nn.init.zeros_(twin.down.weight), nn.init.zeros_(twin.down.bias)
    x, calls = torch.randn(2, 5, 48), []
    block.up.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(twin(x), x) and not torch.equal(block(x), x)
    assert len(calls) == 3
    torch.testing.assert_close(block(x[:, :1]), Block.forward(block, x[:, :1]))


# --- transformers ---------------------------------------------------------------------------------

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def causal(family: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra 'libraries'")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def loss_and_gradients(model: nn.Module, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    given = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(2))
    wanted = given.clone()
    wanted[0, :5] = -100
    output = model(input_ids=given, labels=wanted, **kwargs)
    found = (output.loss, *torch.autograd.grad(output.loss, list(model.parameters())))
    torch.testing.assert_close(output.logits.shape[1], 0 if "function" not in str(model.loss_function) else 17)
    return found


@pytest.mark.parametrize(
    ("family", "tiles", "options"),
    [("Llama", 3, {}), ("Qwen2", 4, {"tie_word_embeddings": True}), ("Mistral", 3, {}), ("Mixtral", 1, {"output_router_logits": True})],
)  # fmt: skip
def test_a_causal_model_through_one_call(family: str, tiles: int, options: dict[str, Any]) -> None:
    model = causal(family, **options)
    long = long_samples(copy.deepcopy(model), tiles)
    for kwargs in ({}, {"num_items_in_batch": torch.tensor(20)}):
        ours, theirs = loss_and_gradients(long, **kwargs), loss_and_gradients(model, **kwargs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert set(long.state_dict()) == set(model.state_dict())
    given = torch.arange(12).view(1, 12)
    torch.testing.assert_close(long(input_ids=given).logits, model(input_ids=given).logits)


def test_what_cannot_be_computed_in_parts_is_refused() -> None:
    given = torch.arange(12).view(1, 12)
    with pytest.raises(ConfigError, match="no loss that can be computed in chunks"):
        long_samples(TinyLM())
    with pytest.raises(ConfigError, match="no MLPs that can be tiled"):
        long_samples(causal("Mixtral"))
    with pytest.raises(ConfigError, match="changes its logits before the loss"):
        long_samples(causal("Gemma2"))(input_ids=given, labels=given)
    model = long_samples(causal("Llama"))
    model.set_output_embeddings(nn.Linear(32, 96))
    with pytest.raises(ConfigError, match="the head was replaced"):
        model(input_ids=given, labels=given)
