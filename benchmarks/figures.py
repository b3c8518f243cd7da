"""The figures of README.md, made from what the benchmarks left in results/.

python benchmarks/figures.py             # writes them between README's two markers
python benchmarks/figures.py --check     # quick: exits with 1 where README says something else
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import FOLDER

README = FOLDER.parents[1] / "README.md"
BEGIN = "<!-- figures: made by benchmarks/figures.py -->"
END = "<!-- end of figures -->"


def main() -> int:
    """Write README's figures, or compare them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="change nothing; exit with 1 where README differs")
    given = options.parse_args()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md has no block between {BEGIN} and {END}")
    wanted = f"{before}{BEGIN}\n{figures()}\n{END}{after}"
    if given.check:
        return int(wanted != text)
    README.write_text(wanted)
    return 0


def figures() -> str:
    """The block: a table of the engine, and a line per other benchmark."""
    lines = [_optimizer_line(), _pipeline_line(), _overhead_line(), _master_line(), _comm_line()]
    wrapped = [textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return "\n".join([_engine_table(), "", *wrapped])


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _engine_table() -> str:
    """CPU milliseconds of a step above a bare forward and backward."""
    cpu = {(row["name"], row["dtype"]): row["cpu_ms"] for row in _results("engine")["rows"]}

    def above(name: str, dtype: str) -> str:
        return f"{cpu[name, dtype] - cpu['bare', dtype]:.0f}" if (name, dtype) in cpu else ""

    lines = [
        "| CPU ms per step above bare | stage 0 | stage 1 | stage 2 | stage 3 | DDP + fused AdamW | FSDP2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in ("fp32", "bf16"):
        peers = [above("ddp", dtype), above("fsdp2", dtype)]
        lines.append(_row(f"zero_trial, {dtype}", [above(f"ours-{stage}", dtype) for stage in range(4)] + peers))
        theirs = [above(f"deepspeed-{stage}", dtype) or "refused" for stage in range(4)]
        lines.append(_row(f"DeepSpeed, {dtype}", [*theirs, "", ""]))
    return "\n".join(lines)


def _row(title: str, cells: list[str]) -> str:
    return f"| {' | '.join([title, *cells])} |".replace("  |", " |")


def _optimizer_line() -> str:
    found = _results("ops_cpu")
    one = {row["name"]: row for row in found["rows"] if row["threads"] == 1}
    ours = one["ours 16-bit"]
    peers = ", ".join(
        f"{name} with casts {one[key]['ns']:.2f}"
        for name, key in (
            ("DeepSpeed's CPUAdam", "DeepSpeed CPUAdam 16-bit, with casts"),
            ("torch's fused AdamW", "torch fused 16-bit, with casts"),
        )
        if key in one
    )
    return (
        f"- Optimizer on CPU, {found['settings']['parameters'] / 1e6:.0f} M parameters, one thread, AdamW with bf16 gradients and "
        f"parameters: {ours['ns']:.2f} ns per parameter, {ours['percent']:.0f} % of a plain update loop; {peers} "
        f"(`ops_cpu.md`)."
    )


def _pipeline_line() -> str:
    rows = {(row["name"], row["ranks"]): row for row in _results("pipeline")["rows"]}
    named = {"ours-1f1b": "1F1B", "deepspeed": "DeepSpeed", "torch-1f1b": "torch"}
    over = ", ".join(f"{name} {rows[key, 2]['over_ideal']:.3f}" for key, name in named.items() if (key, 2) in rows)
    best = ", ".join(f"{rows['ours-zb_v', ranks]['over_1f1b']:.2f} on {ranks} stages" for ranks in (2, 4))
    return (
        f"- Pipelines, step time over the ideal with its bubble, 2 stages, 8 micro-batches: {over}; zero-bubble ZB-V over the ideal of 1F1B: "
        f"{best} (`pipeline.md`)."
    )


def _overhead_line() -> str:
    found = _results("overhead")
    rows = {row["name"]: row for row in found["rows"]}
    count, bare = found["settings"]["tensors"], rows["bare"]["main_thread_ms"]

    def each(name: str) -> float:
        return float((rows[name]["main_thread_ms"] - bare) / count * 1000)

    ours = ", ".join(f"{each(f'ours-{stage}'):.1f}" for stage in range(4))
    theirs = sorted(each(name) for name in rows if name.startswith("deepspeed"))
    peers = [f"DDP {each('ddp'):.0f}", f"FSDP2 {each('fsdp2'):.0f}"]
    peers += [f"DeepSpeed {theirs[0]:.0f} to {theirs[-1]:.0f}"] if theirs else []
    return (
        f"- Host time per parameter tensor, {count} tiny tensors, microseconds: {ours} at stages 0 to 3; {', '.join(peers)} "
        f"(`overhead.md`)."
    )


def _master_line() -> str:
    rows = {row["what"]: row["median"] for row in _results("master")["rows"]}
    return (
        f"- Embedded master: serves after {rows['zero-trial master up, until it serves']:.1f} s, `det experiment create` to the first training "
        f"step {rows['det experiment create to the first training step, quickstart on two ranks']:.0f} s, "
        f"{rows['metric reports over 1 kept connection']:.0f} metric reports a second (`master.md`)."
    )


def _comm_line() -> str:
    rows = {(row["op"], row["bytes"]): row for row in _results("comm")["rows"]}
    size = 1 << 28
    each = [
        f"{name} {rows[op, size]['mapped_by_copy']:.2f} (gloo {rows[op, size]['gloo'] / rows[op, size]['copy']:.0f})"
        for op, name in (("reduce_scatter", "reduce-scatter"), ("all_gather", "all-gather"))
    ]
    return (
        f"- Collectives of 256 MiB between CPU ranks of one host, time over the plain copy they must make: "
        f"{', '.join(each)} (`comm.md`)."
    )


if __name__ == "__main__":
    raise SystemExit(main())
