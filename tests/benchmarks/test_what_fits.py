"""The page that says what fits where: its figures are those of plans, and it is up to date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.what_fits import RANKS, SHAPES, WAYS, Llama, Shape, page, settings_of, state_bytes
from tests.support.memory_plans import memory_plan

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "what_fits_where.md"
SMALL = Shape(2, 256, 704, 4, 2, 1000)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")


@no_gpu
@pytest.mark.parametrize(
    ("way", "ranks"), [("0", 8), ("1", 64), ("2", 8), ("3", 1), ("3", 64), ("3 + O", 8), ("3 + O", 512)]
)
def test_states_are_those_of_a_plan_to_the_byte(way: str, ranks: int) -> None:
    model, words = Llama(SMALL), torch.zeros(1, 32, dtype=torch.long)
    plan = memory_plan(model, settings_of(way), ranks, words, device="cuda")
    assert plan.how == "fake tensors on the CPU"
    assert state_bytes(model, way, ranks) == plan.figures.states


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_is_as_large_as_its_name(name: str) -> None:
    """Within a twentieth; a layer more adds what the second has."""
    number, unit = name.split()
    shape, named = SHAPES[name], float(number) * {"B": 1e9, "T": 1e12}[unit]
    one, two = (sum(p.numel() for p in Llama(replace(shape, layers=n)).parameters()) for n in (1, 2))
    assert one + (shape.layers - 1) * (two - one) == pytest.approx(named, rel=0.05)


def test_the_page_has_the_states_of_now() -> None:
    """The largest model is missing here: its modules take a second to make."""
    text = PAGE.read_text(encoding="utf-8")
    for name in ("1.3 B", "7 B"):
        model = Llama(SHAPES[name])
        for ranks in RANKS:
            states = " | ".join(f"{state_bytes(model, way, ranks):,}" for way in WAYS)
            assert f"| {name} | {ranks} | {states} |" in text


@no_gpu
@pytest.mark.extended
def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
