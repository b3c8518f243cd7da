"""Host time per parameter tensor: a model of 600 tiny tensors, whose step time is almost only the
engine.

python benchmarks/overhead.py --rounds 5
python benchmarks/overhead.py --contenders bare ddp ours-2 --tensor 60 --rounds 1 --steps 4  # quick
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import Workload
from benchmarks.engine import CONTENDERS, above_bare
from benchmarks.record import Column, number, save
from benchmarks.rounds import Job, run_rounds

NOTE = """Microseconds per parameter tensor per optimizer step above a bare forward and backward, on a model of small
linear layers in blocks of ten. "wall" is step time, "CPU" is process CPU time (all threads), "main thread" is the CPU time of the
thread that runs Python. Medians over interleaved rounds, each in fresh processes; means over ranks."""
COLUMNS: list[Column] = [
    ("engine", lambda row: row["name"]),
    ("ms/step", number("wall_ms", 2)),
    ("min to max", lambda row: f"{row['wall_ms_min']:.2f} to {row['wall_ms_max']:.2f}"),
    ("wall us/tensor", number("wall_us_per_tensor")),
    ("CPU us/tensor", number("cpu_us_per_tensor")),
    ("main thread us/tensor", number("main_thread_us_per_tensor")),
    ("loss", lambda row: f"{row['losses'][-1]:.6f}"),
]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help=f"default: {' '.join(CONTENDERS)}")
    parser.add_argument("--tensors", type=int, default=600, help="a weight and a bias per layer")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="overhead", help="of the files in benchmarks/results")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, for contenders before-0 to before-3")
    args = parser.parse_args()
    workload = Workload("tiny", args.micro_batch, layers=args.tensors // 2, width=args.width)
    jobs = [
        Job(name, "fp32", workload, args.ranks, args.threads, args.accumulation, args.warmup, args.steps)
        for name in args.contenders
    ]
    rows = run_rounds(jobs, args.rounds, args.before)
    for key in ("wall", "cpu", "main_thread"):
        above_bare(rows, f"{key}_ms")
        for row in rows:
            if f"{key}_ms_above_bare" in row:
                row[f"{key}_us_per_tensor"] = 1e3 * row[f"{key}_ms_above_bare"] / row["parameter_tensors"]
    settings = {key: value for key, value in vars(args).items() if key not in ("contenders", "name", "before")}
    save(args.name, settings, rows, COLUMNS, NOTE)


if __name__ == "__main__":
    main()
