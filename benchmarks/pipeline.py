"""Step time of pipelines over the ideal with bubble: each schedule of ours, DeepSpeed's
PipelineModule and torch.distributed.pipelining.

python benchmarks/pipeline.py --rounds 5
python benchmarks/pipeline.py --ranks 2 --contender ours-1f1b ours-zb_h1 --round 1 --step 2  # quick
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pipeline_worker import CHUNKS, Times, missing
from benchmarks.record import Column, number, save
from benchmarks.rounds import able_jobs, run_once, take_turns
from zero_trial.pipeline.lowering import lower
from zero_trial.pipeline.schedule import build
from zero_trial.pipeline.simulator import Costs, validate

WORKER = Path(__file__).with_name("pipeline_worker.py")
OURS = [f"ours-{name}" for name in ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v")]
CONTENDERS = [*OURS, "torch-gpipe", "torch-1f1b", "torch-interleaved", "torch-zb_v", "deepspeed"]
NOTE = """Layers sleep instead of computing, so that ranks that share cores do not slow each other down and only the schedule
is measured; "milliseconds" are a stage's forward, its input gradient and its weight gradient. "Ideal" is the time of
the schedule with its bubble if messages, the optimizer and Python cost nothing (for DeepSpeed: of 1F1B). "Over ideal"
is the measured step divided by that. "Over 1F1B's ideal" compares schedules: a value below 1 is faster than any 1F1B.
The measured bubble is the part of the step in which a rank does not sleep in a layer. Medians over interleaved rounds,
each in fresh processes; each step counts with its slowest rank. A sleep is never shorter than requested; the column
"sleep" shows how much longer it is on this machine, next to the machine's load."""
COLUMNS: list[Column] = [
    ("pipeline", lambda row: row["name"]),
    ("stages", lambda row: str(row["ranks"])),
    ("micro-batches", lambda row: str(row["micro_batches"])),
    ("ms/step", number("wall_ms")),
    ("min to max", lambda row: f"{row['wall_ms_min']:.1f} to {row['wall_ms_max']:.1f}"),
    ("ideal ms", number("ideal_ms")),
    ("over ideal", number("over_ideal", 3)),
    ("best round over ideal", number("best_over_ideal", 3)),
    ("over 1F1B's ideal", number("over_1f1b", 3)),
    ("bubble, theory %", number("bubble_theory")),
    ("bubble, measured %", number("bubble_measured")),
]


@dataclass(frozen=True)
class PipelineJob:
    """One contender on as many stages as ranks."""

    name: str
    ranks: int
    micro_batches: int
    times: Times
    warmup: int
    steps: int
    realtime: bool = False
    threads: int = 1
    timeout_seconds: float = 300.0

    @property
    def label(self) -> str:
        return f"{self.name} {self.ranks} stages"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help=f"default: {' '.join(CONTENDERS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--milliseconds", type=float, nargs=3, default=[10, 10, 10], metavar=("F", "I", "W"), help="of a stage"
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="ranks go before all other processes while they are measured (Linux, root)",
    )
    parser.add_argument("--name", default="pipeline", help="of the files in benchmarks/results")
    args = parser.parse_args()
    times = Times(*(value / 1e3 for value in args.milliseconds))
    jobs = [
        PipelineJob(name, ranks, args.micro_batches, times, args.warmup, args.steps, args.realtime)
        for ranks in args.ranks
        for name in args.contenders
    ]
    load = os.getloadavg()[0]
    able = able_jobs({job: missing(job.name) for job in jobs})
    found = take_turns(able, args.rounds, lambda job: run_once(job, WORKER))
    rows = [row_of(job, results) for job, results in found.items()]
    settings = {key: value for key, value in vars(args).items() if key not in ("contenders", "name")}
    settings["sleep"] = f"{1e3 * oversleep(times.forward / 2):.3f} ms longer than asked"
    settings["load"] = f"{load:.1f} processes wanted a core at the start, {os.getloadavg()[0]:.1f} at the end"
    save(args.name, settings, rows, COLUMNS, NOTE)


def row_of(job: PipelineJob, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a job with the theoretical time of its schedule."""
    walls = [result["wall_ms"] for result in results]
    schedule = "1f1b" if job.name == "deepspeed" else job.name.partition("-")[2]
    ideal, bubble = theory(schedule, job)
    wall, busy = median(walls), 1e3 * job.micro_batches * job.times.total
    return {
        **asdict(job),
        "rounds": len(results),
        "wall_ms": wall,
        "wall_ms_min": min(walls),
        "wall_ms_max": max(walls),
        "ideal_ms": ideal,
        "over_ideal": wall / ideal,
        "best_over_ideal": min(walls) / ideal,
        "over_1f1b": wall / theory("1f1b", job)[0],
        "bubble_theory": 100 * bubble,
        "bubble_measured": 100 * (1 - busy / wall),
        "losses": results[0]["losses"],
    }


def theory(schedule: str, job: PipelineJob) -> tuple[float, float]:
    """Return milliseconds of a step and its bubble, simulated with free messages."""
    chunks, times = CHUNKS.get(schedule, 1), job.times
    costs = Costs(*(1e3 * value / chunks for value in (times.forward, times.input_gradient, times.weight_gradient)))
    report = validate(lower(build(schedule, job.ranks, job.micro_batches)), costs)
    return report.makespan, report.bubble


def oversleep(seconds: float, times: int = 50) -> float:
    """Return how much longer than requested a sleep takes, at the median."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        time.sleep(seconds)
        found.append(time.perf_counter() - start - seconds)
    return median(found)


if __name__ == "__main__":
    main()
