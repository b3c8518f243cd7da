"""Tests that the bits do not depend on where parameters and optimizer state live: every ZeRO stage,
place, precision, number of ranks and of micro-batches against the same run without offload."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

import pytest
import torch

from tests.engine.offloaded import PRECISIONS, Net, alike, differing, loss, train, two_groups, values_of
from tests.support.dense import STAGES, Case, build_engine
from tests.support.pool import Pools

# ZeRO stage, place of parameters, place of optimizer state, precision, micro-batches
Cell = tuple[str, str, str, str, int]
ZEROS = ("zero0", "zero1", "zero2", "zero3")
PLACES = ("none", "cpu", "nvme")
# On a CPU rank "cpu" is where things are anyway: it is there with one precision each.
EVERYTHING: list[Cell] = [
    *itertools.product(ZEROS, ("nvme",), ("none", "nvme"), PRECISIONS, (1, 4)),
    *itertools.product(ZEROS, ("nvme",), ("cpu",), ("bf16",), (4,)),
    *itertools.product(ZEROS, ("cpu",), PLACES, ("fp32",), (1,)),
]
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


def engine_of(cell: Cell, folder: str) -> Any:
    stage, params, state, precision, micro_batches = cell
    zero_config: dict[str, Any] = {"stage": STAGES[stage]["stage"], "sub_group_size": 4096}
    zero_config |= {"reduce_bucket_size": 3000, "param_persistence_threshold": 20, "module_granularity_threshold": 1}
    if params != "none":
        zero_config["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
        zero_config["reshard_after"] = "forward" if micro_batches == 1 else "auto"
    if state != "none":
        zero_config["offload_optimizer"] = {"device": state, "nvme_path": folder, "buffer_count": 2}
    config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(Net, loss, groups=two_groups, config=config), zero_config)


def trained(cell: Cell, folder: str) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The trace of three steps, all values, and how many groups are in a file."""
    engine = engine_of(cell, folder)
    torch.manual_seed(70 + engine.global_rank)
    trace, values = train(engine, range(3)), values_of(engine)
    away = sum(group.offloaded is not None for group in engine.sharded.groups)
    engine.destroy()
    return trace, values, away


def run_cells(cells: list[Cell], folder: str) -> list[str]:
    """What differs from the run without offload, of all cells."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    reference = functools.cache(lambda *cell: trained(cell, folder))
    for cell in cells:
        stage, params, _, precision, micro_batches = cell
        trace, values, away = trained(cell, folder)
        known = reference(stage, "none", "none", precision, micro_batches)
        names = differing(known[1], values)
        if not alike(trace, known[0]) or names:
            wrong.append(f"{cell}: {trace} instead of {known[0]}, {names}")
        if (away > 4) != (params == "nvme"):
            wrong.append(f"{cell}: {away} groups are in a file")
    return wrong


@pytest.mark.parametrize("count", [1, 2])
def test_a_covering_part(ranks: Pools, tmp_path: Any, count: int) -> None:
    for wrong in ranks(count).run(run_cells, COVERING, str(tmp_path)):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_place_at_every_stage(ranks: Pools, tmp_path: Any, count: int) -> None:
    # on 1 and 4 ranks every fourth one: stages and places are still all there
    cells = EVERYTHING if count == 2 else EVERYTHING[count % 3 :: 4]
    for wrong in ranks(count).run(run_cells, cells, str(tmp_path), timeout=300):
        assert wrong == []
