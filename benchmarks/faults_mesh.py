"""Faults between ranks: collectives that do not match, a rank that never starts, one that is slow,
and two writers of one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults_runs import Result, Workbench
from tests.support.fresh_ranks import Ended, fresh_ranks, run_fresh

TIMEOUT = 2.0
PROMISED = 30.0  # seconds until every rank has an error


def mismatch(kind: str, victim: int) -> str:
    """Run a few good steps, then let one rank deviate; return this rank's error message."""
    import zero_trial
    from zero_trial.comm import MeshShape, build_mesh
    from zero_trial.errors import MeshError

    env = zero_trial.init_distributed(timeout=60)
    mesh = build_mesh(MeshShape(shard=env.world_size), timeout=TIMEOUT)
    comm, size = mesh.shard, env.world_size
    for step in range(3):
        mesh.heartbeat.step = step
        gather(comm, 8 * size, "weights")
    mesh.heartbeat.step = 3
    try:
        if env.rank == victim:
            deviate(kind, comm, size)
        for _ in range(2):
            gather(comm, 8 * size, "weights")
            comm.reduce_scatter(torch.ones(8 * size), torch.empty(8), "grads").wait()
        if kind == "skipped":  # the others wait for one more
            time.sleep(TIMEOUT + 1)
    except MeshError as error:
        return str(error)
    return ""


def gather(comm: Any, numel: int, label: str, dtype: torch.dtype = torch.float32) -> None:
    """Run an all-gather and wait for it."""
    comm.all_gather(torch.empty(numel, dtype=dtype), torch.ones(numel // comm.size, dtype=dtype), label).wait()


def deviate(kind: str, comm: Any, size: int) -> None:
    """Run what one rank does instead of, or before, the collective of all."""
    deviations: dict[str, Callable[[], Any]] = {
        "skipped": lambda: comm.reduce_scatter(torch.ones(8 * size), torch.empty(8), "grads").wait(),
        "another size": lambda: gather(comm, 24 * size, "weights"),
        "another kind": lambda: comm.all_reduce(torch.ones(8 * size), "weights").wait(),
        "another name": lambda: gather(comm, 8 * size, "biases"),
        "another dtype": lambda: gather(comm, 8 * size, "weights", torch.float64),
        "one that no one else makes": lambda: comm.gather_json("facts", "facts"),
    }
    deviations[kind]()


KINDS = ("skipped", "another size", "another kind", "another name", "another dtype", "one that no one else makes")


def mismatched(workbench: Workbench, count: int) -> Iterator[Result]:
    """F10: one rank calls a different collective than the others."""
    for number in range(count):
        kind, size = KINDS[number % len(KINDS)], 2 + number % 2
        victim = workbench.chance.randrange(size)
        begin = time.monotonic()
        ended = run_fresh(size, mismatch, kind, victim, limit=PROMISED + 30)
        seconds = time.monotonic() - begin
        yield Result(kind, not (why := silent(ended, victim)), seconds, f"{kind}, {size} ranks: {why}" if why else "")


def silent(ended: list[Ended], victim: int) -> str:
    """Return what the ranks' errors lack: each waiting rank must raise one with rank, operation
    and step."""
    for rank, end in enumerate(ended):
        if end.code != 0:
            return f"rank {rank} ended with {end.code} {end.error.strip()[-200:]}"
        if rank != victim and not end.value:
            return f"rank {rank} has got no error"
        if end.value and not (f"rank {rank}, step 3, " in end.value and " over shard" in end.value):
            return f"rank {rank} says: {end.value[:200]}"
    return ""


def join(absent: int, timeout: float) -> str:
    """Join the world on all ranks but one."""
    import zero_trial
    from zero_trial.errors import MeshError

    if int(os.environ["RANK"]) == absent:
        time.sleep(timeout + 15)
        return ""
    try:
        zero_trial.init_distributed(timeout=timeout)
    except MeshError as error:
        return str(error)
    return "no error"


def never_started(workbench: Workbench, count: int) -> Iterator[Result]:
    """F11: one rank never joins."""
    for number in range(count):
        size, timeout = 2 + number % 2, 3.0
        absent = workbench.chance.randrange(size)
        with fresh_ranks(size, join, absent, timeout, limit=60) as started:
            ended = started.wait()
        others = [end for rank, end in enumerate(ended) if rank != absent]
        seconds = max(end.seconds for end in others)
        named = all(f"rank {absent}" in str(end.value).partition(":")[2] for end in others)
        why = "" if named else f"rank {absent} of {size} not named: {[end.value for end in others]}"
        yield Result(f"rank {'0' if absent == 0 else '1 or more'}", not why, seconds, why)


def hold(folder: str) -> str:
    """Lock a run's folder until killed; a second process gets the holder's name."""
    from zero_trial.errors import ConfigError
    from zero_trial.trial.runs.run_layout import lock_run

    try:
        with lock_run(Path(folder)):
            Path(folder, "is held").touch()
            time.sleep(60)
    except ConfigError as error:
        return str(error)
    return "held"


def two_writers(workbench: Workbench, count: int) -> Iterator[Result]:
    """F15: a second writer of one run folder is refused; a killed one leaves no lock behind."""
    for number in range(count):
        folder = workbench.folder / f"held-{number}"
        folder.mkdir()
        with fresh_ranks(1, hold, str(folder), limit=60) as first:
            while not (folder / "is held").exists() and first.processes[0].is_alive():
                time.sleep(0.02)
            (second,) = run_fresh(1, hold, str(folder), limit=10)
            why = "" if "another process is running in this folder" in str(second.value) else f"second: {second}"
            (folder / "is held").unlink()
            first.kill(0)
            first.wait()
        with fresh_ranks(1, hold, str(folder), limit=20) as third:
            while not (folder / "is held").exists() and third.processes[0].is_alive():
                time.sleep(0.02)
            why = why or ("" if (folder / "is held").exists() else "the lock of a killed process holds")
        yield Result("one folder", not why, second.seconds, why)
