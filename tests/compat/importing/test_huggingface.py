"""Folders of Hugging Face Trainers: what torch alone has trained, and what DeepSpeed has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero_trial
from tests.compat.importing.checkpoints import unpack
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.compat.importing import foreign_source
from zero_trial.compat.importing.foreign_source import read_source
from zero_trial.compat.importing.imported import ImportOptions, write_imported
from zero_trial.errors import CheckpointError

NAMES = [["a.weight", "b.weight"], ["a.bias", "b.bias"]]


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.tanh(self.a(x))) - 1).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    return [
        {"params": [params[name] for name in row], "weight_decay": decay}
        for row, decay in zip(NAMES, (0.1, 0.0), strict=True)
    ]


def trainer_folder(folder: Path) -> list[float]:
    """Three steps of AdamW in a Trainer's form; the losses of the next three."""
    model = Net(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)

    def steps(which: range) -> list[float]:
        found = []
        for step in which:
            loss = model(batch(step))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    steps(range(3))
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "max_steps": 10}))
    return steps(range(3, 6))


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_trainer_has_saved_goes_on(tmp_path: Path, stage: int) -> None:
    expected = trainer_folder(tmp_path / "checkpoint-3")
    imported = read_source(tmp_path / "checkpoint-3", None, ImportOptions(names=NAMES))
    assert (imported.tag, imported.step, imported.left_out) == ("global_step3", 3, [])
    write_imported(imported, tmp_path / "checkpoint-3")  # where a Trainer with an engine looks for it
    model = Net(2)
    config = {
        "train_batch_size": 3,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    engine = zero_trial.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    engine.load_checkpoint(tmp_path / "checkpoint-3", "global_step3")
    assert engine.global_steps == 3
    found = []
    for step in range(3, 6):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-6)
    engine.destroy()


# In a process of its own, into which transformers' Trainer is imported once: it trains, and an
# engine that goes on from its folder must have its weights, steps and moments.
TRAINER = """import sys, torch, zero_trial
sys.modules.update(dict.fromkeys(("bitsandbytes", "datasets", "pandas", "peft")))
from pathlib import Path
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from zero_trial.compat.importing.foreign_source import read_source
from zero_trial.compat.importing.imported import ImportOptions, write_imported

words = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": row, "labels": row} for row in words]
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
given = dict(max_steps=3, save_steps=2, learning_rate=1e-2, weight_decay=0.1, per_device_train_batch_size=4)
quiet = dict(report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, max_grad_norm=0.0)
args = TrainingArguments(output_dir=sys.argv[1], **given, **quiet)
trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**shape)), args=args, train_dataset=samples)
trainer.train()
folder = Path(sys.argv[1], "checkpoint-2")
imported = read_source(folder, None, ImportOptions())
assert (imported.step, imported.left_out) == (2, [])
write_imported(imported, folder)
known = {id(param): name for name, param in trainer.model.named_parameters()}
names = [[known[id(param)] for param in group["params"]] for group in trainer.optimizer.param_groups]
written, optimizer = load_file(folder / "model.safetensors"), torch.load(folder / "optimizer.pt", weights_only=True)
assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]

model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
params = dict(model.named_parameters())
groups = [{"params": [params[n] for n in row], "weight_decay": d} for row, d in zip(names, (0.1, 0.0))]
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "log_level": "error"}
engine = zero_trial.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)[0]
engine.load_checkpoint(folder, load_lr_scheduler_states=False)
weights = engine.module_state_dict()
assert engine.global_steps == 2 and weights.keys() >= written.keys()
assert all(torch.equal(weights[name], value) for name, value in written.items())
for number, name in enumerate(name for row in names for name in row):
    for kind in ("exp_avg", "exp_avg_sq"):
        own = zero_trial.zero.safe_get_full_optimizer_state(params[name], kind)
        assert torch.equal(own, optimizer["state"][number][kind]), (name, kind)
"""


@pytest.mark.slow  # a process of transformers' own takes ten seconds
def test_an_engine_reads_what_transformers_trainer_has_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint-3"
    trainer_folder(folder)
    swapped = [["a.weight", "a.bias"], ["b.weight", "b.bias"]]
    for names in (swapped, [NAMES[0] + NAMES[1]]):
        with pytest.raises(CheckpointError, match="names"):
            read_source(folder, None, ImportOptions(names=names))
    with pytest.raises(CheckpointError, match="names"):  # no config.json, or no transformers
        read_source(folder, None, ImportOptions())
    monkeypatch.setattr(foreign_source, "_architecture", lambda folder: (NAMES, {"c.weight": "a.weight"}))
    assert read_source(folder, None, ImportOptions()).state["aliases"] == {"c.weight": "a.weight"}
    alone = read_source(folder, None, ImportOptions(with_optimizer=False))
    assert alone.step == 3 and alone.state["groups"] == [] and alone.state["scheduler"]["last_epoch"] == 3
    (folder / "optimizer.pt").unlink()
    assert "optimizer" in read_source(folder, None, ImportOptions()).left_out[0]
    (folder / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError):
        read_source(folder, None, ImportOptions())


def test_a_trainers_folder_with_a_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    """Its layout: the weights of ``save_model``, and global_stepN beside them."""
    theirs = unpack("fp32-stage2-ranks3", tmp_path)
    tag = (theirs / "latest").read_text().strip()
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    shutil.copytree(theirs / tag, folder / "global_step5")
    (folder / "latest").write_text("global_step5")
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    imported = read_source(folder, None, ImportOptions())
    assert imported.kind.startswith("DeepSpeed") and imported.tag == "global_step5"
    path = write_imported(imported, tmp_path / "ours")
    assert CheckpointReader(path).manifest.step == imported.step > 0
