"""Optimizer state on NVMe compared with state in memory and with the disk's own speed; with
``--params``, the parameters.

    python benchmarks/offload.py --folder /mnt/nvme --parameters 50 --rounds 5
    python benchmarks/offload.py --folder /mnt/nvme --parameters 50 --params --stages 0 2 3
    python benchmarks/offload.py --parameters 1 --rounds 1 --buffers 2  # quick: moves about 150 MB

One rank trains a stack of square linear layers in bf16 with AdamW. `memory` and `nvme` are the time
of `engine.step()` alone, with state in memory and in a file; `disk` is the same traffic through the
same buffers without an update, and so the least that a step can take; `read` and `write`
are the disk alone in one direction, in the same requests. All are medians over rounds that take
turns, in one process.

If upstream deepspeed is installed, it is measured in the same rounds: the step of its optimizer
offload to ``cpu`` at stages 2 and 3 and to ``nvme`` at stage 3. The settings then list the bytes of
tensors that each keeps between steps, per parameter, or why it was not measured: each is first
tried in a process of its own, which has ``--peer-seconds`` to compile operators and run a step.

With ``--params``: one forward and backward at each of ``--stages`` that frees each block after use,
on ``--rows`` rows, with the parameters in a file; `memory` is the same with all in memory, in a
process of its own before and one after: if parameters are offloaded, the allocator of the whole
process returns freed blocks. `disk` is the same reads without computation; `nvme / larger` is over
the larger of `memory` and `disk`, which is the time of a perfect overlap. DeepSpeed's parameter
offload to ``cpu`` and ``nvme``, and its engine with all in ``memory``, also run in separate
processes before and after, with the row's number of buffers; its ratio is over the larger of its
own `memory` and the row's `disk`. A cell says if DeepSpeed cannot run a case, or silently leaves
the parameters in memory.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

sys.path.insert(0, str(Path(__file__).parents[1]))

import zero_trial
from benchmarks import processes, record
from benchmarks.worker import persistent_bytes
from zero_trial.sharding.offload.homes import OffloadedHome
from zero_trial.sharding.offload.region_file import RegionFile, Transfer
from zero_trial.sharding.offload.update_store import UpdateStore

WIDTH = 2048  # of a layer, if the model has that many parameters
PEERS = (("cpu", 2), ("cpu", 3), ("nvme", 3))  # DeepSpeed's optimizer offload: where to, ZeRO stage
PARAMETER_PEERS = ("memory", "cpu", "nvme")  # where DeepSpeed keeps parameters
COLUMNS: list[record.Column] = [
    ("buffers", lambda row: str(row["buffers"])),
    ("elements each", lambda row: f"{row['elements']:,}"),
    ("memory ms", record.number("memory")),
    ("nvme ms", record.number("nvme")),
    ("disk ms", record.number("disk")),
    ("nvme / larger", record.number("nvme_by_larger", 2)),
    ("nvme MB/s", record.number("rate", 0)),
    ("read MB/s", record.number("read_rate", 0)),
    ("write MB/s", record.number("write_rate", 0)),
    *((f"DeepSpeed {device} {stage} ms", record.number(f"DeepSpeed {device} {stage}")) for device, stage in PEERS),
]
PARAMETER_COLUMNS: list[record.Column] = [
    ("stage", lambda row: str(row["stage"])),
    ("buffers", lambda row: str(row["buffers"])),
    ("MB read", record.number("megabytes", 0)),
    ("memory ms", record.number("memory")),
    ("nvme ms", record.number("nvme")),
    ("disk ms", record.number("disk")),
    ("nvme / memory", record.number("nvme_by_memory", 2)),
    ("nvme / larger", record.number("nvme_by_larger", 2)),
    ("MiB in the file", record.number("shards", 1)),
    ("MiB of buffers", record.number("ring", 1)),
    *((f"DeepSpeed {place} ms", record.number(f"DeepSpeed {place}")) for place in PARAMETER_PEERS),
    ("DeepSpeed nvme / larger", record.number("deepspeed_by_larger", 2)),
    ("DeepSpeed MB read", record.number("deepspeed_megabytes", 0)),
]


def main() -> None:
    """Print and save a row for each number of buffers."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", default=".", help="a folder on the disk")
    options.add_argument("--parameters", type=float, default=50, help="millions")
    options.add_argument("--buffers", type=int, nargs="+", default=[1, 2, 3, 4])
    options.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a buffer at most")
    options.add_argument("--queue-depth", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--params", action="store_true", help="parameters instead of optimizer state")
    options.add_argument("--rows", type=int, default=256, help="of a micro-batch, with --params")
    options.add_argument("--stages", type=int, nargs="+", default=[3], help="with --params")
    options.add_argument("--peer-seconds", type=float, default=900, help="for DeepSpeed to compile and do a step")
    options.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)  # device and stage of the one to try
    options.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # stage of passes with all in memory
    given = options.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # from reading attributes of all live objects
    hidden = ("folder", "buffers", "params", "stages", "peer_seconds", "peer", "alone")
    if given.peer:
        (deepspeed_passes if given.params else deepspeed_engine)(given, given.peer[0], int(given.peer[1]))
        return
    if given.alone is not None:
        kept_engine = parameter_engine(given, 0, given.alone)
        passes(kept_engine, given.rows)
        print(json.dumps({"seconds": [passes(kept_engine, given.rows) for _ in range(given.rounds)]}))
        return
    if given.params:
        found = []
        for stage in given.stages:
            reasons = why_not_parameters(given, stage)
            found += [measure_parameters(given, count, stage, reasons) for count in given.buffers]
        kept = {key: value for key, value in vars(given).items() if key not in hidden}
        kept |= {"threads": torch.get_num_threads(), "direct": found[0]["direct"]}
        note = "Time of a forward and a backward in bf16; see `benchmarks/offload.py`."
        record.save("offload_params", kept, found, PARAMETER_COLUMNS, note)
        return
    peers, facts = deepspeed_engines(given)
    rows = [measure(given, count, peers) for count in given.buffers]
    settings = {key: value for key, value in vars(given).items() if key not in (*hidden, "rows")}
    settings |= {"threads": torch.get_num_threads(), "direct": rows[0]["direct"]}
    note = "Time of `engine.step()` with bf16 parameters and AdamW; see `benchmarks/offload.py`."
    record.save("offload", settings | facts, rows, COLUMNS, note)


def measure(given: argparse.Namespace, buffers: int, peers: dict[str, Any]) -> dict[str, Any]:
    """Return one row: medians over rounds."""
    here, away = engine(given, 0), engine(given, buffers)
    store = away.optimizer.store if away.optimizer is not None else None
    if not isinstance(store, UpdateStore) or not isinstance(store.homes.masters, RegionFile):
        raise SystemExit("nothing was offloaded")
    ways: dict[str, Callable[[], float]] = {
        "memory": lambda: step(here),
        "nvme": lambda: step(away, store),
        "disk": lambda: traffic(store),
    }
    ways |= {name: functools.partial(step, peer) for name, peer in peers.items()}
    file = store.homes.masters
    step(away, store)  # the first step makes the moments
    before = file.bytes_read + file.bytes_written
    step(away, store)
    moved = file.bytes_read + file.bytes_written - before
    times: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {"read": [], "write": []}
    for _ in range(given.rounds):
        for name, way in ways.items():
            times[name].append(way())
        for name, found_rates in rates.items():
            found_rates.append(one_way(store, name, moved // 2))
    found = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    row = {
        "buffers": buffers,
        "elements": max(piece.numel for piece in away.optimizer.pieces),
        **found,
        "nvme_by_larger": found["nvme"] / max(found["memory"], found["disk"]),
        "rate": moved / found["nvme"] / 1e3,
        "read_rate": statistics.median(rates["read"]) / 1e6,
        "write_rate": statistics.median(rates["write"]) / 1e6,
        "direct": file.direct,
    }
    for engine_of_row in (here, away):
        engine_of_row.destroy()
    return row


def deepspeed_engines(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return DeepSpeed's engines that offload the optimizer's state, if it is installed; and facts
    for the record: bytes of tensors per parameter of each and of ours in memory, or why one is
    unavailable."""
    if importlib.util.find_spec("deepspeed") is None:
        return {}, {}
    ours, kept = weighed(given, functools.partial(zero_trial.initialize, config=adam_config(given, 0)))
    facts: dict[str, Any] = {"bytes per parameter in memory": kept}
    ours.destroy()
    del ours
    found: dict[str, Any] = {}
    for device, stage in PEERS:
        name = f"DeepSpeed {device} {stage}"
        why = why_not(given, device, stage)
        if why is not None:
            facts[name] = why
            continue
        found[name], facts[f"bytes per parameter, {name}"] = deepspeed_engine(given, device, stage)
    return found, facts


def why_not(given: argparse.Namespace, device: str, stage: int) -> str | None:
    """Let DeepSpeed run a small step in a process of its own, and return what went wrong.

    DeepSpeed compiles its operators for minutes at their first use, and waits forever for the lock
    of a build that was killed. If this process is killed, remove the locks that it has left.
    """
    begun = time.time()
    # it leaves parameters below 1 MiB in memory
    size = ["--params", "--parameters", str(2e-6 * WIDTH**2)] if given.params else ["--parameters", "1"]
    words = [*size, "--folder", str(Path(given.folder).absolute()), "--peer", device, str(stage)]
    words += ["--rounds", "1", "--buffers", "5"]
    ended = processes.run([sys.executable, str(Path(__file__).absolute()), *words], given.peer_seconds)
    if ended.code == 0:
        return None
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = [lock for lock in root.rglob("lock") if lock.is_file()]
    for lock in locks:
        if lock.stat().st_mtime >= begun:
            lock.unlink()
        else:
            print(f"{lock} is of a build that runs, or was killed: then remove it", file=sys.stderr)
    print("\n".join(ended.tail()), file=sys.stderr)
    return ended.why()


def deepspeed_engine(given: argparse.Namespace, device: str, stage: int) -> tuple[Any, float]:
    """Return DeepSpeed's engine with optimizer state on ``device``, and its bytes per parameter."""
    deepspeed = deepspeed_of_one_rank()
    offload = {"device": device, "nvme_path": str(Path(given.folder).absolute()), "buffer_count": 4}
    config = adam_config(given, 0) | {"zero_optimization": {"stage": stage, "offload_optimizer": offload}}
    return weighed(given, functools.partial(deepspeed.initialize, config=config))


def deepspeed_of_one_rank() -> Any:
    """Import DeepSpeed for a rank that is alone and computes on the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in rank.items():
        os.environ.setdefault(name, value)
    return importlib.import_module("deepspeed")


def why_not_parameters(given: argparse.Namespace, stage: int) -> dict[str, str] | None:
    """Return why DeepSpeed cannot keep parameters in a place at this stage; None without it."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    tried = {place: why_not(given, place, stage) for place in PARAMETER_PEERS}
    return {place: why for place, why in tried.items() if why is not None}


def deepspeed_passes(given: argparse.Namespace, place: str, stage: int) -> None:
    """Print the seconds of DeepSpeed's passes, and the bytes that one reads from the disk with its
    step, in a process of its own. Two passes before them record the order of the blocks."""
    deepspeed = deepspeed_of_one_rank()
    model = linear_layers(given.parameters, 2)
    config = deepspeed_parameters(given, place, stage, next(model.parameters()).numel())
    engine = deepspeed.initialize(model=model, config=config)[0]
    if left := left_in_memory([*model.parameters()], place):
        raise SystemExit(f"takes offload_param at stage {stage}, and leaves {left} parameters where they were")
    for _ in range(2):
        passes(engine, given.rows)
    before = bytes_from_disk()
    times = [passes(engine, given.rows) for _ in range(given.rounds)]
    read = (bytes_from_disk() - before) / given.rounds / 1e6
    print(json.dumps({"seconds": times, "megabytes": read}))


def deepspeed_parameters(given: argparse.Namespace, place: str, stage: int, block: int) -> dict[str, Any]:
    """Return :func:`parameter_engine`'s ds_config in DeepSpeed's keys: a block of ``block``
    elements is freed after each use, and the next one is prefetched."""
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": block,
    }
    if place != "memory":
        zero["offload_param"] = {
            "device": place,
            "nvme_path": str(Path(given.folder).absolute()),
            "buffer_count": given.buffers[0],
            "buffer_size": block,
            "max_in_cpu": 0,
        }
    sgd = {"type": "SGD", "params": {"lr": 1e-4}}
    own = {"optimizer": sgd, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    return adam_config(given, 0) | own | {"zero_optimization": zero}


def left_in_memory(parameters: list[Any], place: str) -> str:
    """Return how many parameters DeepSpeed has not moved to the device of ``offload_param``: "2 of
    3", or nothing. On a CPU rank shards are on ``cpu`` anyway."""
    shards = [getattr(param, "ds_tensor", None) for param in parameters]
    kept = [shard for shard in shards if shard is None or (place, shard.final_location) == ("nvme", None)]
    return f"{len(kept)} of {len(shards)}" if kept and place != "memory" else ""


def bytes_from_disk() -> int:
    """Return what this process has read from disks; the page cache does not count."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def weighed(given: argparse.Namespace, build: Callable[..., tuple[Any, ...]]) -> tuple[Any, float]:
    """Return the engine that ``build`` makes of a model, after a step, and the bytes of tensors
    that it keeps, per parameter."""
    before = persistent_bytes([given])
    model = linear_layers(given.parameters, 1)
    numel = sum(param.numel() for param in model.parameters())
    built = build(model=model)[0]
    step(built)
    return built, round((persistent_bytes([built]) - before) / numel, 2)


def linear_layers(millions: float, least: int) -> nn.Sequential:
    """Return at least ``least`` square linear layers in bf16, with about this many parameters."""
    width = min(WIDTH, max(64, round((millions * 1e6 / least) ** 0.5) // 64 * 64))
    count = max(least, round(millions * 1e6 / width**2))
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)))


def width_of(trained: Any) -> int:
    """Return the number of features of a sample."""
    return int(trained.module[0].in_features)


def engine(given: argparse.Namespace, buffers: int) -> zero_trial.Engine:
    """Return our engine; without buffers its state is in memory."""
    return zero_trial.initialize(model=linear_layers(given.parameters, 1), config=adam_config(given, buffers))[0]


def adam_config(given: argparse.Namespace, buffers: int) -> dict[str, Any]:
    """Return a ds_config for optimizer state in memory, or in a file with this many buffers."""
    zero: dict[str, Any] = {"stage": 1, "sub_group_size": given.sub_group}
    if buffers:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": given.folder, "buffer_count": buffers}
    return {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "aio": {"queue_depth": given.queue_depth},
    }


def step(trained: Any, store: UpdateStore | None = None) -> float:
    """Return the seconds of the update; with a ``store``, until the last byte is written."""
    rows = torch.ones(4, width_of(trained), dtype=torch.bfloat16)
    trained.backward(trained(rows).float().square().mean())
    start = time.perf_counter()
    trained.step()
    if store is not None:
        store.wait()
    return time.perf_counter() - start


def measure_parameters(
    given: argparse.Namespace, buffers: int, stage: int = 3, reasons: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return one row: medians over rounds. ``reasons``: why DeepSpeed cannot keep parameters in a
    place; None: it is not measured."""
    peers: dict[str, Any] = {f"DeepSpeed {place}": why for place, why in (reasons or {}).items()}
    first, second = given.rounds - given.rounds // 2, given.rounds // 2
    before_it = in_memory(given, stage, first)
    able = [] if reasons is None else [place for place in PARAMETER_PEERS if place not in reasons]
    theirs = {place: deepspeed_rounds(given, buffers, place, stage, first) for place in able}
    away = parameter_engine(given, buffers, stage)
    shards = [group.offloaded for group in away.sharded.groups if isinstance(group.offloaded, OffloadedHome)]
    if not shards or not isinstance(file := shards[0].place.region, RegionFile):
        raise SystemExit("no parameters are in a file")
    order = [*reversed(shards), *shards]  # forward, and back
    passes(away, given.rows)  # the order of the blocks is known afterwards
    before = file.bytes_read
    passes(away, given.rows)
    moved = file.bytes_read - before
    times: dict[str, list[float]] = {"memory": before_it, "nvme": [], "disk": []}
    for _ in range(given.rounds):
        times["nvme"].append(passes(away, given.rows))
        times["disk"].append(reads(order))
    times["memory"] += in_memory(given, stage, second)
    found = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    for place, done in theirs.items():
        more = deepspeed_rounds(given, buffers, place, stage, second) if isinstance(done, list) else done
        if isinstance(done, list) and isinstance(more, list):
            seconds = [each for row in done + more for each in row["seconds"]]
            peers[f"DeepSpeed {place}"] = 1e3 * statistics.median(seconds)
            peers |= {"deepspeed_megabytes": done[0]["megabytes"]} if place == "nvme" else {}
        else:
            peers[f"DeepSpeed {place}"] = more
    theirs_away, theirs_here = peers.get("DeepSpeed nvme"), peers.get("DeepSpeed memory")
    if isinstance(theirs_away, float) and isinstance(theirs_here, float):
        peers["deepspeed_by_larger"] = theirs_away / max(theirs_here, found["disk"])
    return {
        "stage": stage,
        "buffers": buffers,
        "megabytes": moved / 1e6,
        **found,
        "nvme_by_memory": found["nvme"] / found["memory"],
        "nvme_by_larger": found["nvme"] / max(found["memory"], found["disk"]),
        "shards": sum(shard.numel * shard.itemsize for shard in shards) / 2**20,
        "ring": sum(buffer.numel() for buffer in shards[0].buffers) / 2**20,
        "direct": file.direct,
        **peers,
    }


def deepspeed_rounds(given: argparse.Namespace, buffers: int, place: str, stage: int, rounds: int) -> list[Any] | str:
    """Return the rows that :func:`deepspeed_passes` prints, or why there is none."""
    if not rounds:
        return []
    words: dict[str, Any] = {"--folder": Path(given.folder).absolute(), "--parameters": given.parameters}
    words |= {"--rows": given.rows, "--rounds": rounds, "--queue-depth": given.queue_depth, "--buffers": buffers}
    typed = [str(word) for pair in words.items() for word in pair]
    command = [sys.executable, str(Path(__file__).absolute()), "--params", *typed, "--peer", place, str(stage)]
    ended = processes.run(command, given.peer_seconds)
    return ended.rows[-1:] if ended.code == 0 else ended.why()


def in_memory(given: argparse.Namespace, stage: int, rounds: int) -> list[float]:
    """Return the seconds of ``rounds`` passes with parameters in memory, in a separate process."""
    if not rounds:
        return []
    words = {"--alone": stage, "--rounds": rounds, "--parameters": given.parameters, "--rows": given.rows}
    command = [sys.executable, str(Path(__file__).absolute()), *(str(word) for pair in words.items() for word in pair)]
    ended = processes.run(command, 600)
    if ended.code != 0:
        raise SystemExit(ended.why())
    return list(ended.rows[-1]["seconds"])


def parameter_engine(given: argparse.Namespace, buffers: int, stage: int) -> zero_trial.Engine:
    """Return our engine; without buffers its parameters are in memory. There is no update: plain
    SGD has no state."""
    model = linear_layers(given.parameters, 2)
    zero: dict[str, Any] = {"stage": stage, "param_persistence_threshold": 0}
    if buffers or stage == 3:
        zero["reshard_after"] = "forward"
    if buffers:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": given.folder,
            "buffer_count": buffers,
            "max_in_cpu": 0,
        }
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        # One block ahead: else a small model is gathered as a whole.
        "zero_optimization": zero | {"prefetch_bucket_size": 1, "module_granularity_threshold": 1},
        "aio": {"queue_depth": given.queue_depth},
    }
    return zero_trial.initialize(model=model, config=config)[0]


def passes(trained: zero_trial.Engine, rows: int) -> float:
    """Return the seconds of a forward and a backward, without the step that follows."""
    start = time.perf_counter()
    trained.backward(trained(torch.ones(rows, width_of(trained), dtype=torch.bfloat16)).float().square().mean())
    seconds = time.perf_counter() - start
    trained.step()
    return seconds


def reads(order: list[OffloadedHome]) -> float:
    """Return the seconds to read all shards in order, as far ahead as there are buffers."""
    into = torch.empty(max(shard.numel for shard in order), dtype=torch.bfloat16)
    start = time.perf_counter()
    for index, shard in enumerate(order):
        for later in order[index : index + 4]:
            later.start_read()
        shard.fetch(into[: shard.numel])
    return time.perf_counter() - start


def traffic(store: UpdateStore) -> float:
    """Return the seconds of a step that updates nothing."""
    start = time.perf_counter()
    for batch in store.batches():
        store.borrow(batch)
        store.give_back(batch, True)
    store.wait()
    return time.perf_counter() - start


def one_way(store: UpdateStore, name: str, nbytes: int) -> float:
    """Return bytes per second of reads or writes through all buffers in turn, in a separate file
    that was written before."""
    buffers = store.buffers
    size = buffers[0].numel() // 4096 * 4096
    offsets = range(0, nbytes, size)
    scratch = RegionFile(
        store.homes.masters.folders if isinstance(store.homes.masters, RegionFile) else [Path()], len(offsets) * size
    )
    for offset in offsets:  # a block's first write costs more
        scratch.write(offset, buffers[0][:size]).wait()
    transfers: list[Transfer] = []
    start = time.perf_counter()
    for number, offset in enumerate(offsets):
        if len(transfers) == len(buffers):
            transfers.pop(0).wait()
        transfers.append(getattr(scratch, name)(offset, buffers[number % len(buffers)][:size]))
    for transfer in transfers:
        transfer.wait()
    seconds = time.perf_counter() - start
    scratch.close()
    return len(offsets) * size / seconds


if __name__ == "__main__":
    main()
