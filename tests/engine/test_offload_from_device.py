"""Tests of parameters that leave a device between uses, on the stand-in device: bits, host memory
and files, with and without optimizer state that leaves it too."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.offloaded import PRECISIONS, Net, alike, differing, loss, train, two_groups, values_of
from tests.support.dense import STAGES, Case, build_engine
from tests.support.pipelines import batches, layers, make_engine
from tests.support.pool import RankPool
from zero_trial.sharding.plan import Home

Cell = tuple[str, str, str, str]  # ZeRO stage, place of parameters, place of optimizer state, precision
# fp32 parameters are updated on the host, 16-bit ones where their state is. Stage 1 is the smoke's;
# cells of one stage and precision share the run that they are compared with.
SMOKE: Cell = ("zero1", "nvme", "none", "bf16")
CELLS: list[Cell] = [
    ("zero0", "cpu", "none", "fp16"),
    ("zero2", "cpu", "cpu", "fp32"),
    ("zero2", "nvme", "none", "fp32"),
    ("zero2", "cpu", "nvme", "bf16"),
    ("zero3", "cpu", "none", "bf16"),
    ("zero3", "nvme", "cpu", "bf16"),
]


@pytest.fixture(scope="module")
def devices() -> Iterator[RankPool]:
    pool = RankPool(2, world="standin")
    yield pool
    pool.close()


def engine_of(cell: Cell, folder: str, **more: Any) -> Any:
    stage, params, state, precision = cell
    zero_config: dict[str, Any] = {"stage": STAGES[stage]["stage"], "sub_group_size": 4096}
    zero_config |= {"reduce_bucket_size": 3000, "param_persistence_threshold": 20, "module_granularity_threshold": 1}
    if params != "none":
        zero_config["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
        zero_config["reshard_after"] = "forward"
    if state != "none":
        zero_config["offload_optimizer"] = {"device": state, "nvme_path": folder, "buffer_count": 2}
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5} | PRECISIONS[precision] | more
    return build_engine(Case(lambda: Net().to("standin"), loss, groups=two_groups, config=config), zero_config)


def trained(cell: Cell, folder: str) -> tuple[Any, dict[str, torch.Tensor], int]:
    engine = engine_of(cell, folder)
    torch.manual_seed(70 + engine.global_rank)
    trace, values = train(engine, range(3)), values_of(engine)
    away = sum(group.offloaded is not None for group in engine.sharded.groups)
    values = {name: value.cpu() for name, value in values.items()}
    if (
        not engine.sharded.frees_parameters
    ):  # torch cannot put values of the host into a parameter of the stand-in device
        engine.destroy()
    return trace, values, away


def run_cells(cells: list[Cell], folder: str) -> list[str]:
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    reference = functools.cache(lambda *cell: trained(cell, folder))
    for cell in cells:
        stage, _, _, precision = cell
        trace, values, away = trained(cell, folder)
        known = reference(stage, "none", "none", precision)
        names = differing(known[1], values)
        if not alike(trace, known[0]) or names or away < 5:
            wrong.append(f"{cell}: {away} groups away, {trace} instead of {known[0]}, {names}")
    return wrong


def run_pipelines(folder: str, stage: int) -> list[str]:
    """Two pipeline stages whose parameters would go to files, and all fit into ``max_in_cpu``: they
    are in the host's memory."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    found, engines = [], []
    for section in ({}, {"offload_param": {"device": "nvme", "nvme_path": folder}}):
        zero_config = {"stage": stage, "param_persistence_threshold": 0} | section
        engines.append(make_engine(layers(blocks=2), 2, zero_config, 2, bf16={"enabled": True}))
        losses = [engines[-1].train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        found.append((losses, {name: value.cpu() for name, value in engines[-1].module_state_dict().items()}))
    homes = {group.plan.home for group in engines[1].sharded.groups}
    places = [*(f"parameters in {home.value}" for home in homes - {Home.HOST})]
    losses_differ = [] if found[0][0] == found[1][0] else [f"{found[1][0]} instead of {found[0][0]}"]
    return [*places, *losses_differ, *differing(found[0][1], found[1][1])]


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_pipeline_whose_parameters_fit_into_the_hosts_memory(devices: RankPool, tmp_path: Any, stage: int) -> None:
    for wrong in devices.run(run_pipelines, str(tmp_path), stage):
        assert wrong == []


@pytest.mark.smoke
def test_the_bits_of_a_run_without_offload(devices: RankPool, tmp_path: Any) -> None:
    for wrong in devices.run(run_cells, [SMOKE], str(tmp_path)):
        assert wrong == []


@pytest.mark.slow
def test_every_place_at_every_stage(devices: RankPool, tmp_path: Any) -> None:
    for wrong in devices.run(run_cells, CELLS, str(tmp_path), timeout=200):
        assert wrong == []
