"""Interleaved rounds: every contender once per round, each in fresh processes, so that a slow
minute hits all alike."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import Workload, missing

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


class Failed(Exception):
    """The ranks of a job did not all end well; the message is the end of what the first one
    wrote."""


def run_rounds(jobs: Sequence[Job], rounds: int, before: Path | None = None) -> list[dict[str, Any]]:
    """Return rows of medians over ``rounds``, in the order of ``jobs``. What cannot run is said and
    left out.

    A job named ``before-N`` is ``ours-N`` of the checkout ``before``: the same measurement on
    another commit.
    """
    results: dict[Job, list[dict[str, Any]]] = {}
    for job in jobs:
        reason = missing(job.name, job.dtype)
        if reason is None:
            results[job] = []
        else:
            print(f"skipped  {job.name} {job.dtype}: {reason}", flush=True)
    for turn in range(rounds):
        for job in list(results):
            began = time.perf_counter()
            try:
                if job.name.startswith("before-"):
                    result = run_once(replace(job, name=job.name.replace("before", "ours")), checkout_worker(before))
                else:
                    result = run_once(job)
            except Failed as error:
                print(f"failed   {job.name} {job.dtype}: {error}", flush=True)
                del results[job]
                continue
            results[job].append(result)
            took = time.perf_counter() - began
            line = f"round {turn + 1}/{rounds}  {job.name:22} {job.dtype}  {result['wall_ms']:9.2f} ms/step"
            print(f"{line}  ({took:.0f} s)", flush=True)
    return [_medians(job, rows) for job, rows in results.items() if rows]


def checkout_worker(before: Path | None) -> Path:
    """Find the worker of another checkout."""
    if before is None:
        raise Failed("a contender before-N needs --before CHECKOUT")
    return before.resolve() / "benchmarks" / "worker.py"


def run_once(job: Any, worker: Path = WORKER) -> dict[str, Any]:
    """Starts the ranks of a job as ``worker`` says, waits for all of them and joins what they
    measured (means over ranks).

    ``job``: a Job, or another dataclass with ranks, threads and timeout_seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result")
        command = [sys.executable, str(worker), json.dumps(asdict(job)), str(output)]
        ranks = [_start(command, job, rank, port, folder) for port in [_free_port()] for rank in range(job.ranks)]
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


def _start(command: list[str], job: Any, rank: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    environment = {
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
    """Exit codes once all have ended, one has failed, or the time is up."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes) or time.monotonic() > deadline:
            return [124 if code is None and time.monotonic() > deadline else code for code in codes]
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _medians(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"name": job.name, "dtype": job.dtype, "rounds": len(rows)}
    for key in rows[0]:
        if key != "losses":
            merged[key] = median(row[key] for row in rows)
    walls = [row["wall_ms"] for row in rows]
    merged |= {"wall_ms_min": min(walls), "wall_ms_max": max(walls), "losses": rows[0]["losses"]}
    return merged
