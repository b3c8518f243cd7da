"""Models of every shape that users bring, trained by an engine at every ZeRO stage and by plain
torch: the same parameters come out.

Two ranks, fp32, a few AdamW steps. Tolerance 2e-6, as in the oracle: only the order of sums
differs.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.dense import STAGES, TOLERANCE, Case, Turn, compare
from tests.support.pool import Pools

WIDTH = 12


class Mix(nn.Module):
    """A block whose every parameter gets a gradient that is not zero in theory."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Mix() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def plain_loss(model: Any, turn: Turn) -> torch.Tensor:
    return model(turn.normal(4, 5)).square().mean()


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups; biases of all blocks in one without decay, the head with its own lr."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [p for n, p in named if n.startswith("head")], "lr": 5e-3},
        {"params": [p for n, p in named if not n.startswith("head") and n.endswith("bias")], "weight_decay": 0.0},
        {
            "params": [p for n, p in named if not n.startswith("head") and not n.endswith("bias")],
            "lr": 2e-3,
            "weight_decay": 0.3,
        },
    ]


def frozen_front() -> nn.Module:
    """Two frozen blocks in front of the trainable ones: no gradient ever enters them."""
    model = Stack(4)
    for frozen in (model.embed, model.blocks[0], model.blocks[1]):
        frozen.requires_grad_(False)
    return model


def frozen_middle() -> nn.Module:
    """A frozen block that gradients must pass through, and a half frozen one."""
    model = Stack(4)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


class Adapted(nn.Module):
    """LoRA: a frozen weight and a trainable product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + F.linear(F.linear(x, self.a), self.b))


class LoraRepeated(Stack):
    """Blocks with frozen parameters whose output is their own next input, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted() for _ in range(3)])
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[:2]:
            x = block(block(block(x)))
        return self.head(x)


class Spare(Stack):
    """``spare`` and one block are never used; ``sometimes`` on rank 1 only, in odd steps; ``rare``
    in the first step on rank 0."""

    def __init__(self) -> None:
        super().__init__(2)
        self.spare = nn.Linear(7, 7)
        self.never = nn.ModuleList([Mix(), Mix()])
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, turn: Turn | None = None) -> torch.Tensor:
        x = self.embed(x)
        if turn is not None and turn.rank == 1 and turn.step % 2:
            x = x + self.sometimes(x)
        if turn is not None and turn.rank == 0 and turn.step == 0:
            x = x * self.rare
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(Stack):
    """Weights shared between embedding and head, between two blocks, and one block that stands in
    the list twice."""

    def __init__(self) -> None:
        super().__init__(3)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks.append(self.blocks[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, WIDTH - 5)))


class Sizes(Stack):
    """Empty, scalar, one-element and huge parameters (three buckets' worth), between ordinary ones;
    blocks without any parameter."""

    def __init__(self) -> None:
        super().__init__(2)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.one = nn.Parameter(torch.tensor([0.2]))
        self.huge = nn.Linear(WIDTH, 800)
        self.back = nn.Linear(800, WIDTH)
        self.blocks[0].register_parameter("nothing", nn.Parameter(torch.zeros(3, 0)))
        self.blocks.extend([nn.Identity(), nn.Tanh()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale + self.one + self.empty.sum()
        x = x + self.back(torch.tanh(self.huge(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OtherOrder(Stack):
    """The order of blocks changes with every step, alike on all ranks; some are left out."""

    ORDERS = ((0, 1, 2), (0, 1, 2), (2, 0, 1), (1,), (1, 2, 2), (0, 1, 2))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.embed(x)
        for index in self.ORDERS[step]:
            x = self.blocks[index](x)
        return self.head(x)


class Recomputed(Stack):
    """torch.utils.checkpoint around each block, or around two at once."""

    def __init__(self, reentrant: bool, pairs: bool = False) -> None:
        super().__init__(4)
        self.reentrant, self.pairs = reentrant, pairs

    def two(self, first: int, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[first + 1](self.blocks[first](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in range(0, 4, 2 if self.pairs else 1):
            part = (lambda x, index=index: self.two(index, x)) if self.pairs else self.blocks[index]
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedShared(Stack):
    """Reentrant checkpointing runs one backward per segment: a weight used in several segments gets
    several gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in (0, 1, 0, 1, 0):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return self.head(x)


Pair = namedtuple("Pair", ["x", "extra"])


@dataclass
class Out:
    x: torch.Tensor
    extra: Any = None


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wrapping(Mix):
    """A block that returns its output in the given wrapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return {
            "tuple": (x, None, 3),
            "nested": ([{"deep": (x,)}], "text"),
            "dict": {"x": x, "none": None},
            "dataclass": Out(x, [x.detach()]),
            "namedtuple": Pair(x, {"n": 1}),
            "object": Opaque(x),
            "list of objects": [Opaque(x)],
        }[self.kind]


def unwrap(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value["x"] if isinstance(value, dict) and "x" in value else value
        value = value["deep"] if isinstance(value, dict) else value
        value = value[0] if isinstance(value, (tuple, list)) else getattr(value, "x", value)
    return value


class Wrapped(Stack):
    def __init__(self) -> None:
        super().__init__()
        kinds = ["tuple", "nested", "dict", "dataclass", "namedtuple", "object", "list of objects"]
        self.blocks = nn.ModuleList([Wrapping(kind) for kind in kinds])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = unwrap(block(x))
        return {"logits": self.head(x), "nothing": None, "parts": Out(x)}


class Auxiliary(Mix):
    """Leaves a loss of its own on an attribute, as routers do; with ``only`` that is the block's
    only differentiable result."""

    def __init__(self, only: bool = False) -> None:
        super().__init__()
        self.only = only
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = [y.square().mean()] if self.only else y.square().mean()
        return x.detach() + y.detach() if self.only else y


class WithAuxiliary(Stack):
    def __init__(self, only: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Auxiliary(only and index == 1) for index in range(3)])


def loss_with_auxiliary(model: Any, turn: Turn) -> torch.Tensor:
    main = plain_loss(model, turn)
    for block in getattr(model, "module", model).blocks:
        main = main + 0.1 * (block.aux[0] if isinstance(block.aux, list) else block.aux)
    return main


class Attention(nn.Module):
    """torch's own encoder layers: a weight of an inner module is used by the outer module's
    function."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for block in self.encoder.layers:  # the key bias has no gradient in theory
            block.self_attn.in_proj_bias.requires_grad_(False)
        self.table = nn.Embedding(11, 8, padding_idx=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.table(tokens)) @ self.table.weight.T


def token_loss(model: Any, turn: Turn) -> torch.Tensor:
    tokens = (turn.normal(3, 4).abs() * 5).long() % 11
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Sparse(nn.Module):
    """Embeddings whose gradients come as sparse tensors, one small, one large; one is used
    twice."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Embedding(11, 8, sparse=True)
        self.large = nn.Embedding(2100, 8, sparse=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.small(tokens)) + self.large(tokens * 7) + self.large(tokens * 190))


def penalty_loss(model: Any, turn: Turn) -> torch.Tensor:
    """A gradient penalty: the gradient of an output by the input enters the loss, so autograd goes
    through the model three times."""
    x = turn.normal(4, 5).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().mean() + model(x).square().mean()


def evaluate(model: Any, turn: Turn) -> None:
    """After every micro-batch: under no_grad and inference_mode, in eval mode, and a forward with
    gradients that is never taken back."""
    model.eval()
    with torch.no_grad():
        plain_loss(model, turn)
    with torch.inference_mode():
        plain_loss(model, turn)
    model.train()
    plain_loss(model, turn)


def loss_by_parts(model: Any, turn: Turn) -> torch.Tensor:
    """The loss never goes through the module's own forward."""
    inner = getattr(model, "module", model)
    return inner.head(inner.features(turn.normal(4, 5))).square().mean()


def use_parts(model: Any, turn: Turn) -> None:
    """A method of the module, and inner modules by themselves."""
    with torch.no_grad():
        features = model.features(turn.normal(2, 5))
        assert all(torch.isfinite(part(features)).all() for part in (model.head, model.blocks[0]))


SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


CASES: dict[str, Case] = {
    "groups clipped": Case(Stack, plain_loss, groups=by_kind, clip=0.1, accumulation=2),
    "unused clipped": Case(Spare, lambda m, t: m(t.normal(4, 5), t).square().mean(), clip=0.1, accumulation=2),
    "frozen front": Case(frozen_front, plain_loss),
    "frozen middle": Case(frozen_middle, plain_loss, groups=by_kind),
    "lora repeated": Case(LoraRepeated, plain_loss, accumulation=2),
    "tied in groups": Case(Tied, plain_loss, groups=by_kind, accumulation=2),
    "sizes": Case(Sizes, plain_loss, groups=by_kind),
    "other order": Case(OtherOrder, lambda m, t: m(t.normal(4, 5), t.step).square().mean(), steps=6),
    "checkpoint": Case(lambda: Recomputed(False), plain_loss, accumulation=2),
    "checkpoint reentrant pairs": Case(lambda: Recomputed(True, pairs=True), plain_loss),
    "checkpoint reentrant shared": Case(RecomputedShared, plain_loss, accumulation=2),
    "outputs": Case(Wrapped, lambda m, t: m(t.normal(4, 5))["logits"].square().mean()),
    "auxiliary loss": Case(WithAuxiliary, loss_with_auxiliary),
    "auxiliary loss only": Case(lambda: WithAuxiliary(only=True), loss_with_auxiliary),
    "attention": Case(Attention, token_loss),
    "sparse gradients": Case(Sparse, token_loss, accumulation=2),
    "gradient penalty": Case(Stack, penalty_loss, optimizer=SGD, dense_optimizer=sgd),
    "evaluation between": Case(Stack, plain_loss, accumulation=2, between=evaluate),
    "parts of the model": Case(Stack, loss_by_parts, accumulation=2, between=use_parts),
}


def train(case: str, stage: str) -> float:
    return compare(CASES[case], STAGES[stage])


NOTHING_KEPT = {"stage": 3, "param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
AGAIN = [
    *("tied in groups", "checkpoint reentrant shared", "auxiliary loss", "gradient penalty", "lora repeated"),
    "other order",  # here neighbours are put together
]


def train_all(cases: list[str], zero: dict[str, Any]) -> dict[str, float]:
    return {case: compare(CASES[case], zero) for case in cases}


def test_limits_of_zero_free_what_a_later_backward_gathers_again(ranks: Pools) -> None:
    for gaps in ranks(2).run(train_all, AGAIN, NOTHING_KEPT):
        assert max(gaps.values()) <= TOLERANCE, gaps


# Each where everything is freed, and at one other stage.
PLACES = [(case, ("zero0", "zero2", "zero3")[row % 3]) for row, case in enumerate(CASES)]


@pytest.mark.parametrize(("case", "stage"), [*((case, "zero3-free") for case in CASES), *PLACES])
def test_trains_as_plain_torch_does(ranks: Pools, case: str, stage: str) -> None:
    for gap in ranks(2).run(train, case, stage):
        assert gap <= TOLERANCE
