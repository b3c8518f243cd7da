"""The optimizer's kernels on a GPU, as a percentage of the measured copy bandwidth, next to torch's
own and DeepSpeed's.

    python benchmarks/ops/gpu.py            # needs a CUDA device; two minutes, or DeepSpeed's build
    python benchmarks/ops/gpu.py --dry-run  # quick: tiny, on the CPU: that the script works

`bytes` are those that the job needs per element: a 16-bit gradient read, fp32 parameter and state
read and written, a 16-bit copy written. A contender that moves more has a lower percentage for the
same job. Times are medians of device time between two events, on data that is not zero and far
larger than the L2 cache, after reads that keep the GPU busy until the host has launched the whole
call; `host us` is the call's time on the host. The copy is measured again at the end, to show how
steady the GPU was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import record
from benchmarks.ops import gpu_exact
from benchmarks.processes import BROKEN
from zero_trial.ops.dispatch import OPS

MOST = 256 * 2**20  # elements
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
PIECES = 37  # tensors of the launches over many
COVER, COVER_READS = (
    2**28,
    6,
    # fp32 elements, 1 GiB: about 1.5 ms at 4.3 TB/s; reads, for what is written stays in the L2
    # cache
)
Job = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """``prepare`` makes tensors of n elements on a device and returns one call; ``useful`` bytes
    per element that the job needs."""

    name: str
    useful: float
    prepare: Callable[[int, torch.device], Job]


def randn(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, not zeros, because some memories compress zeros."""
    return torch.randn(n, device=device).to(dtype)


def step_of(
    op: str, states: int, numbers: tuple[Any, ...], low: bool, shift: int = 0
) -> Callable[[int, torch.device], Job]:
    """Return one op of ours; ``low``: bf16 gradient in and bf16 copy out; ``shift``: offset of all
    tensors from an aligned address."""

    def prepare(n: int, device: torch.device) -> Job:
        m, narrow = n + shift, torch.bfloat16 if low else torch.float32
        p, g = randn(m, device)[shift:], randn(m, device, narrow)[shift:]
        state = [torch.zeros(m, device=device)[shift:] for _ in range(states)]
        out = torch.zeros(m, device=device, dtype=torch.bfloat16)[shift:] if low else None
        own, shared = numbers
        lists = [[p], [g], *([x] for x in state), [] if out is None else [out], [], []]
        return lambda: getattr(OPS, op)(*lists, *([x] for x in own), *shared)

    return prepare


def chain(n: int, device: torch.device) -> Job:
    """Return norm, clip factor, AdamW of many pieces, bf16 in and out: the host reads the norm."""
    size = max(1, n // PIECES)
    g = randn(size * PIECES, device, torch.bfloat16)
    p, m, v = (randn(size * PIECES, device).abs() for _ in range(3))
    out = torch.zeros_like(g)
    pieces = [list(x.split(size)) for x in (p, g, m, v, out)]
    columns = [[x] * PIECES for x in (LR, BETA1, BETA2, EPS, DECAY, 2.0)]

    def run() -> None:
        norm = OPS.square_sum(g).sqrt().item()
        OPS.adam_(*pieces, [], [], *columns, min(1.0, 1.0 / (norm + 1e-6)), True)

    return run


def torch_adamw(kind: str, casts: bool) -> Callable[[int, torch.device], Job]:
    """Return torch.optim.AdamW, fused or foreach; ``casts``: bf16 gradient in and bf16 copy out, by
    copies around it."""

    def prepare(n: int, device: torch.device) -> Job:
        weight = torch.nn.Parameter(randn(n, device))
        weight.grad = randn(n, device)
        g, out = randn(n, device, torch.bfloat16), torch.zeros(n, device=device, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW([weight], lr=LR, weight_decay=DECAY, **{kind: True})  # type: ignore[arg-type]

        def run() -> None:
            if casts and weight.grad is not None:
                weight.grad.copy_(g)
            optimizer.step()
            if casts:
                out.copy_(weight.detach())

        return run

    return prepare


def deepspeed_adam(n: int, device: torch.device) -> Job:
    """Return DeepSpeed's FusedAdam. Its first run builds the extension with nvcc, in minutes."""
    from deepspeed.ops.adam import FusedAdam

    weight = torch.nn.Parameter(randn(n, device))
    weight.grad = randn(n, device)
    optimizer = FusedAdam([weight], lr=LR, weight_decay=DECAY)
    return lambda: optimizer.step()


def clip(n: int, device: torch.device) -> Job:
    """Return torch's clip_grad_norm_, which also scales."""
    weight = torch.nn.Parameter(randn(n, device))
    weight.grad = randn(n, device)
    return lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0)


def of_one(dtype: torch.dtype, call: Callable[[Tensor], Any]) -> Callable[[int, torch.device], Job]:
    """Return a call on one tensor."""

    def prepare(n: int, device: torch.device) -> Job:
        x = randn(n, device, dtype)
        return lambda: call(x)

    return prepare


def of_two(into: torch.dtype, source: torch.dtype, call: Callable[[Tensor, Tensor], Any]) -> Callable[..., Job]:
    """Return a call on a target and a source."""

    def prepare(n: int, device: torch.device) -> Job:
        x, y = randn(n, device, into), randn(n, device, source)
        return lambda: call(x, y)

    return prepare


ADAM = ((LR, BETA1, BETA2, EPS, DECAY, 2.0), (1.0, True))
FP32, BF16 = torch.float32, torch.bfloat16
CONTENDERS = [
    Contender("copy", 8, of_two(FP32, FP32, lambda x, y: x.copy_(y))),
    Contender("AdamW bf16: ours", 28, step_of("adam_", 2, ADAM, True)),
    Contender("AdamW bf16: torch fused and casts", 28, torch_adamw("fused", True)),
    Contender("AdamW fp32: ours", 28, step_of("adam_", 2, ADAM, False)),
    Contender("AdamW fp32: torch fused", 28, torch_adamw("fused", False)),
    Contender("AdamW fp32: torch foreach", 28, torch_adamw("foreach", False)),
    Contender("norm, clip and AdamW bf16, 37 tensors: ours", 30, chain),
    Contender("Lion bf16: ours", 20, step_of("lion_", 1, ((LR, BETA1, 0.99, DECAY), (1.0,)), True)),
    Contender("Adagrad bf16: ours", 20, step_of("adagrad_", 1, ((LR, EPS, DECAY), (1.0,)), True)),
    Contender("SGD momentum bf16: ours", 20, step_of("sgd_", 1, ((LR, 0.9, 0.0, DECAY, False), (False, 1.0)), True)),
    Contender("square sum bf16: ours", 2, of_one(BF16, OPS.square_sum)),
    Contender("square sum fp32: ours", 4, of_one(FP32, OPS.square_sum)),
    Contender("square sum bf16: torch vector_norm", 2, of_one(BF16, lambda x: torch.linalg.vector_norm(x, dtype=FP32))),
    Contender("square sum fp32: torch vector_norm", 4, of_one(FP32, torch.linalg.vector_norm)),
    Contender("norm and clip fp32: torch clip_grad_norm_", 4, clip),
    Contender("fp32 to bf16: torch copy_", 6, of_two(BF16, FP32, lambda x, y: x.copy_(y))),
    Contender("fp32 += bf16: torch add_", 10, of_two(FP32, BF16, lambda x, y: x.add_(y))),
    Contender("AdamW bf16, views at an odd offset: ours", 28, step_of("adam_", 2, ADAM, True, shift=1)),
    Contender("copy, once more", 8, of_two(FP32, FP32, lambda x, y: x.copy_(y))),
]
LAST = Contender("AdamW fp32: DeepSpeed FusedAdam", 28, deepspeed_adam)


def on_device(run: Job, device: torch.device, rounds: int, cover: Tensor | None = None) -> float:
    """Return the median seconds of one call, after two that warm up. Reading ``cover`` first hides
    the host's launch time."""
    times = []
    for turn in range(rounds + 2):
        if device.type == "cuda":
            for _ in range(COVER_READS if cover is not None else 0):
                torch.sum(cover)  # type: ignore[arg-type]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
        times += [taken] if turn >= 2 else []
    return statistics.median(times)


def on_host(run: Job, device: torch.device, rounds: int = 200) -> float:
    """Return the seconds of one call on the host, without waiting for the device."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    taken = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken / rounds


def measure(
    contender: Contender, n: int, device: torch.device, rounds: int, cover: Tensor | None = None
) -> dict[str, Any]:
    """Return one row, with ``why`` instead of numbers if it cannot be measured."""
    row: dict[str, Any] = {"name": contender.name, "bytes": contender.useful, "elements": n}
    try:
        with torch.no_grad():
            seconds = on_device(contender.prepare(n, device), device, rounds, cover)
            row["host_us"] = 1e6 * on_host(
                contender.prepare(PIECES * 64, device), device, 20 if device.type == "cpu" else 200
            )
        row |= {"ms": 1e3 * seconds, "gb_per_s": contender.useful * n / seconds / 1e9}
    except Exception as trouble:
        # a peer that is not installed, or not enough memory: the others still count
        row["why"] = f"{type(trouble).__name__}: {trouble}".splitlines()[0][:200]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def elements(device: torch.device) -> int:
    """Return how many elements fit at 48 bytes each, with a reserve, as a multiple of every
    kernel's tile."""
    if device.type != "cuda":
        return 1 << 16
    free, _ = torch.cuda.mem_get_info(device)
    return min(MOST, int(free * 0.8) // 48 // 65536 * 65536)


def contenders(names: Sequence[str]) -> list[Contender]:
    """Return the contenders of that name, or all but DeepSpeed's."""
    known = {each.name: each for each in [*CONTENDERS, LAST]}
    return [known[name] for name in names] if names else CONTENDERS


def run(device: torch.device, rounds: int, names: Sequence[str], tell: Callable[[dict[str, Any]], None]) -> int:
    """Report the rows as they are measured; return the exit code, BROKEN if an error left the
    device unusable."""
    n = elements(device)
    cover = torch.ones(min(COVER, n), device=device) if device.type == "cuda" else None
    for contender in contenders(names):
        row = measure(contender, n, device, rounds, cover)
        tell(row)
        if "why" in row and not gpu_exact.alive(device):
            return BROKEN
    return 0


def with_percentages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add percentages of the first copy's bandwidth."""
    copy = next((row["gb_per_s"] for row in rows if row["name"] == "copy" and "gb_per_s" in row), None)
    return [row | ({"percent": 100 * row["gb_per_s"] / copy} if copy and "gb_per_s" in row else {}) for row in rows]


COLUMNS: list[record.Column] = [
    ("job and contender", lambda row: row["name"]),
    ("bytes", record.number("bytes", 0)),
    ("ms", record.number("ms", 3)),
    ("GB/s", record.number("gb_per_s", 0)),
    ("% of copy", record.number("percent", 0)),
    ("host us", record.number("host_us", 1)),
    ("", lambda row: row.get("why", "")),
]


def main() -> int:
    """Print the table and write ``results/ops-gpu.*``, or print rows."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("contenders", nargs="*", help="these only")
    options.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, nothing written")
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--rows", action="store_true", help="a row of JSON for each, nothing written")
    options.add_argument("--no-deepspeed", action="store_true")
    given = options.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("gpu.py: no CUDA device; --dry-run tries the script on the CPU")
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", torch.cuda.current_device())
    names = given.contenders or [each.name for each in CONTENDERS]
    if not (given.contenders or given.no_deepspeed or given.dry_run):
        names.append(LAST.name)
    rounds = 3 if given.dry_run else given.rounds
    if given.rows:
        return run(device, rounds, names, lambda row: print(json.dumps(row), flush=True))
    rows: list[dict[str, Any]] = []
    code = run(device, rounds, names, rows.append)
    if given.dry_run or given.contenders:
        print(record.markdown(with_percentages(rows), COLUMNS))
        return code
    settings = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "elements": elements(device)}
    record.save("ops-gpu", settings, with_percentages(rows), COLUMNS, (__doc__ or "").strip())
    return code


if __name__ == "__main__":
    raise SystemExit(main())
