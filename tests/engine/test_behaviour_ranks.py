"""Ranks that do not do the same: each hears of it in a typed error, soon."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.test_behaviour_errors import CONFIG, engine, net
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.pool import Pools, RankPool, logged_lines
from zero_trial.comm import waits
from zero_trial.errors import ConfigError, MeshError
from zero_trial.pipeline import LayerSpec, PipelineModule


class Skipping(nn.Module):
    """Rank 1 leaves out a block: its parameters are gathered by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if rank == 0 or index != 1:
                x = torch.tanh(block(x))
        return x


def leave_out(stage: str) -> str:
    found = build_engine(Case(Skipping, lambda model, turn: model), STAGES[stage])
    torch.distributed.barrier()
    for comm in (found.mesh.shard, found.mesh.replica, found.mesh.world, found.mesh.data):
        comm.watch.timeout = 2.0
    try:
        found.backward(found(Turn(0, 0, 0).normal(2, 64), found.global_rank).mean())
        found.step()
    except MeshError as error:
        return str(error)
    return ""


def more_batches() -> str:
    """Rank 0 takes one step more than rank 1."""
    found = build_engine(Case(net, lambda model, turn: model), STAGES["zero2"])
    torch.distributed.barrier()
    found.mesh.shard.watch.timeout = 2.0
    try:
        for _ in range(3 if found.global_rank == 0 else 2):
            found.backward(found(torch.ones(2, 3)).mean())
            found.step()
    except MeshError as error:
        return str(error)
    return ""


def of_rank(what: str, stage: str) -> str:
    """The error of an engine that each rank makes in its own way."""
    first = torch.distributed.get_rank() == 0
    torch.manual_seed(0)
    model, config, given = net(), dict(CONFIG), {}
    if what == "shape" and first:
        model[2] = nn.Linear(4, 3)
    elif what == "layer" and first:
        model.append(nn.Linear(2, 2))
    elif what == "frozen":
        model[0].requires_grad_(first)
    elif what == "rate":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3 if first else 2e-3}}
    elif what == "accumulation":
        config |= {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1}
        config |= {"gradient_accumulation_steps": 1 if first else 2}
    elif what == "clip":
        config["gradient_clipping"] = 1.0 if first else 0.0
    elif what == "optimizer":
        given["optimizer"] = (torch.optim.SGD if first else torch.optim.Adam)(model.parameters(), lr=0.1)
    elif what == "function":
        given["optimizer"] = torch.optim.SGD if first else torch.optim.Adam
    elif what == "no optimizer":
        del config["optimizer"]
        given |= {"optimizer": torch.optim.SGD} if first else {}
    elif what == "groups":
        groups = [{"params": [param], "lr": 0.1 * place} for place, param in enumerate(model.parameters())]
        given["model_parameters"] = groups if first else groups[::-1]
    config["zero_optimization"] = STAGES["zero1" if what == "stage" and first else stage]
    try:
        zero_trial.initialize(model=model, config=config, **given)[0].destroy()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "2.weight (3, 4) torch.float32 on rank 0, 2.weight (2, 4) torch.float32 on rank 1"),
        ("layer", "3.weight (2, 2) torch.float32 on rank 0, nothing more on rank 1"),
        (
            "frozen",
            "0.weight (4, 3) torch.float32 on rank 0, 0.weight (4, 3) torch.float32 without gradients on rank 1",
        ),
        ("rate", 'optimizer ["AdamW", {"lr": 0.001}] on rank 0, optimizer ["AdamW", {"lr": 0.002}] on rank 1'),
        ("accumulation", "gradient_accumulation_steps 1 on rank 0, gradient_accumulation_steps 2 on rank 1"),
        ("clip", "gradient_clipping 1 on rank 0, gradient_clipping 0 on rank 1"),
        ("optimizer", "SGD on rank 0, Adam on rank 1"),
        ("function", "SGD on rank 0, Adam on rank 1"),
        ("no optimizer", "SGD on rank 0, no optimizer on rank 1"),
        ("groups", "group 0 (lr 0.0) on rank 0, group 0 (lr 0.3"),
        ("stage", "zero_optimization.stage 1 on rank 0, zero_optimization.stage 0 on rank 1"),
        ("nothing", ""),
    ],
)
def test_ranks_that_train_different_things_are_refused(ranks: Pools, what: str, words: str) -> None:
    for text in ranks(2).run(of_rank, what, "zero0"):
        assert words in text, text
        assert bool(text) is bool(words)


def cannot_start(what: str, taken: str) -> tuple[str, str]:
    """Start an engine that one rank cannot start; return this rank's error: its type and text."""
    model, config, given = net(), CONFIG | {"comm_timeout_seconds": 3}, {}
    where: dict[str, Any] | str = config
    if what == "stage":
        model = PipelineModule([LayerSpec(nn.Linear, 3, 4), LayerSpec(nn.Linear, 4, 2)], num_stages=2)
    if what == "monitor":  # of rank 0, in a folder that it cannot make
        config["csv_monitor"] = {"enabled": True, "output_path": taken, "job_name": "run"}
    elif torch.distributed.get_rank() == 1:
        if what == "config":
            config["train_batch_size"] = 3
        elif what == "file":
            where = "no_such_folder/ds_config.json"
        elif what == "key":
            config["train_bach_size"] = 4
        elif what == "level":
            config["log_level"] = "loud"
        elif what == "mesh":
            config["mesh"] = {"model": 3}
        elif what == "model":
            model = nn.Sequential(nn.DataParallel(model))
        else:
            given["model_parameters"] = list(net().parameters())
    try:
        zero_trial.initialize(model=model, config=where, **given)[0].destroy()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("config", 1, "train_batch_size"),
        ("file", 1, "no_such_folder/ds_config.json"),
        ("key", 1, "train_bach_size"),
        ("level", 1, "no such level"),
        ("mesh", 1, "2 ranks cannot be divided by pipe 1 × model 3"),
        ("model", 1, "DataParallel"),
        ("groups", 1, "these are not all parameters of the model"),
        ("stage", 1, "these are not all parameters of the model"),
        ("monitor", 0, "could not be created"),
    ],
)
def test_a_rank_that_cannot_start_ends_the_start_of_all(
    ranks: Pools, tmp_path: Path, what: str, rank: int, words: str
) -> None:
    (tmp_path / "taken").touch()
    found = ranks(2).run(cannot_start, what, str(tmp_path / "taken"))
    (own, text), (other, told) = found[rank], found[1 - rank]
    assert own == "ConfigError" and words in text, text
    assert other == "TrialError" and f"another rank could not start: got rank {rank}: " in told and words in told, told


def own_metrics(alike: bool, folder: str) -> str:
    """What rank 0 logs as it saves, once each rank has stepped its scheduler with a metric."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    found = engine(lr_scheduler=lambda optimizer: plateau(optimizer, patience=0))
    for metric in (1.0, 2.0):
        found.lr_scheduler.step(metric if alike or found.global_rank == 0 else 1.0 / metric)
    lines = logged_lines()
    found.save_checkpoint(folder)
    return "\n".join(lines)


@pytest.mark.parametrize("alike", [True, False])
def test_learning_rates_that_ranks_have_for_themselves_are_said(ranks: Pools, alike: bool, tmp_path: Path) -> None:
    first, second = ranks(2).run(own_metrics, alike, str(tmp_path))
    assert ("[0.0001] on rank 0 and [0.001] on rank 1" in first) is not alike
    assert not second


def test_a_group_without_a_rate_is_saved(tmp_path: Path) -> None:
    """As of Adafactor, which finds its own."""
    found = engine()
    found.optimizer.param_groups[0]["lr"] = None
    found.save_checkpoint(str(tmp_path))
    assert list(tmp_path.iterdir())


def saves_alone(stage: str, transport: str, folder: str) -> tuple[str, str]:
    """Rank 0 saves as scripts for DDP do; the others go on. The error, and the line of this file
    that saves."""
    waits.STUCK_SECONDS = 0.3
    config = {"comm_transport": transport, "comm_timeout_seconds": 3600}
    found = build_engine(Case(net, lambda model, turn: model, config=config), STAGES[stage])
    text, line = "", 0
    try:
        for _ in range(2):
            found.backward(found(torch.ones(2, 3)).mean())
            found.step()
            if found.global_rank == 0:
                line = inspect.currentframe().f_lineno + 1
                found.save_checkpoint(folder)
    except MeshError as error:
        text = str(error)
    return text, f"{__file__}:{line}"


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_a_checkpoint_that_rank_0_saves_alone_ends_soon(stage: str, tmp_path: Path) -> None:
    """Far before comm_timeout_seconds, an hour, though each waits in a collective of another
    axis."""
    pool = RankPool(2)
    try:
        (first, line), (second, _) = pool.run(saves_alone, stage, "auto", str(tmp_path))
    finally:
        pool.close()
    assert "save_checkpoint called by every rank" in first and "in different collectives" in first, first
    assert f"this rank at {line}" in first and "if rank == 0" in first
    assert "save_checkpoint called by every rank" in second, second


ELSEWHERE = (
    "another rank makes another collective call at this point",
    "gave up before this rank came",
    "wait for each other in different collectives",
)


def test_ranks_in_different_collectives_get_an_error() -> None:
    """Below stage 3 a block may be left out on one rank; at stage 3 no one can gather it alone, and
    the error says who waited for what."""
    pool = RankPool(2)
    try:
        assert pool.run(leave_out, "zero1") == ["", ""]
        assert pool.run(leave_out, "zero2") == ["", ""]
        first, second = pool.run(more_batches)
        assert "waited 2 s for rank 1" in first
        assert "step 2" in first
        assert "same number of batches" in first
        assert second == ""
    finally:
        pool.close()
    pool = RankPool(2)
    try:
        first, second = pool.run(leave_out, "zero3")
        assert "blocks.1" in first
        assert second
        # through shared memory who comes second sees at once that the other is elsewhere; the other
        # hears so, or that it was given up
        for text in (first, second):
            assert any(words in text for words in ELSEWHERE), text
            assert "leaf_module" in text
    finally:
        pool.close()
