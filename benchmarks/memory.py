"""Bytes of tensors that live between two steps, per parameter: ours at every ZeRO stage and dtype
next to its formula, and peers.

    python benchmarks/memory.py
    python benchmarks/memory.py --dtypes fp32 --layers 1 --width 64  # quick
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import GRADS_IN_MODEL_DTYPE, GRADS_TO_NONE, Workload
from benchmarks.record import Column, number, save
from benchmarks.rounds import Job, run_rounds

PEERS = ["ddp", "fsdp2", "deepspeed-2", "deepspeed-3"]
NOTE = f"""Bytes of all distinct storages that are alive between two steps, per parameter, mean over ranks, AdamW. N is the
number of ranks. A formula counts parameters + gradients + optimizer (fp32 masters, where the parameters are not fp32
themselves, and two moments); what a rank holds beyond it are padding and small buffers. In bf16 the peers and "ours-S"
sum gradients in fp32 (`data_types.grad_accum_dtype`); "-{GRADS_IN_MODEL_DTYPE}" leaves that key out, as is the default: 16-bit
gradients. "-{GRADS_TO_NONE}" is `zero_optimization.set_grads_to_none`. DDP's bf16 is autocast over fp32 weights. These figures do not
depend on the machine's load."""
COLUMNS: list[Column] = [
    ("engine", lambda row: row["name"]),
    ("dtype", lambda row: row["dtype"]),
    ("formula", lambda row: row.get("formula", "")),
    ("bytes by the formula", number("formula_bytes", 2)),
    ("tensor bytes/parameter", number("tensor_bytes_per_parameter", 2)),
]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    workload = Workload("gpt", 1, 8, args.layers, args.width)
    jobs = [
        Job(name, dtype, workload, args.ranks, threads=1, accumulation=1, warmup=1, steps=1)
        for dtype in args.dtypes
        for name in [*ours(dtype), *PEERS]
    ]
    rows = [row | formula(row["name"], row["dtype"], args.ranks) for row in run_rounds(jobs, 1)]
    kept = ("name", "dtype", "formula", "formula_bytes", "tensor_bytes_per_parameter", "losses")
    settings = {key: value for key, value in vars(args).items() if key != "dtypes"}
    settings |= {"parameters": int(rows[0]["parameters"]) if rows else 0}
    save("memory", settings, [{key: row[key] for key in kept if key in row} for row in rows], COLUMNS, NOTE)


def ours(dtype: str) -> list[str]:
    """Return every stage, with gradients in the model's dtype and, in bf16, in fp32 as well."""
    inner = f"-{GRADS_IN_MODEL_DTYPE}" if dtype == "bf16" else ""
    names = [f"ours-{stage}{inner}" for stage in range(4)]
    names += [f"ours-{stage}{inner}-{GRADS_TO_NONE}" for stage in (2, 3)]
    return names + ([f"ours-{stage}" for stage in range(4)] if inner else [])


def formula(name: str, dtype: str, ranks: int) -> dict[str, Any]:
    """Return what a rank must hold per parameter, as text and in bytes; nothing for a peer."""
    kind, _, variant = name.partition("-")
    if kind != "ours":
        return {}
    stage, options = int(variant[0]), variant.split("-")[1:]
    params = 4 if dtype == "fp32" else 2
    grads = 4 if dtype == "fp32" or (dtype == "bf16" and GRADS_IN_MODEL_DTYPE not in options) else 2
    grads = 0 if GRADS_TO_NONE in options else grads
    states = 8 if dtype == "fp32" else 12
    parts = {0: (params + grads + states, 0), 1: (params + grads, states), 2: (params, grads + states)}
    whole, shared = parts.get(stage, (0, params + grads + states))
    text = " + ".join([f"{whole}"] * bool(whole) + [f"{shared}/N"] * bool(shared))
    return {"formula": text, "formula_bytes": whole + shared / ranks}


if __name__ == "__main__":
    main()
