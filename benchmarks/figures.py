"""The figures of README.md and of pages in docs/, generated from the benchmarks' results/.

python benchmarks/figures.py             # writes them between the two markers of each page
python benchmarks/figures.py --check     # quick: exits with 1 and lists the pages that differ
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import FOLDER, number

ROOT = FOLDER.parents[1]
BEGIN = "<!-- figures: made by benchmarks/figures.py -->"
END = "<!-- end of figures -->"
TITLES = {"bare": "forward and backward only", "ddp": "DDP, fused AdamW", "fsdp2": "FSDP2"} | {
    f"{key}-{stage}": text.format(stage)
    for key, text in {"deepspeed": "DeepSpeed, stage {}", "ours": "**zero_trial, stage {}**"}.items()
    for stage in range(4)
}


def main() -> int:
    """Write the figures of all pages, or compare them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a page differs")
    given = options.parse_args()
    other = []
    for name, block in PAGES.items():
        path = ROOT / name
        text = path.read_text()
        before, _, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{name} has no block between {BEGIN} and {END}")
        wanted = f"{before}{BEGIN}\n\n{block()}\n\n{END}{after}"
        if wanted == text:
            continue
        other.append(name)
        if not given.check:
            path.write_text(wanted)
    if given.check and other:
        print("other figures than in benchmarks/results:", ", ".join(other))
    return int(given.check and bool(other))


def readme() -> str:
    """Step time and bytes of the contenders."""
    rows = {(row["name"], row["dtype"]): row for row in _results("engine")["rows"]}
    keys = (("wall_ms", 0), ("tensor_bytes_per_parameter", 1))
    lines = [
        [TITLES[name], *(f"{rows[name, dtype][key]:.{digits}f}" for dtype in ("fp32", "bf16") for key, digits in keys)]
        for name in ("ddp", "fsdp2", "deepspeed-3", "ours-0", "ours-2", "ours-3")
    ]
    head = [f"{dtype}: {what}" for dtype in ("fp32", "bf16") for what in ("ms per step", "bytes per parameter")]
    said = _wrapped(
        f"A GPT of {_millions('engine')} M parameters on two CPU ranks with one thread each, all engines interleaved in "
        "one run; bytes of live tensors between steps, per rank:"
    )
    return f"{said}\n\n{_table(['', *head], lines)}"


def performance() -> str:
    """A table of the engine, and a line per other benchmark."""
    lines = [
        _memory_line(),
        _optimizer_line(),
        _pipeline_line(),
        _overhead_line(),
        _qlora_line(),
        _master_line(),
        _comm_line(),
    ]
    wrapped = [_wrapped(line, "  ") for line in lines]
    return "\n".join([_engine_table(), "", *wrapped])


def live_bytes() -> str:
    """Formula and live bytes of every stage, in each dtype."""
    found = _results("memory")
    ranks, dtypes = found["settings"]["ranks"], ("fp32", "bf16", "fp16")
    rows = _memory_rows()

    def cells(stage: str, sums: str = "") -> list[str]:
        them = [rows.get((stage + sums, dtype)) for dtype in dtypes]
        return [
            cell
            for row in them
            for cell in ((row["formula"], f"{row['tensor_bytes_per_parameter']:.2f}") if row else ("", ""))
        ]

    titles = {f"{stage}": f"stage {stage}" for stage in range(4)}
    titles |= {f"{stage}-none": f"stage {stage}, `set_grads_to_none`" for stage in (2, 3)}
    lines = [[title, *cells(key)] for key, title in titles.items()]
    lines += [[f"stage {stage}, bf16 with gradients in fp32", *cells(f"{stage}", " fp32")] for stage in range(4)]
    head = [word for dtype in dtypes for word in (f"{dtype}: formula", "live")]
    said = _wrapped(
        f"Bytes of live tensors per parameter, measured after a step of a GPT of {_millions('memory')} M parameters with "
        f"AdamW on N = {ranks} ranks (`{_page('memory')}`). Gradients in fp32 are `data_types.grad_accum_dtype`."
    )
    return f"{said}\n\n{_table(['', *head], lines)}"


def comparison() -> str:
    """The engine's table as one sentence, in fp32."""
    cpu = {row["name"]: row["cpu_ms"] for row in _results("engine")["rows"] if row["dtype"] == "fp32"}

    def above(*names: str) -> str:
        low, high = (f"{of(cpu[name] for name in names if name in cpu) - cpu['bare']:.0f}" for of in (min, max))
        return low if low == high else f"{low} to {high}"

    stages = range(4)
    return _wrapped(
        f"CPU milliseconds per step above a bare forward and backward, {_millions('engine')} M parameters, two ranks, "
        f"fp32: zero_trial {above(*(f'ours-{stage}' for stage in stages))}, DDP with fused AdamW {above('ddp')}, FSDP2 "
        f"{above('fsdp2')}, DeepSpeed {above(*(f'deepspeed-{stage}' for stage in stages))} (`{_page('engine')}`)."
    )


def pipelines() -> str:
    """Step times of all schedules over their own ideal and over that of 1F1B."""
    found = _results("pipeline")
    rows = {(row["name"], row["ranks"]): row for row in found["rows"]}
    ours = [name for name, ranks in rows if ranks == 2 and name.startswith("ours-") and name != "ours-gpipe"]
    torch, deepspeed = (found["versions"][name].partition("+")[0] for name in ("torch", "deepspeed"))
    titles = {name: f"`{name.removeprefix('ours-')}`" for name in ours}
    titles |= {"deepspeed": f"DeepSpeed {deepspeed}", "torch-1f1b": f"torch {torch}, 1F1B"}
    cells = [
        [title, *(f"{rows[name, ranks][key]:.3f}" for ranks in (2, 4) for key in ("over_ideal", "over_1f1b"))]
        for name, title in titles.items()
    ]
    return _table(["schedule", "2 stages", "over 1F1B's ideal", "4 stages", "over 1F1B's ideal"], cells)


def qlora() -> str:
    """Step time and bytes of QLoRA."""
    found = _results("qlora")
    deepspeed = found["versions"]["deepspeed"]
    lines = [
        [TITLES[row["name"]], f"{row['wall_ms']:.0f}", f"{_mib(row):.1f}", f"{row['losses'][-1]:.5f}"]
        for row in found["rows"]
    ]
    said = _wrapped(
        f"A Llama of {_millions('qlora')} M parameters in NF4 with double quantization, LoRA of rank 16 on all linear layers, fp32, two "
        f"CPU ranks with one thread each; MiB of live tensors between steps, per rank; DeepSpeed {deepspeed} (`{_page('qlora')}`):"
    )
    return f"{said}\n\n{_table(['', 'ms per step', 'MiB', 'loss of the last step'], lines)}"


def offload() -> str:
    """A step with its state on a disk, and a forward and backward with parameters there."""
    steps, params = _results("offload"), _results("offload_params")
    peers = [key for key in steps["rows"][0] if key.startswith("DeepSpeed")]
    step = _table(
        ["buffers", "state in memory", "on the disk", "the disk alone", "on the disk / alone", *peers],
        [
            [
                f"{row['buffers']}",
                *(f"{row[key]:.0f}" for key in ("memory", "nvme", "disk")),
                f"{row['nvme'] / row['disk']:.2f}",
                *(f"{row[peer]:.0f}" for peer in peers),
            ]
            for row in steps["rows"]
        ],
    )
    others = {key: None for row in params["rows"] for key in row if key.startswith("DeepSpeed")}
    use = _table(
        ["stage", "buffers", "parameters in memory", "on the disk", "the disk alone", *others],
        [
            [
                f"{row['stage']}",
                f"{row['buffers']}",
                *(f"{row[key]:.0f}" for key in ("memory", "nvme", "disk")),
                *(f"{row[key]:.0f}" if isinstance(row.get(key), float) else "no" for key in others),
            ]
            for row in params["rows"]
        ],
    )
    words = "; DeepSpeed's columns name where it has them, and `no` is what it cannot do" if others else ""
    return "\n\n".join(
        [
            _wrapped(
                f"Milliseconds of `engine.step()`, {_millions('offload')} M bf16 parameters, AdamW; "
                "DeepSpeed's columns name its device and stage "
                f"(`{_page('offload')}`):"
            ),
            step,
            _wrapped(
                f"Milliseconds of a forward and a backward, {_millions('offload_params')} M bf16 parameters, each group "
                f"read for each use (`{_page('offload_params')}`{words}):"
            ),
            use,
        ]
    )


def checkpoints() -> str:
    """How long a save blocks training, compared with peers."""
    found = _results("checkpoint")
    return "\n\n".join(
        [
            _wrapped(
                f"Saving {_millions('checkpoint')} M parameters at 12 bytes each on one rank, flushed to the disk. "
                f"`Standstill` is the call and what the updates wait for copies (`{_page('checkpoint')}`):"
            ),
            _table(
                ["", "save, s", "standstill, s", "next step slower by, s"],
                [
                    [row["name"], *(f"{row[key]:.2f}" for key in ("save", "standstill", "slower"))]
                    for row in found["rows"]
                ],
            ),
        ]
    )


def board() -> str:
    """The cost of the largest pages of the live page."""
    found = _results("board")
    rows = {row["page"]: row for row in found["rows"]}
    validation, training = (rows[f"experiment, {name}"] for name in ("validation_loss", "training loss"))
    return _wrapped(
        f"The page of {found['settings']['trials']} trials with {found['settings']['points']:,} reports each takes "
        f"{validation['first_cpu']:.2f} s of CPU; a training metric of all of them takes {training['first_cpu']:.1f} s at "
        f"the first look and {training['further_cpu']:.1f} s after new reports (`{_page('board')}`)."
    )


def tuning() -> str:
    """Speed of what tune found, relative to the exhaustive best."""
    names = {"bert": "BERT", "gpt": "a GPT", "pipeline": "a pipeline"}
    found = [
        f"{names[row['model']]} {row['ratio']:.2f} (pairs of runs: {row['pairs']}; {row['runs']} of {row['ways']} ways)"
        for row in _results("tune")["rows"]
    ]
    return _wrapped(
        "Steps per second of what was found in a quarter of the runs, over those of the best way of an exhaustive "
        f"search on two CPU ranks: {', '.join(found)} (`{_page('tune')}`)."
    )


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme,
    "docs/performance.md": performance,
    "docs/architecture.md": live_bytes,
    "docs/comparison.md": comparison,
    "docs/guide/pipeline.md": pipelines,
    "docs/guide/offload.md": offload,
    "docs/guide/qlora.md": qlora,
    "docs/guide/checkpoints.md": checkpoints,
    "docs/guide/reports.md": board,
    "docs/guide/searching.md": tuning,
}


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        [_row(head[0], list(head[1:])), "|---" * len(head) + "|", *(_row(row[0], list(row[1:])) for row in rows)]
    )


def _page(name: str) -> str:
    return f"benchmarks/results/{name}.md"


def _millions(name: str) -> str:
    """Return how many million parameters a benchmark has trained."""
    count = _results(name)["settings"]["parameters"]
    return f"{count / 1e6 if count > 1e5 else count:.0f}"


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


def _memory_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """Return our rows by stage (with options) and dtype. Gradients are in the model's dtype, except
    for keys ``N fp32``."""
    found = {}
    for row in _results("memory")["rows"]:
        kind, _, variant = row["name"].partition("-")
        if kind == "ours":
            own = row["dtype"] != "bf16" or "-16bit" in variant
            stage = variant.replace("-16bit", "") + ("" if own else " fp32")
            found[stage, row["dtype"]] = row
    return found


def _memory_line() -> str:
    rows = _memory_rows()
    each = [
        f"{dtype} {', '.join(number('tensor_bytes_per_parameter', 2)(rows[f'{stage}', dtype]) for stage in range(4))}"
        for dtype in ("fp32", "bf16", "fp16")
    ]
    none = [number("tensor_bytes_per_parameter", 2)(rows["3-none", dtype]) for dtype in ("fp32", "bf16")]
    return (
        f"- Bytes per parameter between steps, {_millions('memory')} M parameters, two ranks, AdamW, stages 0 to 3: "
        f"{'; '.join(each)}. With `set_grads_to_none` at stage 3: fp32 {none[0]}, bf16 {none[1]} (`memory.md`)."
    )


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


def _qlora_line() -> str:
    rows = {row["name"]: row for row in _results("qlora")["rows"]}

    def each(*names: str) -> str:
        return ", ".join(f"{rows[name]['wall_ms']:.0f} ms and {_mib(rows[name]):.1f} MiB" for name in names)

    return (
        f"- QLoRA, {_millions('qlora')} M parameters in NF4 on two ranks, time of a step and live tensors between steps: "
        f"{each('ours-0', 'ours-2', 'ours-3')} at stages 0, 2 and 3; FSDP2 {each('fsdp2')}; DeepSpeed's stages 2 and 3 "
        f"{each('deepspeed-2', 'deepspeed-3')} (`qlora.md`)."
    )


def _mib(row: Mapping[str, Any]) -> float:
    """Return the MiB of tensors that live between steps."""
    return float(row["tensor_bytes_per_parameter"] * row["parameters"] / 2**20)


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
