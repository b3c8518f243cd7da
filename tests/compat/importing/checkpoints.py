"""The checkpoints that ``make_deepspeed_checkpoints.py`` has made, unpacked, and a run of ours that
goes on from one."""

from __future__ import annotations

import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

import zero_trial
from tests.compat.importing.traveller import MORE, STEPS, Traveller, batch, ds_config, groups
from zero_trial.compat.importing.torch_file import UnknownObject, unknown

ARCHIVE = Path(__file__).with_name("deepspeed_checkpoints.zip")
CASES = (
    "fp32-stage0-ranks2",
    "bf16-stage0-ranks1",
    "fp32-stage1-ranks2",
    "bf16-stage1-ranks3",
    "fp32-stage2-ranks3",
    "fp16-stage2-ranks2",
    "fp32-stage3-ranks2",
    "bf16-stage3-ranks3",
    "fp32-stage1-ranks2-universal",
    "fp32-stage3-ranks2-universal",
)
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 2e-3}
"""Between the two engines' losses over five steps: sums are rounded in another order. Measured:
2.4e-7, 7.4e-4 and 2.6e-4, of losses of about 2."""


def unpack(name: str, folder: Path) -> Path:
    """One case as DeepSpeed wrote it."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        for entry in archive.namelist():
            if entry.startswith(f"{name}/"):
                archive.extract(entry, folder)
    return folder / name


@cache
def losses(name: str) -> list[float]:
    """How DeepSpeed went on."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        return list(json.loads(archive.read(f"{name}/losses.json")))


def resumed(stage: int, kind: str, seed: int = 77) -> Any:
    """A fresh engine with other weights than the ones to be loaded."""
    torch.manual_seed(seed)
    model = Traveller()
    engine, *_ = zero_trial.initialize(model=model, model_parameters=groups(model), config=ds_config(stage, kind))
    return engine


def go_on(engine: Any, rank: int = 0, ranks: int = 1) -> list[float]:
    """The losses of this rank's next steps."""
    found = []
    for step in range(STEPS, STEPS + MORE):
        loss = engine(*batch(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def foreign(path: str, args: tuple[Any, ...] = (), state: Any = None) -> UnknownObject:
    """An object of a class that is not built here."""
    made = unknown(path)(*args)
    made.state = state
    return made


def model_content(tensors: dict[str, torch.Tensor], buffers: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """What a file of model states holds."""
    return {"module": tensors, "buffer_names": list(buffers), "global_steps": 3, "ds_version": "0.0"} | more
