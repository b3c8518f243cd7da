"""Interleaved rounds: every contender once per round, each in fresh processes, so that a slow
minute affects all equally."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from benchmarks.contenders import Workload, missing
from benchmarks.processes import free_port
from zero_trial.util.memory import RANK_MALLOC

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Job:
    """One contender in one dtype, and how long it is measured."""

    name: str
    dtype: str
    workload: Workload
    ranks: int
    threads: int
    accumulation: int
    warmup: int
    steps: int
    timeout_seconds: float = 900.0

    @property
    def label(self) -> str:
        return f"{self.name} {self.dtype}"


class Measured(Protocol):
    """A job: a dataclass of plain values, with a name to print."""

    @property
    def label(self) -> str: ...


J = TypeVar("J", bound=Measured)


class Failed(Exception):
    """A rank of a job failed; the message is the end of the first failed rank's
    log."""


def run_rounds(jobs: Sequence[Job], rounds: int, before: Path | None = None) -> list[dict[str, Any]]:
    """Return rows of medians over ``rounds``, in the order of ``jobs``. Contenders that cannot
    run are reported and skipped.

    A job named ``before-N`` is ``ours-N`` of the checkout ``before``: the same measurement on
    another commit.
    """

    def run(job: Job) -> dict[str, Any]:
        if job.name.startswith("before-"):
            return run_once(replace(job, name=job.name.replace("before", "ours")), checkout_worker(before))
        return run_once(job)

    able = able_jobs({job: missing(job.name, job.dtype) for job in jobs})
    return [_medians(job, rows) for job, rows in take_turns(able, rounds, run).items()]


def able_jobs(reasons: Mapping[J, str | None]) -> list[J]:
    """Return the jobs that can run, and print why the others cannot."""
    for job, reason in reasons.items():
        if reason is not None:
            print(f"skipped  {job.label}: {reason}", flush=True)
    return [job for job, reason in reasons.items() if reason is None]


def take_turns(jobs: Sequence[J], rounds: int, run: Callable[[J], dict[str, Any]]) -> dict[J, list[dict[str, Any]]]:
    """Return each job's result in each round; a job that fails is reported and skipped."""
    results: dict[J, list[dict[str, Any]]] = {job: [] for job in jobs}
    for turn in range(rounds):
        for job in list(results):
            began = time.perf_counter()
            try:
                result = run(job)
            except Failed as error:
                print(f"failed   {job.label}: {error}", flush=True)
                del results[job]
                continue
            results[job].append(result)
            took = time.perf_counter() - began
            line = f"round {turn + 1}/{rounds}  {job.label:27}  {result['wall_ms']:9.2f} ms/step"
            print(f"{line}  ({took:.0f} s)", flush=True)
    return {job: rows for job, rows in results.items() if rows}


def checkout_worker(before: Path | None) -> Path:
    """Return the worker of another checkout."""
    if before is None:
        raise Failed("a contender before-N needs --before CHECKOUT")
    return before.resolve() / "benchmarks" / "worker.py"


def run_once(job: Any, worker: Path = WORKER) -> dict[str, Any]:
    """Start ``worker`` on each rank of a job, wait for all ranks, and return the means of what they
    measured.

    ``job``: a Job, or another dataclass with ranks, threads and timeout_seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result")
        command = [sys.executable, str(worker), json.dumps(asdict(job)), str(output)]
        ranks = [_start(command, job, rank, port, folder) for port in [free_port()] for rank in range(job.ranks)]
        deadline = time.monotonic() + job.timeout_seconds
        try:
            codes = _wait(ranks, deadline)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        if any(codes):
            first = next(index for index, code in enumerate(codes) if code)
            log = Path(folder, f"log.{first}").read_text().strip().splitlines()
            raise Failed(f"rank {first} ended with {codes[first]}\n  " + "\n  ".join(log[-8:]))
        rows = [json.loads(output.with_name(f"result.{rank}").read_text()) for rank in range(job.ranks)]
    joined = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if key != "losses"}
    joined["losses"] = [sum(values) / len(values) for values in zip(*(row["losses"] for row in rows), strict=True)]
    return joined


def answer(join: Callable[[str], None], measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be one rank of :func:`run_once`: read the job from the command line, ``join`` the others, and
    write the result of ``measure``. Ranks and addresses come from the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    job = json.loads(args.job)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job["threads"])
    join(job["name"])
    result = measure(job)
    args.output.with_name(f"{args.output.name}.{dist.get_rank()}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _start(command: list[str], job: Any, rank: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    environment = {
        **RANK_MALLOC,  # as the launcher does, for all contenders
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "LOCAL_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(job.threads),
        "DS_ACCELERATOR": "cpu",
    }
    with Path(folder, f"log.{rank}").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Return exit codes once all have ended, one has failed, or the time is up."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes) or time.monotonic() > deadline:
            return [124 if code is None and time.monotonic() > deadline else code for code in codes]
        time.sleep(0.05)


def _medians(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"name": job.name, "dtype": job.dtype, "rounds": len(rows)}
    for key in rows[0]:
        if key != "losses":
            merged[key] = median(row[key] for row in rows)
    walls = [row["wall_ms"] for row in rows]
    merged |= {"wall_ms_min": min(walls), "wall_ms_max": max(walls), "losses": rows[0]["losses"]}
    return merged
