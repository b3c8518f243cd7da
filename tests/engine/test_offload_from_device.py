"""Tests of parameters that leave a device between uses, on the stand-in device: pipelines, a part
that stays in memory, copies that overlap, and checkpoints. The bits of each place at each stage are
in test_offload_matrix.py."""

from __future__ import annotations

import logging
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
from tests.support.dense import Case, Turn, build_engine
from tests.support.device import device
from tests.support.pipelines import batches, layers, make_engine
from tests.support.pool import Pools
from zero_trial.sharding.plan import Home

Cell = tuple[str, str, str, str]  # ZeRO stage, place of parameters, place of optimizer state, precision


def engine_of(cell: Cell, folder: str, micro_batches: int = 2, **section: Any) -> Any:
    stage, params, state, precision = cell
    zero_config = offloaded_zero(stage, params, state, folder, **section)
    config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(lambda: Net().to("standin"), loss, groups=two_groups, config=config), zero_config)


def run_pipelines(folder: str, stage: int, most: int | None = None) -> list[str]:
    """Two pipeline stages whose parameters go to files, or all fit into ``max_in_cpu``: then they
    are in the host's memory."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    found, engines = [], []
    kept = {} if most is None else {"max_in_cpu": most}
    for section in ({}, {"offload_param": {"device": "nvme", "nvme_path": folder} | kept}):
        zero_config = {"stage": stage, "param_persistence_threshold": 0} | section
        engines.append(make_engine(layers(blocks=2), 2, zero_config, 2, bf16={"enabled": True}))
        losses = [engines[-1].train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        found.append((losses, {name: value.cpu() for name, value in engines[-1].module_state_dict().items()}))
    homes = {group.plan.home for group in engines[1].sharded.groups}
    want = Home.HOST if most is None else Home.NVME
    places = [*(f"parameters in {home.value}" for home in homes - {want})]
    losses_differ = [] if found[0][0] == found[1][0] else [f"{found[1][0]} instead of {found[0][0]}"]
    return [*places, *losses_differ, *differing(found[0][1], found[1][1])]


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_pipeline_whose_parameters_fit_into_the_hosts_memory(devices: Pools, tmp_path: Any, stage: int) -> None:
    for wrong in devices(2).run(run_pipelines, str(tmp_path), stage):
        assert wrong == []


def run_partly_kept(folder: str) -> list[str]:
    """``max_in_cpu`` holds the first groups in the host's memory, the rest is in the file."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    for stage, most in (("zero0", 9000), ("zero3", 5000)):
        known = trained(engine_of((stage, "none", "none", "bf16"), folder))
        engine = engine_of((stage, "nvme", "none", "bf16"), folder, max_in_cpu=most)
        homes = next(group.offloaded for group in engine.sharded.groups if group.offloaded).homes
        kept, count = homes.kept.end, engine.sharded.groups
        file_before = homes.params.bytes_written
        found = trained(engine)
        if not 0 < kept <= 2 * most + 4096 or homes.params.bytes_written == file_before:
            wrong.append(f"{stage}: {kept} bytes of {len(count)} groups are in memory")
        if not alike(found[0], known[0]) or differing(known[1], found[1]):
            wrong.append(f"{stage}: {found[0]} instead of {known[0]}, {differing(known[1], found[1])}")
    return wrong


@pytest.mark.slow
def test_a_part_stays_in_the_hosts_memory(devices: Pools, tmp_path: Any) -> None:
    for wrong in devices(2).run(run_partly_kept, str(tmp_path)):
        assert wrong == []


def run_overlap(folder: str) -> list[tuple[str, int, list[Any]]]:
    """(cell, copies between host and device in a step, those beside which nothing may go on)."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    found = []
    for place in ("cpu", "nvme"):
        for stage in ("zero0", "zero3"):
            engine = engine_of((stage, place, "none", "bf16"), folder, buffer_count=6)
            train(engine, range(2))
            here = device.use()
            here.scheduler.reset()
            for number in range(engine.gradient_accumulation_steps()):
                engine.backward(loss(engine, Turn(3, number, engine.global_rank)))
                engine.step()
            torch.standin.synchronize()
            copies = here.copies()
            found.append((f"{stage} {place}", len(copies), [copied for copied in copies if not copied[2]]))
    return found


def test_parameters_come_beside_what_computes(devices: Pools, tmp_path: Any) -> None:
    """In the order of the step before, with buffers for two groups: of the parameters' copies to
    the device only the first of a pass run alone."""
    for rank in devices(2).run(run_overlap, str(tmp_path)):
        for cell, count, alone in rank:
            down = [nbytes for kind, nbytes, _ in alone if kind == "to the device" and nbytes > 200]
            assert count > 20 and len(down) <= 6, (cell, count, down, alone)


class Adapted(Net):
    """All frozen but small matrices beside two layers, as LoRA trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(3, 91) / 9), nn.Parameter(torch.zeros(91, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.frozen(x + self.blocks[1](x)) + x @ self.down.T @ self.up.T)


def run_resumed(folder: str) -> list[str]:
    """A checkpoint of parameters that are away, read by a run without offload and by one with it;
    and an adapter beside frozen layers in the file."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    for stage, build in (("zero0", Net), ("zero3", Adapted)):
        found = []
        for places in (("none", "none"), ("nvme", "none"), ("cpu", "cpu")):
            case = Case(lambda build=build: build().to("standin"), loss, config=PRECISIONS["bf16"])  # type: ignore[misc]
            engine = build_engine(case, offloaded_zero(stage, *places, folder))
            if places == ("none", "none"):
                torch.manual_seed(3)
                train(engine, range(2))
                engine.save_checkpoint(f"{folder}/{stage}")
            engine.load_checkpoint(f"{folder}/{stage}")
            trace = train(engine, range(2, 4))
            engine.save_checkpoint(f"{folder}/{stage}-{places[0]}")
            found.append((trace, {name: value.cpu() for name, value in values_of(engine).items()}))
            away = sum(group.offloaded is not None for group in engine.sharded.groups)
            if (away > 2) != (places[0] != "none") or not alike(trace, found[0][0]):
                wrong.append(f"{stage} {places}: {away} groups away, {trace} instead of {found[0][0]}")
            wrong += [f"{stage} {places}: {name}" for name in differing(found[0][1], found[-1][1])]
    return wrong


@pytest.mark.slow
def test_checkpoints_and_adapters(devices: Pools, tmp_path: Any) -> None:
    for wrong in devices(2).run(run_resumed, str(tmp_path), timeout=120):
        assert wrong == []


@pytest.mark.slow
def test_a_pipeline_whose_parameters_are_in_files(devices: Pools, tmp_path: Any) -> None:
    for wrong in devices(2).run(run_pipelines, str(tmp_path), 0, 0):
        assert wrong == []


def edited_before_a_step(place: dict[str, str]) -> float:
    """The step after an edit of fp32 ``param.data``, the first of all."""
    zero_config = {"stage": 2, "offload_optimizer": place}
    engine = build_engine(Case(lambda: Net().to("standin"), loss), zero_config)
    param = next(param for param in engine.module.parameters() if param.dim() == 2 and param.numel())
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    param.data.fill_(0.25)
    engine.step()
    return (param - 0.25).abs().max().item()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_edits_before_the_first_step_reach_masters_on_the_host(devices: Pools, place: str, tmp_path: Any) -> None:
    there = {"device": place} | ({"nvme_path": str(tmp_path)} if place == "nvme" else {})
    assert max(devices(2).run(edited_before_a_step, there)) < 0.01
