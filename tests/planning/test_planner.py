"""Plans: their text and numbers, those of one subject side by side, and the smallest change that
fits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.planning.measured import ROWS, batch, build, ds_config
from tests.support.memory_plans import memory_plan, planner_of
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, DoesNotFit
from zero_trial.planning.blueprint import Blueprint, ModulesOnMeta, NotCopyable
from zero_trial.planning.memory_plan import Figures, MemoryPlan, own_process, rank_limit, rank_processes
from zero_trial.planning.planner import Planner, describe_change, first_rows, loss_in, rows_of

MIB, GIB = 2**20, 2**30
FIGURES = Figures(parameters=4 * MIB, gradients=2 * MIB, optimizer=8 * MIB, activations=22 * MIB, peak=40 * MIB)
PLAN = MemoryPlan(FIGURES, 2, "fp32", 2, 8, 1, 1_200_000, "traced")


def test_sums_and_halvings() -> None:
    assert planner(micro=12, accumulation=3).halvings() == [6, 3]
    assert planner(micro=12, accumulation=3).plan(micro_batch=3).accumulation == 12
    assert planner(micro=5).halvings() == []
    assert (FIGURES.states, FIGURES.temporary, FIGURES.total) == (14 * MIB, 4 * MIB, 40 * MIB)
    assert Figures(1, 2, 3).temporary is None and Figures(1, 2, 3).total == 6
    plain = json.loads(json.dumps(replace(PLAN, processes=5).as_dict()))
    assert (plain["stage"], plain["processes"]) == (2, 5)
    assert plain["figures"]["peak"] == plain["figures"]["total"] == 40 * MIB


@pytest.mark.parametrize(
    ("figures", "processes", "limit", "line"),
    [
        (FIGURES, 0, 64, "14.0 MiB states + 22.0 MiB activations, peak 40.0 MiB (limit 64.0 MiB)  fits"),
        (FIGURES, 0, 39, "peak 40.0 MiB (limit 39.0 MiB)  does not fit"),
        (Figures(MIB, MIB, MIB), 0, None, "per rank 3.0 MiB states"),
        (FIGURES, 366 * MIB, 406, ", processes 366.0 MiB (limit 406.0 MiB)  fits"),
        (FIGURES, 366 * MIB + 1, 406, ", processes 366.0 MiB (limit 406.0 MiB)  does not fit"),
        (FIGURES, 366 * MIB, None, ", processes 366.0 MiB"),
    ],
)
def test_a_line(figures: Figures, processes: int, limit: int | None, line: str) -> None:
    found = replace(PLAN, figures=figures, processes=processes).line(None if limit is None else limit * MIB)
    assert found.startswith("params 1.2M · per rank ") and found.endswith(line)


def test_a_table_names_every_kind() -> None:
    rows = {line[:24].strip(): line[24:].split() for line in replace(PLAN, processes=MIB).table(64 * MIB).splitlines()}
    kinds = ["parameters and masters", "gradients", "optimizer state", "states", "activations", "temporary", "peak"]
    assert [*rows] == ["per rank: ZeRO-2, fp32,", *kinds, "processes", "limit"]
    assert rows["states"] == ["14.0", "MiB", "12.23", "B/parameter"] and rows["limit"][-1] == "fits"
    assert "processes" not in PLAN.table(10**9) + PLAN.line(10**9), "where none are counted"


@pytest.mark.parametrize(("ranks", "expected"), [(1, 442), (2, 397), (5, 370), (0, 442)])
def test_ranks_share_what_starts_them(ranks: int, expected: int) -> None:
    """A rank has 160 MiB twice and 32; once: a command's 20, a compiler's 70."""
    assert rank_processes(160 * MIB, ranks) == expected * MIB
    assert rank_processes(160 * MIB, 2, command=160 * MIB) == (397 + 70) * MIB
    assert own_process() > 50 * MIB, "torch alone has more"
    whole = rank_limit(torch.device("cpu"), 1)
    assert whole is not None and rank_limit(torch.device("cpu"), 4) == whole // 4


class Formula:
    """States of 16 GiB at stage 0, 12, 8, 4 at the others; activations of 5 GiB for each sample."""

    parameters = 10**9
    device, samples = torch.device("cpu"), None

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.refused = refused
        self.asked: list[tuple[int, int]] = []

    def figures(self, settings: DsConfig, ranks: int, one_host: bool = True) -> tuple[Figures, str]:
        stage, micro_batch = settings.zero_optimization.stage, settings.train_micro_batch_size_per_gpu or 1
        self.asked.append((stage, micro_batch))
        if stage in self.refused:
            raise ConfigError("this stage cannot be", where="zero_optimization.stage")
        states, activations = (16 - 4 * stage) * GIB, 5 * GIB * micro_batch
        return Figures(states, 0, 0, activations, states + activations), "fake"


def planner(
    stage: int = 2, micro: int = 4, accumulation: int = 1, processes: int = 0, **formula: tuple[int, ...]
) -> Planner:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    config = sizes | {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    return Planner(Formula(**formula), read_ds_config(config), 2, processes=processes)


MICRO = "micro batch 4→{} with accumulation 1→{} (same global batch)"


@pytest.mark.parametrize(
    ("given", "limit", "change"),
    [
        ({}, 28, "none"),
        ({}, 25, MICRO.format(2, 2)),  # stage 3 fits too, but a halving changes nothing in training
        ({}, 14, MICRO.format(1, 4)),
        ({}, 9, MICRO.format(1, 4) + " and stage 2→3"),
        ({"processes": 4 * GIB}, 22, MICRO.format(2, 2)),  # 18 GiB of tensors at 2, 13 at 1
        ({"processes": 5 * GIB}, 22, MICRO.format(1, 4)),
        ({"stage": 0, "micro": 1}, 14, "stage 0→2"),
        ({"stage": 0, "micro": 1, "refused": (1, 2)}, 18, "stage 0→3"),
        ({}, 1, None),
    ],
)
def test_the_smallest_change(given: dict[str, Any], limit: int, change: str | None) -> None:
    chosen = planner(**given)
    found = chosen.smallest_change(limit * GIB)
    if change is None:
        assert found is None
    else:
        assert found is not None and describe_change(chosen.plan(), found) == change and found.fits(limit * GIB)


@pytest.mark.parametrize(
    ("processes", "limit", "text"),
    [
        (0, 22, f"rank 0 needs 28.0 GiB, has 22.0 GiB (activations 20.0 GiB). Smallest change that fits: {MICRO.format(2, 2)}."),
        (5, 22, "rank 0 needs 33.0 GiB, has 22.0 GiB (activations 20.0 GiB, processes 5.0 GiB). Smallest"),
        (0, 1, "rank 0 needs 28.0 GiB, has 1.0 GiB (activations 20.0 GiB). No stage and no micro-batch fits; "
               "the smallest of those compared is 13.0 GiB at ZeRO-2 with micro batch 1."),
    ],
)  # fmt: skip
def test_the_message_of_a_run_that_does_not_fit(processes: int, limit: int, text: str) -> None:
    error = planner(processes=processes * GIB).does_not_fit(limit * GIB)
    assert isinstance(error, DoesNotFit) and error.exit_code == 3 and str(error).startswith(text)


def test_the_table_has_every_stage_every_halving_and_state_on_nvme() -> None:
    chosen = planner(refused=(0,))
    lines = chosen.comparison(25 * GIB).splitlines()
    assert lines[0].split() == ["states", "activations", "temporary", "peak"]
    names = [line[:6] for line in lines[1:]]
    assert names == ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-2", "ZeRO-2", "ZeRO-2"]
    assert "this stage cannot be" in lines[1]
    assert "ZeRO-2, micro batch 4 x accumulation 1, state on NVMe" in lines[-1] and "GiB" in lines[-1]
    assert lines[2].endswith("does not fit") and lines[4].endswith("  fits") and "(as configured)" in lines[3]
    subject = chosen._subject
    assert isinstance(subject, Formula)
    made = [asked for asked in subject.asked if asked[0]]
    chosen.compare()
    assert [asked for asked in subject.asked if asked[0]] == made, "each plan is made once"
    with pytest.raises(ConfigError, match="this stage cannot be"):
        planner(refused=(2,)).compare()


def test_a_plan_for_a_model() -> None:
    """fp32 AdamW at stage 2 on two ranks: 4 whole, and (4 + 8) / 2 bytes per parameter, and some
    padding."""
    own = planner_of(build("gpt"), ds_config(2), 2, batch())
    plan, half, states = own.plan(), own.plan(micro_batch=ROWS // 2), memory_plan(build("gpt"), ds_config(2), 2)
    assert (plan.stage, plan.ranks, plan.micro_batch, plan.precision) == (2, 2, ROWS, "fp32")
    assert plan.figures.states == pytest.approx(10 * plan.parameter_count, rel=0.01)
    assert plan.figures.peak is not None and plan.figures.activations is not None
    assert plan.figures.peak > plan.figures.states + plan.figures.activations * 0.9
    assert half.accumulation == 2 and half.figures.states == plan.figures.states == states.figures.states
    assert half.figures.activations == pytest.approx(plan.figures.activations / 2, rel=0.05)
    assert states.figures.peak is None and states.how == "none"


def test_a_model_on_the_meta_device_is_planned_without_being_built() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(24)))
    # 0.4 G parameters: 6 GiB if it were real
    plan = memory_plan(model, ds_config(3, bf16=True), 64)
    assert plan.figures.states == pytest.approx(16 * plan.parameter_count / 64, rel=0.01)


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


def test_the_loss_is_found_in_the_output_or_stood_in_for() -> None:
    x = torch.zeros(4, 8)

    def figures(form: str, batch: Any = x, loss: Any = None) -> Figures:
        return memory_plan(Head(form), ds_config(1), 2, batch, loss=loss).figures

    def outside(engine: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(engine(batch), torch.zeros(4, dtype=torch.int64))

    own = figures("loss").activations
    assert figures("output", {"x": x}).activations == figures("dict", (x,)).activations == own
    exact = figures("logits", loss=outside)
    for form in ("logits", "outside"):
        guess = figures(form)
        assert guess.activations == pytest.approx(exact.activations, rel=0.05)
        assert guess.peak == pytest.approx(exact.peak, rel=0.10)
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
