"""Step time, CPU time and memory of a step of a GPT, or of QLoRA: ours, plain DDP, FSDP2 and
DeepSpeed.

python benchmarks/engine.py --rounds 5
python benchmarks/engine.py --contenders bare ddp ours-2 --dtypes fp32 --rounds 1 --steps 4  # quick
python benchmarks/engine.py --contenders bare before-2 ours-2 --before ../other_checkout
python benchmarks/engine.py --contenders ours-2 ours-2-none ours-3 ours-3-none  # set_grads_to_none
python benchmarks/engine.py --model qlora --layers 4 --width 512 --dtypes fp32 --name qlora
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import Workload
from benchmarks.record import Column, number, save
from benchmarks.rounds import Job, run_rounds

CONTENDERS = ["bare", "ddp", "fsdp2", *(f"{kind}-{stage}" for stage in range(4) for kind in ("deepspeed", "ours"))]
NOTE = """Medians over interleaved rounds, each in fresh processes; means over ranks. "Above bare" is the process CPU
time of a step less that of a bare forward and backward in the same dtype (all threads, gloo's and any busy waiting
included). "Tensor bytes" counts all distinct storages that are alive between two steps, per parameter. RSS growth is
the peak less what was resident before the model was built; "own" counts pages that several ranks have mapped once, in
equal parts. DDP's bf16 is autocast over fp32 weights.
"Loss" is the mean loss of the last measured step: it says that the contenders did the same work."""
QLORA = """
The model is a Llama in NF4 with double quantization under LoRA adapters of rank 16; only the adapters are trained. A packed
weight counts as the parameters that it has unpacked. `bnb_4bit_quant_storage` is in the settings as `storage`."""
COLUMNS: list[Column] = [
    ("engine", lambda row: row["name"]),
    ("dtype", lambda row: row["dtype"]),
    ("ms/step", number("wall_ms")),
    ("min to max", lambda row: f"{row['wall_ms_min']:.1f} to {row['wall_ms_max']:.1f}"),
    ("CPU ms/step", number("cpu_ms")),
    ("CPU ms above bare", number("cpu_ms_above_bare")),
    ("tensor bytes/parameter", number("tensor_bytes_per_parameter", 2)),
    ("tensor MiB", lambda row: f"{row['tensor_bytes_per_parameter'] * row['parameters'] / 2**20:.1f}"),
    ("RSS growth MiB", number("peak_rss_growth_mib", 0)),
    ("own MiB", number("peak_own_growth_mib", 0)),
    ("loss", lambda row: f"{row['losses'][-1]:.5f}"),
]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help=f"default: {' '.join(CONTENDERS)}")
    parser.add_argument("--model", default="gpt", choices=["gpt", "qlora"])
    parser.add_argument("--storage", default="uint8", help="bnb_4bit_quant_storage of qlora")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="engine", help="of the files in benchmarks/results")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, for contenders before-0 to before-3")
    args = parser.parse_args()
    workload = Workload(args.model, args.micro_batch, args.sequence, args.layers, args.width, args.storage)
    jobs = [
        Job(name, dtype, workload, args.ranks, args.threads, args.accumulation, args.warmup, args.steps)
        for dtype in args.dtypes
        for name in args.contenders
    ]
    rows = run_rounds(jobs, args.rounds, args.before)
    above_bare(rows, "cpu_ms")
    note = NOTE + QLORA * (args.model == "qlora")
    settings = {
        key: value for key, value in vars(args).items() if key not in ("contenders", "dtypes", "name", "before")
    }
    save(args.name, settings | {"parameters": int(rows[0]["parameters"]) if rows else 0}, rows, COLUMNS, note)


def above_bare(rows: list[dict[str, Any]], key: str) -> None:
    """Add ``<key>_above_bare`` to every row if there is a bare row of the same dtype."""
    bare = {row["dtype"]: row[key] for row in rows if row["name"] == "bare"}
    for row in rows:
        if row["name"] != "bare" and row["dtype"] in bare:
            row[f"{key}_above_bare"] = row[key] - bare[row["dtype"]]


if __name__ == "__main__":
    main()
