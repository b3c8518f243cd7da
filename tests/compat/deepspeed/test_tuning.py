"""TRL's trainers and PEFT through the stand-in: the numbers of the same trainers under DDP."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Nursery, Pools

LIBRARIES = ("accelerate", "datasets", "peft", "transformers", "trl")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in LIBRARIES),
        reason=f"{', '.join(LIBRARIES)} are in the extra 'libraries'",
    ),
]

WITHIN = 2e-6
# Under DDP bf16 is autocast: fp32 weights are rounded to bf16 for each product. An engine's weights
# are bf16, and so is what is between the products: an element in 256 may differ by one unit of its
# eight bits, a mean over 200 tokens near 4 by about 1e-4 (measured: 4e-4 at most).
WITHIN_BF16 = 1e-3
EVERY = [None, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def pools(nursery: Nursery) -> Iterator[Pools]:
    """Start ranks for this file alone, which have the libraries."""
    pools = Pools(nursery, ["tests.compat.deepspeed.tuners"])
    yield pools
    pools.close()


def _on_rank(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module("tests.compat.deepspeed.tuners"), name)(*args, **kwargs)


@pytest.fixture
def ask(pools: Pools, tmp_path: Path) -> Callable[..., Any]:
    """Return what ``name`` of tests/compat/deepspeed/tuners.py answers, on rank 0 of two."""

    def asked(name: str, *args: Any, **kwargs: Any) -> Any:
        return pools(2).run(_on_rank, name, *args, folder=tmp_path, timeout=180, **kwargs)[0]

    return asked


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("kind", "stages"), [("SFT", EVERY), ("DPO", [None, 1, 3]), ("GRPO", [None, 2, 3])])
def test_losses_are_those_of_ddp(ask: Callable[..., Any], kind: str, stages: list[int | None]) -> None:
    """GRPO's losses are of completions that the model has sampled: other tokens, other losses."""
    plain, *found = ask("losses", kind, stages=stages)
    assert len(plain) == 6
    assert len(set(plain)) > 4
    assert all(gap(losses, plain) <= WITHIN for losses in found)
    assert all(losses == found[0] for losses in found)


def test_generation_without_gathering_the_whole_model(ask: Callable[..., Any]) -> None:
    """Blocks are gathered as they compute, and ranks that are done go on for the others."""
    plain, without = ask("losses", "GRPO", stages=[None, 3], max_steps=4, ds3_gather_for_generation=False)
    assert gap(without, plain) <= WITHIN


@pytest.mark.parametrize(("kind", "adapters"), [("SFT", True), ("DPO", False)])
def test_bf16(ask: Callable[..., Any], kind: str, adapters: bool) -> None:
    """Adapters train with a rate at which they move the losses 10 times as far as `WITHIN_BF16`."""
    rate = {"learning_rate": 3e-2} if adapters else {}
    plain, first, *others = ask(
        "losses", kind, stages=[None, 0, 2, 3], bf16=True, adapters=adapters, max_steps=8, **rate
    )
    assert first[-1] < first[0] - 10 * WITHIN_BF16
    assert gap(first, plain) <= WITHIN_BF16
    assert all(losses == first for losses in others)


def test_bf16_with_adapters_of_trainer(ask: Callable[..., Any]) -> None:
    """All of the adapters' gradients are other than zero: their first values are random."""
    plain, *found = ask("lora", stages=[None, 0, 2, 3], more={}, bf16=True, max_steps=8)
    for run in found:
        assert gap(run["losses"], plain["losses"]) <= WITHIN_BF16
        assert run["losses"] == found[0]["losses"]
        assert run["shapes"] == plain["shapes"]
        assert 20 * max(run["far"][name] for name in ("loaded", "merged", "merged here")) < run["far"]["base"]


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.extended)])
def test_the_number_of_ranks(ask: Callable[..., Any], pools: Pools, tmp_path: Path, ranks: int) -> None:
    """The same global batch, cut otherwise: one loss trace."""
    options = {"stages": [None, 0, 3], "per_device_train_batch_size": 4, "max_steps": 4}
    expected, *_ = ask("losses", "SFT", **options)
    options["per_device_train_batch_size"] = 8 // ranks
    plain, *found = pools(ranks).run(_on_rank, "losses", "SFT", folder=tmp_path, timeout=180, **options)[0]
    assert all(gap(losses, expected) <= WITHIN for losses in (plain, *found))
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize(("kind", "stages"), [("SFT", [None, 1, 3]), ("DPO", [None, 0, 3]), ("GRPO", [None, 2, 3])])
def test_trl_with_adapters(ask: Callable[..., Any], kind: str, stages: list[int | None]) -> None:
    plain, *found = ask("losses", kind, stages=stages, adapters=True, max_steps=4)
    assert all(gap(losses, plain) <= WITHIN for losses in found)
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head", "embed_tokens"]}], ids=["adapters", "modules"])
def test_saved_adapters_are_trained_further_at_stage_3(ask: Callable[..., Any], more: dict[str, Any]) -> None:
    assert ask("trained_further", more=more) == []


def test_experts_without_tokens(ask: Callable[..., Any]) -> None:
    """One expert of 16 per token, and one sample per rank: each step leaves experts out, on each
    rank others."""
    plain, *stages = ask("losses", "SFT", stages=[None, 3], family="Mixtral of 16", per_device_train_batch_size=1)
    assert all(gap(losses, plain) <= WITHIN for losses in stages)


@pytest.mark.parametrize(
    ("more", "stages"), [({}, [None, 0, 3]), ({"modules_to_save": ["lm_head", "embed_tokens"]}, EVERY)]
)
def test_adapters_are_saved_whole(ask: Callable[..., Any], more: dict[str, Any], stages: list[int | None]) -> None:
    """Loaded in plain PEFT, and merged there or here, they give the logits of the trained model."""
    plain, *found = ask("lora", stages=stages, more=more, max_steps=4)
    assert len(plain["shapes"]) == 8 + len(more.get("modules_to_save", []))
    for run in found:
        assert gap(run["losses"], plain["losses"]) <= WITHIN
        assert run["losses"] == found[0]["losses"]
        assert run["shapes"] == plain["shapes"]
        assert run["far"].pop("base") > 0.1  # so that a lost adapter would show
        assert max(run["far"].values()) <= WITHIN
