"""Tests that the bits do not depend on where parameters and optimizer state live: every ZeRO stage,
place, precision, number of ranks and of micro-batches against the same run without offload."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.offloaded import (
    PRECISIONS,
    Net,
    alike,
    differing,
    loss,
    offloaded_zero,
    train,
    trained,
    two_groups,
    values_of,
)
from tests.support.dense import Case, build_engine
from tests.support.device import device
from tests.support.pool import Pools
from zero_trial.device import accelerator

# ZeRO stage, place of parameters, place of optimizer state, precision, micro-batches
Cell = tuple[str, str, str, str, int]
ZEROS = ("zero0", "zero1", "zero2", "zero3")
PLACES = ("none", "cpu", "nvme")
COUNTS = (1, 2, 4)  # of ranks
EVERYTHING: list[Cell] = [*itertools.product(ZEROS, ("cpu", "nvme"), PLACES, PRECISIONS, (1, 4))]
# each pair of stage and place, of stage and precision, and all that a file of parameters can meet
COVERING: list[Cell] = [
    ("zero0", "nvme", "none", "fp32", 4),
    ("zero0", "nvme", "nvme", "bf16", 1),
    ("zero1", "nvme", "none", "fp16", 4),
    ("zero1", "nvme", "nvme", "fp32", 1),
    ("zero2", "nvme", "cpu", "bf16", 4),
    ("zero2", "cpu", "nvme", "fp32", 1),
    ("zero3", "nvme", "cpu", "fp16", 1),
]
# fp32 parameters are updated on the host, 16-bit ones where their state is
OF_DEVICE: list[Cell] = [("zero1", "nvme", "none", "bf16", 4), ("zero2", "cpu", "cpu", "fp32", 1)]
SMALL_OF_DEVICE: list[Cell] = [("zero0", "nvme", "nvme", "fp16", 1), ("zero3", "cpu", "cpu", "bf16", 1)]


class SmallNet(nn.Module):
    """As small as a model can be that has all that differs: tied, frozen and empty parameters, one
    that stays, dropout, and weights of more than one buffer that fill no block of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 67)
        self.blocks = nn.ModuleList([nn.Linear(67, 67), nn.Linear(67, 67, bias=False)])
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen = nn.Linear(67, 67, bias=False).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.last = nn.Linear(67, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](self.first(x)))
        x = x + self.blocks[1](nn.functional.dropout(x, 0.2))
        return self.last(self.frozen(x))


def on_device() -> bool:
    return accelerator() is not None


def engine_of(cell: Cell, folder: Any, build: Callable[[], nn.Module] = Net) -> Any:
    stage, params, state, precision, micro_batches = cell
    zero_config = offloaded_zero(stage, params, state, folder)
    if micro_batches > 1:
        zero_config.pop("reshard_after", None)
    config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(build, loss, groups=two_groups, config=config), zero_config)


def run_cells(cells: list[Cell], folder: str, build: Callable[[], nn.Module], least_away: int) -> list[str]:
    """What differs from the run without offload, of all cells."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    for cell in cells:
        stage, params, _, precision, micro_batches = cell
        trace, values, away = run_cell(cell, folder, build)
        known = reference("zero3" if stage == "zero3" else "zero0", precision, micro_batches, build)
        names = differing(known[1], values)
        if not alike(trace, known[0]) or names:
            wrong.append(f"{cell}: {trace} instead of {known[0]}, {names}")
        leaves = params == "nvme" or on_device()
        if away < least_away if leaves else away:
            wrong.append(f"{cell}: {away} groups are away")
    return wrong


@functools.cache
def reference(stage: str, precision: str, micro_batches: int, build: Callable[[], nn.Module]) -> Any:
    """The run without offload, once per process. Stages 1 and 2 have the bits of stage 0; stage 3
    adds the gradients of several micro-batches in another order."""
    return run_cell((stage, "none", "none", precision, micro_batches), None, build)


def run_cell(
    cell: Cell, folder: str | None, build: Callable[[], nn.Module]
) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The smaller model takes one step, a second one that uses what the first has left, and where
    that overflows a third."""
    found = trained(engine_of(cell, folder, build), 3 if build is Net or cell[3] == "fp16" else 2)
    if on_device():
        forget_streams()
    return found


def forget_streams() -> None:
    """Those of engines before, which each launch would be compared with."""
    device.use().reset()
    torch.standin.synchronize()


@pytest.mark.smoke
def test_a_covering_part(ranks: Pools, tmp_path: Any) -> None:
    for wrong in ranks(2).run(run_cells, COVERING, str(tmp_path), Net, 5):
        assert wrong == []


@pytest.mark.smoke
def test_from_a_device(devices: Pools, tmp_path: Any) -> None:
    for wrong in devices(2).run(run_cells, OF_DEVICE, str(tmp_path), Net, 5):
        assert wrong == []
    for wrong in devices(2).run(run_cells, SMALL_OF_DEVICE, str(tmp_path), SmallNet, 3):
        assert wrong == []


def cells_of(stage: str) -> list[Cell]:
    return [cell for cell in EVERYTHING if cell[0] == stage]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ZEROS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_whole_matrix(ranks: Pools, tmp_path: Any, count: int, stage: str) -> None:
    for wrong in ranks(count).run(run_cells, cells_of(stage), str(tmp_path), SmallNet, 3, timeout=300):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", ZEROS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_whole_matrix_from_a_device(devices: Pools, tmp_path: Any, count: int, stage: str) -> None:
    for wrong in devices(count).run(run_cells, cells_of(stage), str(tmp_path), SmallNet, 3, timeout=300):
        assert wrong == []


@pytest.mark.extended
@pytest.mark.parametrize("stage", ZEROS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_whole_matrix_of_a_larger_model(ranks: Pools, tmp_path: Any, count: int, stage: str) -> None:
    for wrong in ranks(count).run(run_cells, cells_of(stage), str(tmp_path), Net, 5, timeout=600):
        assert wrong == []


def test_the_drives_may_change_from_run_to_run(tmp_path: Path) -> None:
    """What is offloaded is in one folder, two and three; each run resumes the one before."""
    names = [str(tmp_path / name) for name in "abc"]
    for name in names:
        Path(name).mkdir()
    runs: list[Any] = [None, names[0], names[:2], ",".join(names[::-1])]
    trace, known = [], None
    for number, folders in enumerate(runs):
        places = ("none", "none") if folders is None else ("nvme", "nvme")
        engine = engine_of(("zero2", *places, "bf16", 1), folders)
        if folders is None:  # the whole way, to compare with
            torch.manual_seed(7)
            known = (train(engine, range(6)), values_of(engine))
            engine.destroy()
            continue
        if number == 1:
            torch.manual_seed(7)
        else:
            engine.load_checkpoint(str(tmp_path / "saved"))
        file = engine.optimizer.store.homes.masters
        assert [str(folder) for folder in file.folders] == (
            [folders] if number == 1 else (names[:2], names[::-1])[number - 2]
        )
        trace += train(engine, range(2 * number - 2, 2 * number))
        assert all(each.end > 0 for each in file._files)
        engine.save_checkpoint(str(tmp_path / "saved"))
        found = values_of(engine)
        engine.destroy()
    assert known is not None and alike(trace, known[0]) and differing(known[1], found) == []
