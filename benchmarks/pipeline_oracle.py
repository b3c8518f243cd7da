"""Every pipeline against plain torch on one process: schedules x stages x shards x ZeRO stages x
micro-batches, fp32, 20 steps.

python benchmarks/pipeline_oracle.py                  # all of it: 288 cases, up to eight ranks
python benchmarks/pipeline_oracle.py --stages 2 --schedules 1f1b zb_v --zero 2 3
python benchmarks/pipeline_oracle.py --stage 2 --shard 1 --schedule 1f1b --zero 2 --micro 4  # quick

The tests run a covering subset; this script runs all. Exits with 1 if a case is off by more than
the tolerance.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.record import Column, number, save
from tests.support.pipelines import batches, difference, layers, make_engine, train_dense
from tests.support.pool import Pools

TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-5
SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v"]
BLOCKS = 6  # with embedding, norm and head nine layers: enough for four stages of two chunks
NOTE = f"""A small language model with tied embedding and head, AdamW, fp32. Each case trains on stages x shards gloo
ranks of one thread and is compared with plain torch on the whole model: the largest difference of any parameter (the
tolerance is {TOLERANCE:g}) and of any loss. "Ties" says that the tied weight is the same, bit by bit, on every rank that
holds it. A row is the worst of its ZeRO stages and micro-batches."""
COLUMNS: list[Column] = [
    ("schedule", lambda row: row["schedule"]),
    ("stages", lambda row: str(row["stages"])),
    ("shards", lambda row: str(row["shards"])),
    ("cases", lambda row: str(row["cases"])),
    ("largest difference", lambda row: f"{row['difference']:.2e}"),
    ("of losses", lambda row: f"{row['loss_difference']:.2e}"),
    ("ties bit-equal", lambda row: "yes" if row["ties"] else "NO"),
    ("seconds", number("seconds")),
]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    schedule: str
    stages: int
    shards: int
    zero: int
    micro_batches: int


def train_here(case: Case, steps: int, reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train on every rank; return the difference to the reference, the losses, and the tied
    weight's bits if this rank has it."""
    zero = {"stage": case.zero, "param_persistence_threshold": 0, "module_granularity_threshold": 1}
    engine = make_engine(
        layers(BLOCKS), case.stages, zero, case.micro_batches, pipeline={"schedule": case.schedule}, log_level="error"
    )
    line = engine.mpu.get_data_parallel_rank()
    data = batches(line, case.micro_batches, steps)
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    state = engine.module_state_dict()
    tied = [hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state.items() if "tied" in name]
    found = {"difference": difference(engine, reference), "losses": losses, "tied": tied[:1]}
    engine.destroy()
    return found


def run(case: Case, steps: int, pools: Pools, known: dict[Any, Any]) -> dict[str, Any]:
    """Return a case's differences; plain torch runs once for each number of micro-batches and of
    data-parallel ranks."""
    key = (case.micro_batches, case.shards)
    if key not in known:
        known[key] = train_dense(layers(BLOCKS), steps, *key)
    reference, losses = known[key]
    ranks = pools(case.stages * case.shards).run(train_here, case, steps, reference, timeout=300.0)
    tied = {bits for rank in ranks for bits in rank["tied"]}
    gaps = [abs(mine - other) for rank in ranks for mine, other in zip(rank["losses"], losses, strict=True)]
    return {
        "difference": max(rank["difference"] for rank in ranks),
        "loss_difference": max(gaps),
        "ties": len(tied) == 1,
    }


def main() -> int:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="pipeline_oracle", help="of the files in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pools, known, rows, bad = Pools(), {}, [], 0
    try:
        for stages, shards, schedule in itertools.product(args.stages, args.shards, args.schedules):
            began, found = time.perf_counter(), []
            for zero, count in itertools.product(args.zero, args.micro_batches):
                case = Case(schedule, stages, shards, zero, count)
                got = run(case, args.steps, pools, known)
                wrong = got["difference"] > TOLERANCE or got["loss_difference"] > LOSS_TOLERANCE or not got["ties"]
                bad += wrong
                print(f"{'WRONG' if wrong else 'ok':5}  {case}  {got}", flush=True)
                found.append(got)
            rows.append(
                {
                    "schedule": schedule,
                    "stages": stages,
                    "shards": shards,
                    "cases": len(found),
                    "difference": max(got["difference"] for got in found),
                    "loss_difference": max(got["loss_difference"] for got in found),
                    "ties": all(got["ties"] for got in found),
                    "seconds": time.perf_counter() - began,
                }
            )
    finally:
        pools.close()
    settings = {key: value for key, value in vars(args).items() if key != "name"}
    save(args.name, settings, rows, COLUMNS, NOTE)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
