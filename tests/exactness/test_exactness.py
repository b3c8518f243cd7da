"""docs/exactness.md says what is measured, and no cell differs from plain torch in silence."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.measure import CELLS, EXACT, Place, Row, acceptable, measured, missing, read_page
from tests.exactness.rows import SECTIONS
from tests.support.pool import Nursery, Pools

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
ROWS = [row for rows in SECTIONS.values() for row in rows]


# What the rows import, which takes seconds: once for all ranks.
LIBRARIES = [
    "transformers.optimization",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "diffusers.models.unets.unet_2d",
    "peft",
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Start ranks for this file alone: they have libraries and torch's compiler. Their nursery is
    their own: libraries that were imported without the stand-in for DeepSpeed stay so."""
    nursery = Nursery()
    pools = Pools(nursery, [name for name in LIBRARIES if importlib.util.find_spec(name.partition(".")[0])])
    yield pools
    pools.close()
    nursery.close()


def test_the_page_has_every_row_and_a_reason_beside_what_is_not_exact() -> None:
    """If this fails: python -m tests.exactness.measure docs/exactness.md"""
    page = read_page(PAGE.read_text("utf-8"))
    assert {name: remark for name, (_, remark) in page.items()} == {row.name: row.remark for row in ROWS}
    for row in ROWS:
        cells = page[row.name][0]
        assert len(cells) == len(CELLS)
        for (dtype, _), shown in zip(CELLS, cells, strict=True):
            exact = shown != "error" and (dtype == "bf16" or float(shown) <= EXACT)
            assert exact or row.remark, f"{row.name}: {shown} without a reason"


# Of each row the stage that frees its parameters, and another cell in turn: neighbors are alike and
# have all of them together. bf16 takes the same way through the stages:
# tests/engine/test_oracle.py compares their bits in it.
TURNS: list[Place] = [("fp32", "0"), ("bf16", "1"), ("fp32", "2")]


def cases() -> Iterator[Any]:
    for number, row in enumerate(ROWS):
        first = [("fp32", "3 freed"), TURNS[number % 3]]
        others = [place for place in CELLS if place not in first]
        yield pytest.param(row, first, id=f"{row.name}-first")
        yield pytest.param(row, others, id=f"{row.name}-others", marks=pytest.mark.extended)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "places"), cases())
def test_every_cell_is_as_the_page_says(pools: Pools, row: Row, places: list[Place]) -> None:
    """A number is within the row's limit, and an error is one in words at the same stages."""
    if missing(row):
        pytest.skip(missing(row))
    page = dict(zip(CELLS, read_page(PAGE.read_text("utf-8"))[row.name][0], strict=True))
    for (dtype, stage), cell in zip(places, measured(pools, row, places), strict=True):
        shown = page[dtype, stage]
        assert acceptable(row, dtype, cell), f"{dtype}, stage {stage}: {cell.gap} {cell.said}"
        assert (cell.gap is None) is (shown == "error"), f"{dtype}, stage {stage}: {cell.shown()}, on the page {shown}"
