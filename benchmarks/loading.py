"""Memory and bytes while a model is built, loaded and saved: the peak of each rank compared with
its shards and its largest group.

    python benchmarks/loading.py --megabytes 1200 --ranks 4
    python benchmarks/loading.py --megabytes 16 --ranks 2 --cases weights-3 save-3  # quick

Each case runs in fresh processes, one per rank, on a stack of equal blocks in fp32 (or bf16) whose
values are in one safetensors file. `peak` is the most by which a rank's resident memory grew during
the case (the kernel's VmHWM, reset before it), `after` the growth at its end. `shards` is what a
rank keeps of parameters and masters (gradients have no memory before the first
backward), and `group` the largest group's full parameters; `ratio` is peak over their sum.
`bytes read` are those of all ranks (rchar of the kernel) over the size of the file. Memory and
bytes do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import zero_trial
from benchmarks import record
from benchmarks.processes import free_port
from zero_trial.checkpoint.format import safetensors_header, tensor_bytes
from zero_trial.comm import init_distributed

BLOCKS = 16
CASES = (
    "plain-3",
    "init-3",
    "weights-3",
    "weights-3-bf16",
    "weights-2",
    "weights-1",
    "weights-0",
    "state-3",
    "save-3",
)
PRETRAINED = ("built-3", "pretrained-3")  # by from_pretrained; they need transformers
COLUMNS: list[record.Column] = [
    ("case", lambda row: row["case"]),
    ("shards MB", record.number("shards")),
    ("group MB", record.number("group")),
    ("peak MB", record.number("peak")),
    ("ratio", record.number("ratio", 3)),
    ("ratio on rank 0", record.number("ratio_0", 3)),
    ("after MB", record.number("after")),
    ("bytes read / file", record.number("read", 4)),
    ("s", record.number("seconds")),
]
NOTE = """The worst of all ranks but for "ratio on rank 0". Cases: how the engine got its model (`plain`: built whole and loaded with
load_state_dict; `init`: built under zero.Init; `weights`: on the meta device with
weights=; `built`: a Llama of transformers by from_pretrained, whole on each rank; `pretrained`: the same under zero.Init, where
rank 0 maps the file), or what an engine with its model did (`state`: the state dict on rank 0, which holds it then; `save`:
save_16bit_model; of their own memory, without the shards that ranks of a host read in place); then the ZeRO stage."""


class Stack(nn.Module):
    """Blocks of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(BLOCKS)
        )


def width_of(megabytes: float) -> int:
    """The width of a Stack of so many megabytes in fp32."""
    return max(8, int((megabytes * 1e6 / 4 / BLOCKS / 8) ** 0.5) // 8 * 8)


def write_file(path: Path, width: int) -> None:
    """Write a file with the values of a Stack, one tensor at a time."""
    with torch.device("meta"):
        model = Stack(width)
    write_values(path, model)


def write_pretrained(folder: Path, width: int) -> None:
    """Write a Llama that is as large as a Stack, for from_pretrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = max(64, int(width / 2**0.5) // 64 * 64)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=BLOCKS, tie_word_embeddings=True, dtype="float32", **sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    write_values(folder / "model.safetensors", model)


def write_values(path: Path, model: nn.Module) -> None:
    """Write random values for a model on the meta device, one tensor at a time."""
    params = dict(model.named_parameters())
    facts = ((name, param.dtype, param.shape) for name, param in params.items())
    with path.open("wb") as file:
        file.write(safetensors_header(facts, {"format": "pt"}))
        for number, param in enumerate(params.values()):
            values = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            file.write(tensor_bytes(values))
        file.flush()
        os.fsync(file.fileno())  # the kernel keeps dirty pages in memory


def status(key: str) -> float:
    """Megabytes of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e6


def chars_read() -> int:
    """Bytes that this process has read from files, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split()[1])


class OwnPeak:
    """The most by which this process's own memory grows inside a block, sampled every millisecond.

    Shards that ranks of a host read in place are in memory once, but RssShmem and VmHWM count them
    in each rank. Here they count once.
    """

    def __init__(self, what: str = "RssAnon") -> None:
        self._what = what

    def now(self) -> float:
        return status(self._what)

    def __enter__(self) -> OwnPeak:
        self._before = self.now()
        self.megabytes = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.001):
            self.megabytes = max(self.megabytes, self.now() - self._before)


def acts(case: str, width: int, folder: Path) -> Iterator[Callable[[], Any]]:
    """Return the engine's start, and the action after it if the case has one."""
    how, stage, *precision = case.split("-")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": int(stage)},
        "bf16": {"enabled": "bf16" in precision},
    }
    held: list[Any] = []

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Stack(width)

    def start() -> Any:
        if how == "plain":
            model, given = Stack(width), {}
            model.load_state_dict(load_file(folder / "model.safetensors"))
        elif how == "init":
            with zero_trial.zero.Init():
                model, given = Stack(width), {}
        elif how in ("built", "pretrained"):
            import transformers
            from transformers.integrations import HfDeepSpeedConfig

            # from_pretrained uses zero.Init while this object lives
            held.append(HfDeepSpeedConfig(config) if how == "pretrained" else None)
            model, given = transformers.LlamaForCausalLM.from_pretrained(folder), {}
        else:
            model, given = on_meta(), {"weights": folder}
        held.append(zero_trial.initialize(model=model, config=config, **given)[0])
        return held[-1]

    yield start
    if how == "state":
        yield lambda: held[-1]._zero3_consolidated_16bit_state_dict()
    if how == "save":
        yield lambda: held[-1].save_16bit_model(folder / "saved")


def work(case: str, width: int, folder: Path) -> None:
    """Run one rank, and print its row."""
    torch.set_num_threads(1)
    init_distributed()
    start(case)
    last: Callable[[], Any] | None = None
    for act in acts(case, width, folder):
        if last is not None:
            last()
        last = act
    assert last is not None
    gc.collect()
    before, read, began = status("VmRSS"), chars_read(), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    alone = case.startswith(("state", "save"))
    own = OwnPeak()
    with own if alone else nullcontext():
        kept = last()
    seconds = time.perf_counter() - began
    peak = own.megabytes if alone else status("VmHWM") - before
    row = {"peak": peak, "read": chars_read() - read, "seconds": seconds}
    gc.collect()
    row["after"] = status("VmRSS") - before
    del kept
    print(json.dumps(row), flush=True)
    os._exit(0)


def start(case: str) -> None:
    """Build a small engine of the same kind first: what a process loads once does not count."""
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder) / "model.safetensors", 8)
        with torch.device("meta"):
            small = Stack(8)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": int(case.split("-")[1])},
        }
        engine = zero_trial.initialize(model=small, config=config, weights=folder)[0]
        engine.module_state_dict()
        engine.destroy()
        if case in PRETRAINED:
            importlib.import_module("zero_trial.as_deepspeed")

            write_pretrained(Path(folder), 8)
            for act in acts(case, 8, Path(folder)):
                act().destroy()


def run_case(case: str, ranks: int, width: int, folder: Path, size: int) -> dict[str, Any]:
    """Return a row of the table."""
    fixed = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, __file__, "--work", case, "--width", str(width), "--folder", str(folder)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {key: str(value) for key, value in {**fixed, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate(timeout=1800)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case}: a rank ended with {[process.returncode for process in processes]}")
    rows = [json.loads(next(line for line in answer.splitlines() if line.startswith("{"))) for answer in answers]
    how, stage, *precision = case.split("-")
    with torch.device("meta"):
        numel = sum(param.numel() for param in Stack(width).parameters()) if case in CASES else size // 4
    width_bytes = 2 if precision else 4
    full, cut = numel * width_bytes / 1e6, ranks if stage == "3" else 1
    group = full / BLOCKS if stage == "3" else full / 4  # a bucket is a quarter of the model
    starts = how not in ("state", "save")
    shards = full / cut + (numel * 4 / ranks / 1e6 if precision else 0.0) if starts else 0.0
    peaks = [each["peak"] for each in rows]
    row: dict[str, Any] = {"case": case, "shards": shards, "group": group, "peak": max(peaks[1:])}
    row |= {"ratio": max(peaks[1:]) / (shards + group)}
    row |= {"ratio_0": peaks[0] / (shards + group + (full if how == "state" else 0.0))}
    row |= {"after": max(each["after"] for each in rows), "read": sum(each["read"] for each in rows) / size}
    row |= {"seconds": max(each["seconds"] for each in rows)}
    return row


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1200, help="of the safetensors file")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES + PRETRAINED)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    parser.add_argument("--name", default="loading", help="of the files in benchmarks/results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.width, args.folder)
        return
    width = width_of(args.megabytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        rows = []
        for case in args.cases:
            folder = Path(place) / ("pretrained" if case in PRETRAINED else "stack")
            file = folder / "model.safetensors"
            if not folder.exists():
                folder.mkdir()
                if case in PRETRAINED:
                    write_pretrained(folder, width)
                else:
                    write_file(file, width)
            rows.append(run_case(case, args.ranks, width, folder, file.stat().st_size))
            print(json.dumps(rows[-1]), flush=True)
    settings = {"megabytes": args.megabytes, "ranks": args.ranks, "blocks": BLOCKS, "width": width}
    record.save(args.name, settings, rows, COLUMNS, NOTE)


if __name__ == "__main__":
    main()
