"""torch.distributed.checkpoint in and out: what real FSDP2 programs save goes on here, and the
other way round."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zero_trial
from tests.support.pool import Pools
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.cli.main import main
from zero_trial.compat.importing import dcp as reading
from zero_trial.compat.importing.foreign_source import read_source
from zero_trial.compat.importing.imported import ImportOptions, write_imported
from zero_trial.errors import CheckpointError


class Net(nn.Module):
    """A tied matrix, a frozen one, buffers of both kinds, sizes that no number of ranks divides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) + self.tied(x))
        return (self.last(hidden) + self.frozen(x).sum(1, keepdim=True) - 1).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = fully_shard(Net(seed))
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)


def fsdp_steps(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        loss = model(batch(step, torch.distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def engine_of(seed: int, stage: int) -> Any:
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zero_trial.initialize(model=Net(seed), config=config)[0]


def engine_steps(engine: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        loss = engine(batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def save_fsdp(folder: str) -> list[float]:
    """Three steps, saved in three forms; the losses of three further ones."""
    model, optimizer = fsdp(1)
    fsdp_steps(model, optimizer, range(3))
    own, state = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": state}, checkpoint_id=f"{folder}/nested")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    extra = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}}
    dcp.save({**own, "optimizer": flat, **extra}, checkpoint_id=f"{folder}/titan")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/weights")
    return fsdp_steps(model, optimizer, range(3, 6))


def go_on(folder: str, tag: str, stage: int) -> list[float]:
    engine = engine_of(2, stage)
    engine.load_checkpoint(folder, tag)
    assert engine.global_steps == 3
    found = engine_steps(engine, range(3, 6))
    engine.destroy()
    return found


def test_what_fsdp2_has_saved_goes_on_here(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks(2).run(save_fsdp, str(tmp_path / "theirs"))
    for form, left_out in (("nested", []), ("titan", ["train_state.step", "lr_scheduler.last_epoch"])):
        imported = read_source(tmp_path / "theirs" / form, None, ImportOptions())
        assert [line.partition(":")[0] for line in imported.left_out] == left_out
        assert imported.state["aliases"] == {"tied.weight": "first.weight"} and imported.step == 3
        write_imported(imported, tmp_path / "ours")
    for form, stage in (("nested", 2), ("titan", 3)):
        found = ranks(2).run(go_on, str(tmp_path / "ours"), form, stage)
        for own, theirs in zip(found, expected, strict=True):
            assert own == pytest.approx(theirs, rel=1e-5)
    alone = read_source(tmp_path / "theirs" / "weights", None, ImportOptions(strip="model."))
    assert alone.state["groups"] == [] and "param/first.weight" in alone.names(lambda name: True)
    words = [str(tmp_path / "theirs/nested"), str(tmp_path / "by command"), "--no-optimizer"]
    assert main(["ckpt", "import", *words]) == 0
    assert not CheckpointReader(tmp_path / "by command" / "nested").manifest.state["kinds"]
    for name in ("__0_0.distcp", ".metadata"):
        damaged = tmp_path / name.strip("._")
        shutil.copytree(tmp_path / "theirs" / "nested", damaged)
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError):
            write_imported(read_source(damaged, None, ImportOptions()), tmp_path / "none")
    assert not list((tmp_path / "none").glob("*"))


def folder_of(tmp_path: Path, tensors: dict[str, torch.Tensor], parts: dict[str, list[Any]]) -> reading.DcpFolder:
    """Return a folder as if it held ``tensors``, in ``parts``: slices of rows, or of columns."""
    folder = object.__new__(reading.DcpFolder)
    folder.folder, folder.shapes = tmp_path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    folder._chunks, held = {}, {}
    for name, tensor in tensors.items():
        for number, (axis, low, high) in enumerate(parts.get(name, [(0, 0, len(tensor))])):
            chunk = reading._Chunk(name, number, 0, (low, 0) if axis == 0 else (0, low))
            folder._chunks.setdefault(name, []).append(chunk)
            held[chunk] = tensor.narrow(axis, low, high - low)
    folder._tensor = lambda chunk, name: held[chunk]  # type: ignore[method-assign]
    return folder


def test_which_matrix_is_another_name_of_a_trained_one(tmp_path: Path) -> None:
    """One with its values, however the two are cut; never one that has one value everywhere."""
    values = torch.arange(20.0).view(4, 5)
    trained = {"w": values, "zeros": torch.zeros(4, 5), "other": values + 1}
    others = {"tied": values, "near": torch.where(values == 19, 0.0, values), "half": values.half()}
    others |= {"still": torch.zeros(4, 5), "lists": torch.zeros(0, 5)}
    cuts = {"w": [(0, 0, 1), (0, 1, 3), (0, 3, 4)], "tied": [(0, 0, 2), (0, 2, 4)], "zeros": [(0, 0, 2), (0, 2, 4)]}
    folder = folder_of(tmp_path, {**trained, **others}, cuts)
    found = {name: reading._tied(folder, "", name, set(trained)) for name in (*trained, *others)}
    assert found == {**dict.fromkeys(found), "tied": "w"}


def test_a_tensor_that_is_cut_by_columns_is_joined(tmp_path: Path) -> None:
    """As tensor parallelism cuts it; what covers only a part of it is an error."""
    whole = torch.arange(20.0).view(4, 5)
    [(_, part)] = folder_of(tmp_path, {"w": whole}, {"w": [(1, 0, 3), (1, 3, 5)]}).slices("w", "param/w")
    assert torch.equal(part.tensor, whole)
    with pytest.raises(CheckpointError):
        folder_of(tmp_path, {"w": whole}, {"w": [(1, 0, 3), (1, 4, 5)]}).slices("w", "param/w")
