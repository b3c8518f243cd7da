"""A model of four times a control group's memory limit: planned, refused, trained and killed.

    python benchmarks/offload_limit.py --folder /mnt/nvme
    python benchmarks/offload_limit.py --kinds full --stages 0  # quick: two minutes, 6 GB of disk

Creates a control group with a memory limit (version 1 or 2, if permitted), and starts
``zero-trial plan`` and ``zero-trial run`` inside it. The limit counts everything that these
processes use: the interpreters, the launcher, libraries and the page cache.

full     all parameters are trained in bf16 with AdamW: weights, gradients, fp32 masters and moments
         are 16 bytes per parameter, four times the limit
frozen   the weights alone, 2 bytes per parameter, are four times the limit; small additional
         matrices are trained, as in LoRA
qlora    the same, with weights in 4 bits and double quantization (bitsandbytes)

Each is planned and run at each stage, with everything on NVMe and without offload: the plan must
predict the outcome. ``own`` is the sampled peak of the processes' own memory; ``peak`` is the
group's, page cache included, which the kernel lets grow up to the limit. The plan counts tensors;
the settings list the memory of a process that has only imported torch and zero_trial. Rows of
earlier runs stay in the results until they are measured again. Processes run with
``MALLOC_MMAP_THRESHOLD_`` of 1 MiB, as the guide to offload recommends for tight limits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import record
from zero_trial.checkpoint.format import safetensors_header, tensor_bytes

WIDTHS = {"full": 2048, "frozen": 2048, "qlora": 8192}  # of a layer
RANK = 8  # of the matrices that are trained with a frozen one
SAMPLES = 2  # of a step, on each rank
# per parameter, of what is four times the limit
BYTES = {"full": 16, "frozen": 2, "qlora": 0.5 + (1 + 4 / 256) / 64}
TIMES = {"full": 1, "frozen": 5, "qlora": 24}  # --parameters
COLUMNS: list[record.Column] = [
    ("trained", lambda row: row["kind"]),
    ("stage", lambda row: str(row["stage"])),
    ("offload", lambda row: row["offload"]),
    ("million parameters", record.number("millions", 0)),
    ("limit MiB", record.number("limit", 0)),
    ("planned MiB", record.number("planned", 0)),
    ("plan", lambda row: row["plan"]),
    ("run", lambda row: row["run"]),
    ("own MiB", record.number("own", 0)),
    ("peak MiB", record.number("peak", 0)),
    ("steps", lambda row: str(row["steps"])),
    ("s per step", record.number("seconds", 1)),
]
NOTE = "What is trained against a quarter of its size as memory limit; see `benchmarks/offload_limit.py`."
MODEL = '''
"""Square linear layers that are built without values."""

import copy
import math

import torch
from torch import nn

from zero_trial import DataLoader, ZeroTrial

RANK = %d


class Dense(nn.Module):
    def __init__(self, width, frozen):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, device="meta"), requires_grad=not frozen)

    def forward(self, x):
        return x @ self.weight


class Adapted(nn.Module):
    def __init__(self, base, width):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(RANK, width, device="meta"))
        self.up = nn.Parameter(torch.empty(width, RANK, device="meta"))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def quantized(width, scale):
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(width, width, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    values = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) * scale
    layer.weight.data = values.bfloat16()
    return layer.to("cpu")  # which quantizes


def without_values(layer, width):
    """Copy a quantized layer as a wider one on the meta device. The tables stay."""
    from bitsandbytes.nn import Params4bit

    small = layer.weight.quant_state
    state = copy.deepcopy(small, {id(each): each for each in (small.code, small.state2.code, small.offset)})
    state.shape = torch.Size((width, width))
    state.absmax = torch.empty(width**2 // 64, dtype=torch.uint8, device="meta")
    state.state2.absmax = torch.empty(width**2 // 64 // 256, device="meta")
    packed = torch.empty(width**2 // 2, 1, dtype=torch.uint8, device="meta")
    weight = Params4bit(packed, False, quant_state=state, quant_type="nf4", bnb_quantized=True)
    return copy.deepcopy(layer, {id(layer.weight): weight, id(small): state})


def layers(kind, width, count):
    if kind == "full":
        return nn.Sequential(*(Dense(width, False) for _ in range(count)))
    if kind == "frozen":
        return nn.Sequential(*(Adapted(Dense(width, True), width) for _ in range(count)))
    small = quantized(256, width**-0.5)
    return nn.Sequential(*(Adapted(without_values(small, width), width) for _ in range(count)))


class StackTrial(ZeroTrial):
    def __init__(self, context):
        self.context, hp = context, context.get_hparams()
        model = layers(hp.kind, hp.width, hp.layers)
        self.engine = context.initialize(model=model, weights=context.get_data_config()["weights"])
        self.data = torch.randn(64, hp.width, generator=torch.Generator().manual_seed(1))

    def build_training_data_loader(self):
        return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu())

    def build_validation_data_loader(self):
        return DataLoader(self.data[:2], self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        rows = self.context.to_device(next(dataloader_iter))
        loss = (self.engine(rows) - 1).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        if not math.isfinite(loss.item()):
            raise ValueError("the loss is not finite")
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": (self.engine(next(dataloader_iter)) - 1).float().square().mean()}
'''


def main() -> None:
    """Print and save a row for each run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk")
    options.add_argument("--parameters", type=float, default=400, help="millions; frozen: 5 times, qlora: 24 times")
    options.add_argument("--stages", type=int, nargs="+", default=[0, 3])
    options.add_argument("--kinds", nargs="+", default=list(BYTES), choices=list(BYTES))
    options.add_argument("--offload", nargs="+", default=["nvme", "none"], choices=["nvme", "none"])
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--steps", type=int, default=2, help="the time of the last one counts")
    given = options.parse_args()
    settings = {
        "width": ", ".join(f"{kind} {width}" for kind, width in WIDTHS.items()),
        "ranks": given.ranks,
        "control groups": found_controller().version,
    }
    settings["MiB of a process with torch alone"] = torch_alone()
    rows = []
    for kind in given.kinds:
        layers = round(given.parameters * 1e6 * TIMES[kind] / WIDTHS[kind] ** 2)
        for stage, place in itertools.product(given.stages, given.offload):
            rows.append(measure(given, kind, layers, stage, place == "nvme"))
            print(json.dumps(rows[-1]), flush=True)
            record.save("offload_limit", settings, [*others(rows), *rows], COLUMNS, NOTE)
    wrong = [row for row in rows if (row["plan"], row["run"]) != expected(row)]
    if wrong:
        raise SystemExit(f"not as expected: {wrong}")


def others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of earlier runs that ``rows`` does not replace: all take most of an hour."""
    now = {(row["kind"], row["stage"], row["offload"]) for row in rows}
    known = record.earlier("offload_limit")
    return [row for row in known if (row["kind"], row["stage"], row["offload"]) not in now]


def torch_alone() -> int:
    """Return the MiB of a process that has imported torch and zero_trial."""
    with memory_group(8 << 30) as group:
        group.run([sys.executable, "-c", "import time, torch, zero_trial; time.sleep(1)"])
    return max(group.own) >> 20


def expected(row: dict[str, Any]) -> tuple[str, str]:
    """Return what plan and run should have reported."""
    return ("fits", "trained") if row["offload"] == "nvme" else ("does not fit", "killed")


def measure(given: argparse.Namespace, kind: str, layers: int, stage: int, away: bool) -> dict[str, Any]:
    """Return one row: plan, then run, each in a separate group."""
    parameters = layers * WIDTHS[kind] ** 2
    limit = int(parameters * BYTES[kind] / 4)
    with tempfile.TemporaryDirectory(prefix="zero_trial-limit-") as name:
        work = Path(name)
        write_experiment(work, kind, layers, ds_config(given, kind, stage, away), given.ranks, given.steps)
        command = [sys.executable, "-m", "zero_trial.cli.main"]
        files = [str(work / "const.yaml"), str(work / "model")]
        with memory_group(limit) as group:
            plan = group.run([*command, "plan", *files, "--json"])
            if not plan.stdout.startswith("{"):
                raise SystemExit(f"zero-trial plan ended with {plan.returncode}: {plan.stderr[-3000:]}")
            planned = json.loads(plan.stdout)
        with memory_group(limit) as group:
            start = time.perf_counter()
            run = group.run([*command, "run", *files, "--run-dir", str(work / "run")])
            seconds = time.perf_counter() - start
            own, peak, killed = max(group.own, default=0), group.peak(), group.killed()
        if run.returncode and not killed:
            raise SystemExit(run.stdout[-3000:] + run.stderr[-3000:])
        return {
            "kind": kind,
            "stage": stage,
            "offload": "nvme" if away else "none",
            "millions": parameters / 1e6,
            "limit": limit / 2**20,
            "planned": planned["plan"]["figures"]["total"] / 2**20,
            "limit_of_plan": planned["limit"] / 2**20,
            "plan": "fits" if planned["fits"] and plan.returncode == 0 else "does not fit",
            "run": "trained" if run.returncode == 0 else "killed",
            "own": own / 2**20,
            "peak": peak / 2**20,
            "steps": given.steps,
            "seconds": seconds_per_step(work / "run", SAMPLES * given.ranks),
            "wall": seconds,
        }


def ds_config(given: argparse.Namespace, kind: str, stage: int, away: bool) -> dict[str, Any]:
    """Return the ds_config of a row."""
    zero: dict[str, Any] = {"stage": stage, "module_granularity_threshold": 1}
    of_a_layer = WIDTHS[kind] ** 2
    zero |= {"sub_group_size": 1 << 20, "stage3_prefetch_bucket_size": of_a_layer, "param_persistence_threshold": 0}
    if away or stage == 3:
        zero["reshard_after"] = "forward"
    if away:
        place = {"device": "nvme", "nvme_path": str(given.folder.absolute()), "buffer_count": 3}
        zero |= {"offload_optimizer": place, "offload_param": place | {"max_in_cpu": 0, "buffer_size": of_a_layer}}
    return {
        "train_batch_size": SAMPLES * given.ranks,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def write_experiment(work: Path, kind: str, layers: int, config: dict[str, Any], ranks: int, steps: int) -> None:
    """Write the experiment and its model into ``work``."""
    model = work / "model"
    model.mkdir()
    model.joinpath("model_def.py").write_text(MODEL % RANK)
    model.joinpath("ds_config.json").write_text(json.dumps(config))
    launch = "python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:StackTrial"
    experiment = {
        "name": "limit",
        "entrypoint": launch,
        "resources": {"slots_per_trial": ranks},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": steps}},
        "max_restarts": 0,
        "checkpoint_policy": "none",
        "data": {"ds_config": "ds_config.json", "weights": str(write_weights(work, kind, layers))},
        "hyperparameters": {"width": WIDTHS[kind], "layers": layers, "kind": kind},
    }
    work.joinpath("const.yaml").write_text(json.dumps(experiment))  # JSON is YAML


def write_weights(work: Path, kind: str, layers: int) -> Path:
    """Write the model's first values, one tensor at a time. All bases in 4 bits are equal."""
    width = WIDTHS[kind]
    shapes = {"weight" if kind == "full" else "base.weight": (width, width)}
    shapes |= {"down": (RANK, width), "up": (width, RANK)} if kind != "full" else {}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    if kind == "qlora":
        code: dict[str, Any] = {}
        exec(MODEL % RANK, code)
        state = code["quantized"](width, width**-0.5).state_dict()
        tensors |= {f"base.{name}": value for name, value in state.items() if "quant_" not in name}
    names = [(f"{layer}.{name}", name) for layer in range(layers) for name in tensors]
    path = work / "model.safetensors"
    with path.open("wb") as file:
        entries = ((full, tensors[name].dtype, tuple(tensors[name].shape)) for full, name in names)
        file.write(safetensors_header(entries, {"format": "pt"}))
        for number, (_, name) in enumerate(names):
            values = tensors[name]
            if values.is_meta:
                scale = 0.0 if name == "up" else width**-0.5
                values = torch.randn(values.shape, generator=torch.Generator().manual_seed(number)) * scale
                values = values.bfloat16()
            file.write(tensor_bytes(values))
        file.flush()
        os.fsync(file.fileno())  # pages that are not on the disk yet would count
    return path


def seconds_per_step(run: Path, samples: int) -> float | None:
    """Return the time of the last steps, each of this many samples, from the run's own record; None
    if the run did not get that far."""
    found = None
    for line in (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").is_file() else ():
        event = json.loads(line)
        if event.get("kind") == "train" and "samples_per_second" in event:
            found = samples / float(event["samples_per_second"])
    return found


@dataclass(frozen=True)
class Controller:
    """The folder of groups with a memory limit, and the version's file names; ``own``: the line of
    memory.stat without page cache."""

    version: int
    folder: Path
    limit: str
    peak: str
    own: str


V1 = Controller(1, Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes", "total_rss")
V2 = Controller(2, Path("/sys/fs/cgroup"), "memory.max", "memory.peak", "anon")


def found_controller() -> Controller:
    """Return the controller of this machine. Exit if none is writable."""
    for controller in (V1, V2):
        name = "memory.usage_in_bytes" if controller is V1 else "cgroup.controllers"
        if (controller.folder / name).is_file():
            return controller
    raise SystemExit("no control group for memory is mounted here")


@dataclass(frozen=True)
class MemoryGroup:
    """A group in which commands run. ``own``: samples of its memory without the page cache."""

    folder: Path
    controller: Controller
    own: list[int] = field(default_factory=list)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside the group."""
        enter = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(self.folder / "cgroup.procs")]
        over = threading.Event()
        watch = threading.Thread(target=self._sample, args=(over,))
        watch.start()
        try:
            return subprocess.run(
                [*enter, *command],
                env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
                capture_output=True,
                text=True,
                check=False,
                timeout=1800,
            )
        finally:
            over.set()
            watch.join()

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            lines = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            self.own.extend(int(value) for key, value in lines if key == self.controller.own)

    def peak(self) -> int:
        """Return the group's peak in bytes."""
        return int((self.folder / self.controller.peak).read_text())

    def killed(self) -> bool:
        """Return whether the kernel killed a process of the group because memory ran out."""
        name = "memory.oom_control" if self.controller is V1 else "memory.events"
        lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        return any(key == "oom_kill" and int(count) > 0 for key, count in lines)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Create a group with a limit in bytes; remove it when its processes are gone."""
    controller = found_controller()
    folder = controller.folder / f"zero_trial-limit-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / controller.limit).write_text(str(limit))
    except OSError as fault:
        raise SystemExit(f"no control group can be made here: {fault}") from fault
    try:
        yield MemoryGroup(folder, controller)
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # a process is ending
                time.sleep(0.1)


if __name__ == "__main__":
    main()
