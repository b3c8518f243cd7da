"""A checkpoint as a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zero_trial
from tests.compat.importing.test_dcp import Net, batch, engine_of, engine_steps, fsdp, fsdp_steps
from tests.support.pool import Pools
from zero_trial.checkpoint.export_dcp import dcp_state, write_dcp
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.cli.main import main
from zero_trial.errors import CheckpointError, ConfigError


def save_here(folder: str) -> list[float]:
    engine = engine_of(1, 2)
    engine_steps(engine, range(3))
    engine.save_checkpoint(folder, "a")
    found = engine_steps(engine, range(3, 6))
    engine.destroy()
    return found


def load_fsdp(folder: str) -> list[float]:
    model, optimizer = fsdp(2)
    own, state = get_state_dict(model, optimizer)
    dcp.load({"model": own, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=state)
    return fsdp_steps(model, optimizer, range(3, 6))


def test_what_was_saved_here_goes_on_in_fsdp2(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks(2).run(save_here, str(tmp_path))
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    for own, theirs in zip(ranks(2).run(load_fsdp, str(tmp_path / "dcp")), expected, strict=True):
        assert own == pytest.approx(theirs, rel=1e-5)
    reader = CheckpointReader(tmp_path / "a")
    assert sorted(dcp_state(reader, with_optimizer=False)) == ["model"]
    with pytest.raises(ConfigError):
        write_dcp(reader, tmp_path / "dcp")
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "dcp", "--part", "0"]) == 2
    assert not (tmp_path / "b").exists()


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def two_groups(model: Any) -> list[dict[str, Any]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    decayed = [param for _, param in trained if param.dim() > 1]
    others = [param for _, param in trained if param.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def test_optimizer_groups_go_on_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(1)
    engine, *_ = zero_trial.initialize(model=model, model_parameters=two_groups(model), config=CONFIG)
    engine_steps(engine, range(3))
    engine.save_checkpoint(tmp_path, "a")
    expected = engine_steps(engine, range(3, 6))
    engine.destroy()
    alive: list[torch.Tensor] = []
    read = CheckpointReader.read

    def counted(self: CheckpointReader, name: str, device: Any = "cpu") -> torch.Tensor:
        assert sum(each.untyped_storage().nbytes() > 0 for each in alive) <= 1, "the one before is still there"
        alive.append(read(self, name, device))
        return alive[-1]

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointReader, "read", counted)
        write_dcp(CheckpointReader(tmp_path / "a"), tmp_path / "dcp")
    assert len(alive) > 12
    other = Net(2)
    optimizer = torch.optim.AdamW(two_groups(other), lr=0.01)
    weights, state = get_state_dict(other, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    found = []
    for step in range(3, 6):
        loss = other(batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)


def test_groups_of_a_checkpoint_that_does_not_name_them_are_refused(tmp_path: Path) -> None:
    model = Net(1)
    engine, *_ = zero_trial.initialize(model=model, model_parameters=two_groups(model), config=CONFIG)
    engine_steps(engine, range(1))
    engine.save_checkpoint(tmp_path, "a")
    engine.destroy()
    reader = CheckpointReader(tmp_path / "a")
    del reader.manifest.state["names_of_groups"]
    with pytest.raises(CheckpointError):
        dcp_state(reader)
    assert sorted(dcp_state(reader, with_optimizer=False)) == ["model"]
