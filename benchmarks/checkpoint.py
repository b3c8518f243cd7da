"""Saving a model with Adam's state: our checkpoints, with and without training waiting for them,
against torch.save, safetensors, torch's distributed checkpoint and DeepSpeed.

    python benchmarks/checkpoint.py --folder /mnt/disk --parameters 100 --rounds 5
    python benchmarks/checkpoint.py --parameters 1 --rounds 1  # quick: writes about 100 MB

One rank, fp32, 12 bytes per parameter. All contenders save the same number of tensors of the same
sizes, in turn in one process, into a new folder, and flush every file to the disk: `save` is the
time until then. `standstill` is the time of the call, plus the time that the next step's update
waits for copies. That step (always our engine's, a batch of --rows) begins when the call returns;
`next step` is how much longer it takes than a step without a save, minus that wait. Our time
includes a SHA-256 of every byte, the others' does not. DeepSpeed is measured if it is installed.
Medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import zero_trial
from benchmarks import record

WIDTH = 1024  # of a layer, if the model has that many parameters
COLUMNS: list[record.Column] = [
    ("", lambda row: row["name"]),
    ("save s", record.number("save", 2)),
    ("MB/s", record.number("rate", 0)),
    ("of safetensors", record.number("of_safetensors", 2)),
    ("standstill s", record.number("standstill", 3)),
    ("of ours", record.number("share", 2)),
    ("next step + s", record.number("slower", 3)),
]
Save = Callable[[Path], Callable[[], Any] | None]
"""Saves into a folder; what it returns waits for a save that has only begun."""


def main() -> None:
    """Print and save a row for each contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a folder on the disk (default: the system's for temporary files)")
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="of the batch of a step")
    parser.add_argument("--only", nargs="+", help="names of contenders")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    training = Training(int(given.parameters * 1e6), given.rows)
    contenders = build(training)
    if given.only:
        contenders = {name: save for name, save in contenders.items() if name in given.only}
    found: dict[str, list[Times]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for turn in range(given.rounds + 1):  # the first is not counted: it allocates memory that later ones reuse
            for name, save in contenders.items():
                times = measure(save, Path(folder) / "save", training)
                text = f"{times.save:7.2f} s, standstill {times.standstill:.3f} s, next step {times.slower:+.3f} s"
                print(f"round {turn}  {name:22} {text}", flush=True)
                if turn:
                    found[name].append(times)
    rows = [row_of(name, times) for name, times in found.items()]
    saves = {row["name"]: row["save"] for row in rows}
    for row in rows:
        row["of_safetensors"] = saves["safetensors"] / row["save"] if "safetensors" in saves else None
        row["share"] = row["standstill"] / saves["ours"] if "ours" in saves else None
    settings = {"parameters": given.parameters, "rounds": given.rounds, "rows": given.rows}
    settings |= {"threads": torch.get_num_threads(), "step": statistics.median(training.plain)}
    record.save("checkpoint", settings, rows, COLUMNS, "Time to save and flush; see `benchmarks/checkpoint.py`.")


class Times(NamedTuple):
    """Seconds of one save, and the bytes that it wrote."""

    save: float
    standstill: float
    slower: float
    nbytes: int


def measure(save: Save, folder: Path, training: Training) -> Times:
    """Save, then run a step; both times start at the call."""
    plain = training.timed_step()
    training.plain.append(plain)
    os.sync()
    begin = time.perf_counter()
    wait = save(folder)
    if wait is None:
        flush(folder)
    standstill = seconds = time.perf_counter() - begin
    step = training.timed_step()
    if wait is not None:
        wait()
        seconds = time.perf_counter() - begin
    waited = training.waited()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return Times(seconds, standstill + waited, step - waited - plain, size)


def flush(folder: Path) -> None:
    """Flush every file; a file that was flushed before costs nothing."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def row_of(name: str, times: list[Times]) -> dict[str, Any]:
    """Return the medians of the rounds."""
    save, standstill, slower = (statistics.median(column) for column in list(zip(*times, strict=True))[:3])
    rate = times[-1].nbytes / save / 1e6
    return {"name": name, "save": save, "rate": rate, "standstill": standstill, "slower": slower, "rounds": times}


def layers(parameters: int) -> nn.Module:
    """Return square layers with about so many parameters."""
    width = min(WIDTH, max(int(parameters**0.5), 1))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(parameters // width**2, 1))))


def config(stage: int) -> dict[str, Any]:
    """Return a ds_config that both engines take."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def step(engine: Any, rows: int = 1) -> None:
    """Run one step, which creates Adam's state."""
    engine.backward(engine(torch.ones(rows, next(iter(engine.module.parameters())).shape[1])).square().mean())
    engine.step()


class Training:
    """Our engine, which trains during every save.

    Attributes:
        plain: seconds of steps without a save.
    """

    def __init__(self, parameters: int, rows: int) -> None:
        ours = {**config(1), "checkpoint": {"writer": {"decoupled": True}}, "log_level": "error"}
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= one
        self.parameters, self._rows = parameters, rows
        self.engine = zero_trial.initialize(model=layers(parameters), config=ours)[0]
        self.plain: list[float] = []
        self._before = 0.0
        for _ in range(3):
            step(self.engine, rows)

    def timed_step(self) -> float:
        self._before = self.engine._background.waited
        begin = time.perf_counter()
        step(self.engine, self._rows)
        return time.perf_counter() - begin

    def waited(self) -> float:
        """Return the seconds for which the last step waited for copies."""
        return float(self.engine._background.waited - self._before)


def build(training: Training) -> dict[str, Save]:
    """Return the contenders by name; all hold the same state."""
    engine, parameters = training.engine, training.parameters
    tensors = {name: param.detach() for name, param in engine.module.named_parameters()}
    for name in list(tensors):
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"{kind}.{name}"] = torch.randn_like(tensors[name])

    def save_ours(folder: Path) -> None:
        engine.save_checkpoint(folder, "a", asynchronous=False)

    def begin_ours(folder: Path) -> Callable[[], Any]:
        engine.save_checkpoint(folder, "a")
        return engine.wait_for_checkpoint  # type: ignore[no-any-return]

    def save_torch(folder: Path) -> None:
        folder.mkdir()
        torch.save(tensors, folder / "a.pt")

    def save_safetensors(folder: Path) -> None:
        folder.mkdir()
        save_file(tensors, folder / "a.safetensors")

    def save_dcp(folder: Path) -> None:
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)

    def begin_dcp(folder: Path) -> Callable[[], Any]:
        future: Any = dcp.async_save(dict(tensors), checkpoint_id=folder)
        return future.result  # type: ignore[no-any-return]

    contenders: dict[str, Save] = {
        "ours": save_ours,
        "ours, in background": begin_ours,
        "safetensors": save_safetensors,
        "torch.save": save_torch,
        "torch DCP": save_dcp,
        "torch DCP, async_save": begin_dcp,
    }
    if find_spec("deepspeed") is not None:
        contenders["DeepSpeed"] = deepspeed_saver(parameters)
    return contenders


def deepspeed_saver(parameters: int) -> Save:
    """Return DeepSpeed's save of an engine at ZeRO stage 1."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine = deepspeed.initialize(model=layers(parameters), config=config(1))[0]
    step(engine)

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder), "a")

    return save


if __name__ == "__main__":
    main()
