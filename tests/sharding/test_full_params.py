"""Full values of sharded parameters for user code: GatheredParameters and the safe_get functions.

Values that these return and set: tests/engine/test_user_actions.py, against dense training.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM, make_engine, tokens, train_engine
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.sharding.guards.edits import KeptViews
from zero_trial.sharding.guards.freed import FreedParameter
from zero_trial.zero import (
    GatheredParameters,
    unwrap_model_for_generation,
)

FREE: dict[str, Any] = {
    "stage": 3,
    "param_persistence_threshold": 0,
    "reshard_after": "forward",
    "module_granularity_threshold": 1,
}


def read() -> list[bool]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    torch.manual_seed(1)
    plain = TinyLM()
    weight, expected = engine.module.blocks[1].up.weight, plain.blocks[1].up.weight
    out = [isinstance(weight, FreedParameter)]
    with GatheredParameters(weight):
        out.append(torch.equal(weight, expected))
    out.append(isinstance(weight, FreedParameter))
    with GatheredParameters(engine.module.blocks[1].parameters()):
        out += [
            torch.equal(p, q)
            for p, q in zip(engine.module.blocks[1].parameters(), plain.blocks[1].parameters(), strict=True)
        ]
    with GatheredParameters(engine.module), GatheredParameters(weight):
        out.append(all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)))
    with contextlib.suppress(KeyError), GatheredParameters(weight), GatheredParameters(plain, modifier_rank=0):
        raise KeyError("inside")
    out.append(isinstance(weight, FreedParameter))
    with GatheredParameters(weight, enabled=False), GatheredParameters(None, enabled=False):  # type: ignore[arg-type]
        out.append(isinstance(weight, FreedParameter))
    stranger = nn.Parameter(torch.ones(2))
    with (
        GatheredParameters([weight, None, weight, stranger]),
        GatheredParameters([], modifier_rank=0, fwd_module=plain),
    ):
        out += [torch.equal(weight, expected), torch.equal(stranger, torch.ones(2))]
    for model in (engine, engine.module):
        with unwrap_model_for_generation(model) as unwrapped:
            out += [unwrapped is model, torch.equal(weight, expected)]
    out.append(isinstance(weight, FreedParameter))
    return out


def test_inside_the_block_parameters_are_whole(ranks: Pools) -> None:
    for answers in ranks(2).run(read):
        assert all(answers)


class LooksAtItself(nn.Module):
    """Gathers its own, live, weights in the middle of its forward, as weight normalisation or a
    penalty may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with GatheredParameters([self.inner.embed.weight, self.inner.blocks[0].up.weight]):
            self.seen = self.inner.embed.weight.detach().norm().item()
        out: torch.Tensor = self.inner(batch)
        with GatheredParameters(self.inner.parameters()):
            pass
        return out


def train_on(build: type[nn.Module]) -> list[float]:
    return train_engine(make_engine(build, {"zero_optimization": FREE}), range(2))


def test_in_the_middle_of_a_forward(ranks: Pools) -> None:
    """What was live before is live afterwards."""
    assert ranks(2).run(train_on, LooksAtItself) == ranks(2).run(train_on, TinyLM)


def around_a_step(zero: dict[str, Any]) -> list[float]:
    """A penalty on all weights, computed by user code outside any forward: the block spans forward
    and backward."""
    engine = make_engine(TinyLM, {"zero_optimization": zero})
    losses = []
    for step in range(3):
        with GatheredParameters(engine.module):
            loss = engine(tokens(step, 4)[2 * engine.global_rank :][:2])
            loss = loss + 1e-2 * sum(param.square().sum() for param in engine.module.parameters())
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_around_forward_and_backward(ranks: Pools) -> None:
    """What user code holds open is not freed by the blocks' own coming and going."""
    assert ranks(2).run(around_a_step, FREE) == ranks(2).run(around_a_step, {"stage": 1})


def step_inside() -> list[Any]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    weight = engine.module.blocks[0].up.weight
    with GatheredParameters(weight):
        train_engine(engine, range(1))
        stale = isinstance(weight, FreedParameter)
    try:
        with GatheredParameters(weight, modifier_rank=0):
            train_engine(engine, range(1))
        message = "accepted"
    except TrialError as error:
        message = str(error)
    train_engine(engine, range(1))
    return [stale, message]


def test_a_step_inside_leaves_no_stale_values(ranks: Pools) -> None:
    for stale, message in ranks(2).run(step_inside):
        assert stale and "Exit the block before engine.step()" in message


def kept_views(keep: str) -> tuple[bool, int]:
    """Keep views of parameters for the rest of two steps, and compare; also what is then live."""
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    train_engine(engine, range(1))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def view(module: nn.Module, *_: Any) -> None:
        value = module.weight.T if keep == "graph" else module.weight.detach()[1:].cpu()  # no copy on a CPU
        kept.append((value, value.detach().clone()))

    block = engine.module.blocks[1]
    if keep in ("forward", "graph", "no_grad"):
        block.up.register_forward_hook(view)
    elif keep == "backward":
        block.up.weight.register_hook(lambda grad: view(block.up))
    else:
        with GatheredParameters(engine.module, modifier_rank=0 if keep == "edit" else None):
            view(block.up)
    for step in range(1, 3):
        with torch.set_grad_enabled(keep != "no_grad"):
            engine(tokens(step, 4))
        same = all(torch.equal(*pair) for pair in kept)
        train_engine(engine, range(step, step + 1))
    return bool(kept) and same and all(torch.equal(*pair) for pair in kept), engine.sharded.unsharder.live_numel()


@pytest.mark.parametrize("keep", ["forward", "graph", "no_grad", "backward", "read", "edit"])
def test_views_that_user_code_keeps_have_their_values(ranks: Pools, keep: str) -> None:
    assert ranks(2).run(kept_views, keep) == [(True, 0)] * 2


def looks_for_views() -> int:
    """Count the looks at all objects of the process in steps like the first two."""
    engine, looks = make_engine(TinyLM, {"zero_optimization": FREE, "gradient_accumulation_steps": 2}), []
    train_engine(engine, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptViews, "_found", looks.append)
        train_engine(engine, range(2, 4))
    return len(looks)


def test_views_are_looked_for_in_the_first_steps_only(ranks: Pools) -> None:
    assert ranks(2).run(looks_for_views) == [0, 0]


def kept_by_autograd(stage: int, folder: str) -> int:
    """Count the bytes of blocks that stay between forward and backward, though a file has them."""
    away = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    zero = FREE | {"stage": stage, "reshard_after": "forward", "offload_param": away}
    engine = make_engine(TinyLM, {"zero_optimization": zero})
    memory = [group.full.untyped_storage() for group in engine.sharded.groups if group.block]
    loss = engine(tokens(0, 4)).sum()
    kept = sum(storage.nbytes() for storage in memory)
    engine.backward(loss)
    engine.destroy()
    return kept


@pytest.mark.parametrize("stage", [0, 3])
def test_offloaded_parameters_leave_memory_after_a_forward(ranks: Pools, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(kept_by_autograd, stage, str(tmp_path)) == [0, 0]
