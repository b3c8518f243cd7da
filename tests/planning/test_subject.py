"""A model with a batch, as it is planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.planning.measured import ds_config
from tests.support.memory_plans import memory_plan
from zero_trial.planning.blueprint import Blueprint, ModulesOnMeta, NotCopyable
from zero_trial.planning.memory_plan import Figures
from zero_trial.planning.subject import first_rows, loss_in, rows_of


@dataclass
class Output:
    """As models return it that describe their outputs."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Head(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 1000)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        loss = torch.nn.functional.cross_entropy(y, torch.zeros(len(x), dtype=torch.int64))
        forms = {"loss": loss, "output": Output(y, loss), "dict": {"loss": loss}, "logits": y, "outside": Output(y)}
        return forms[self.form]


def figures(model: torch.nn.Module, batch: Any, loss: Any = None) -> Figures:
    return memory_plan(model, ds_config(1), 2, batch, loss=loss).figures


@pytest.mark.parametrize("form", ["output", "dict"])
def test_the_loss_is_found_in_the_output(form: str) -> None:
    x = torch.zeros(4, 8)
    assert (
        figures(Head(form), {"x": x}).activations
        == figures(Head("loss"), x).activations
        == figures(Head("loss"), (x,)).activations
    )


@pytest.mark.parametrize("form", ["logits", "outside"])
def test_a_loss_made_outside_is_stood_in_for(form: str) -> None:
    x = torch.zeros(4, 8)

    def loss(engine: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(engine(batch), torch.zeros(4, dtype=torch.int64))

    exact, guess = figures(Head("logits"), x, loss), figures(Head(form), x)
    assert guess.activations == pytest.approx(exact.activations, rel=0.05) and guess.peak == pytest.approx(
        exact.peak, rel=0.10
    )


def test_loss_in_prefers_one_number() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
    assert loss_in((a, {"x": b})) == 1.0 and loss_in((a, {"x": b})).dim() == 0


def test_batches_are_cut_and_repeated() -> None:
    batch = {"x": torch.arange(4), "mask": torch.ones(7, 4), "n": 3}
    assert rows_of(batch) == 4 and rows_of({"n": 3}) is None
    half = first_rows(batch, 4, 2)
    assert half["x"].tolist() == [0, 1] and half["mask"].shape == (7, 4) and half["n"] == 3
    assert half["x"].untyped_storage().nbytes() == 16  # not a view that holds the whole batch
    assert first_rows(batch, 4, 6)["x"].tolist() == [0, 1, 2, 3, 0, 1]
    assert first_rows(batch, 4, 4)["x"] is batch["x"]


def test_a_model_without_values_draws_none() -> None:
    class Drawn(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.drawn = torch.nn.init.normal_(self.weight)

    with ModulesOnMeta():
        model = Drawn()
    assert model.drawn is model.weight and model.weight.is_meta
    with pytest.raises(NotCopyable, match="only once"):
        Blueprint(model, {"model_parameters": iter([model.weight])})
