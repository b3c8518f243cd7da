"""The smallest change that fits, on plans from a formula."""

from __future__ import annotations

import pytest
import torch

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, DoesNotFit
from zero_trial.planning.compare import Planner, describe_change, smallest_change
from zero_trial.planning.memory_plan import Figures

GIB = 2**30


class Formula:
    """States of 16 GiB at stage 0, 12, 8, 4 at the others; activations of 5 GiB for each sample."""

    parameters = 10**9
    device = torch.device("cpu")

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
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    return Planner(Formula(**formula), read_ds_config(config), 2, processes=processes)


def test_processes_count_in_the_message_and_in_what_fits() -> None:
    error = str(planner(processes=5 * GIB).does_not_fit(22 * GIB))
    assert error.startswith("rank 0 needs 33.0 GiB, has 22.0 GiB (activations 20.0 GiB, processes 5.0 GiB). ")
    for processes, micro in ((0, 2), (4 * GIB, 2), (5 * GIB, 1)):  # 18 GiB of tensors at 2, 13 at 1
        found = smallest_change(planner(processes=processes), 22 * GIB)
        assert found is not None and (found.stage, found.micro_batch) == (2, micro)


def test_the_message_of_a_run_that_does_not_fit() -> None:
    error = planner().does_not_fit(22 * GIB)
    assert isinstance(error, DoesNotFit) and error.exit_code == 3
    assert str(error) == (
        "rank 0 needs 28.0 GiB, has 22.0 GiB (activations 20.0 GiB). Smallest change that fits: micro batch 4→2 with accumulation 1→2 "
        "(same global batch). Also: stage 2→3 saves 4.0 GiB."
    )


@pytest.mark.parametrize(
    ("limit", "change"),
    [
        (28, "none"),
        (
            25,
            "micro batch 4→2 with accumulation 1→2 (same global batch)",
        ),  # stage 3 fits too, but a halving changes nothing in training
        (14, "micro batch 4→1 with accumulation 1→4 (same global batch)"),
        (9, "micro batch 4→1 with accumulation 1→4 (same global batch) and stage 2→3"),
    ],
)
def test_the_smallest_change(limit: int, change: str) -> None:
    chosen = planner()
    found = smallest_change(chosen, limit * GIB)
    assert found is not None and describe_change(chosen.plan(), found) == change and found.fits(limit * GIB)


def test_an_odd_micro_batch_leaves_the_stage() -> None:
    chosen = planner(stage=0, micro=1)
    found = smallest_change(chosen, 14 * GIB)
    assert found is not None and describe_change(chosen.plan(), found) == "stage 0→2"


def test_stages_that_are_refused_are_passed_over() -> None:
    chosen = planner(stage=0, micro=1, refused=(1, 2))
    found = smallest_change(chosen, 18 * GIB)
    assert found is not None and found.stage == 3


def test_nothing_fits() -> None:
    assert smallest_change(planner(), GIB) is None
    text = str(planner().does_not_fit(GIB))
    assert (
        "No stage and no micro-batch fits; the least of those compared is 13.0 GiB at ZeRO-2 with micro batch 1."
        in text
    )


def test_the_table_has_every_stage_every_halving_and_state_on_nvme() -> None:
    lines = planner(refused=(0,)).comparison(25 * GIB).splitlines()
    assert lines[0].split() == ["states", "activations", "temporary", "peak"]
    names = [line[:6] for line in lines[1:]]
    assert names == ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-2", "ZeRO-2", "ZeRO-2"]
    assert "this stage cannot be" in lines[1]
    assert "ZeRO-2, micro batch 4 x accumulation 1, state on NVMe" in lines[-1] and "GiB" in lines[-1]
    assert lines[2].endswith("does not fit") and lines[4].endswith("fits") and "(as configured)" in lines[3]
