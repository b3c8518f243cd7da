"""Every CUDA op against the CPU's kernels, bit for bit, and against float64: dtypes, odd sizes,
views that start anywhere, NaN and infinity.

    python benchmarks/ops/gpu_exact.py            # needs a CUDA device; 1 if a bit differs
    python benchmarks/ops/gpu_exact.py --dry-run  # quick: CPU against CPU: that the script works

Prints a row of JSON per section as soon as it is done. An error is a row too; after one that leaves
the device unusable the exit code is 3.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.processes import BROKEN
from zero_trial.ops import reference
from zero_trial.ops.cuda_runtime import cuda_backend
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers.fused import FusedAdagrad, FusedAdam, FusedLion, FusedOptimizer, FusedSGD
from zero_trial.ops.optimizers.shard_step import ShardUpdate

SIZES = (1, 15, 1023, 2047, 2048, 2049, 40_003, 1_000_003)
SHIFTS = (0, 1, 4)
# Elements that p, g, states and out stand after an aligned address: all aligned, all alike, the
# states elsewhere.
PLACES = ((0, 0, 0, 0), (1, 1, 1, 1), (3, 3, 3, 3), (1, 1, 0, 1))
LARGE = 500_000  # from here on only one place
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = (1e-7, 1e-7, 2e-7)  # of p, m, v after 10 steps, relative norm of the error against float64
Row = dict[str, Any]

# Name -> (op, number of states, numbers of step t, what tensors share).
STEPS: dict[str, tuple[str, int, Callable[[int], tuple[Any, ...]], tuple[Any, ...]]] = {
    "AdamW": ("adam_", 2, lambda t: (1e-3, 0.9, 0.999, 1e-8, 0.1, float(t)), (0.5, True)),
    "Adam": ("adam_", 2, lambda t: (1e-3, 0.9, 0.99, 1e-6, 0.1, float(t)), (0.5, False)),
    "Lion": ("lion_", 1, lambda t: (1e-3, 0.9, 0.99, 0.1), (0.5,)),
    "Adagrad": ("adagrad_", 1, lambda t: (1e-2, 1e-10, 0.1), (0.5,)),
    "SGD": ("sgd_", 1, lambda t: (1e-2, 0.9, 0.1, 0.1, t == 1), (False, 0.5)),
    "SGD Nesterov": ("sgd_", 1, lambda t: (1e-2, 0.9, 0.0, 0.1, t == 1), (True, 0.5)),
}


def randn(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded random numbers, made on the CPU."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spoiled(x: Tensor, seed: int) -> Tensor:
    """Insert NaN, infinities, subnormal and huge values at some places."""
    bad = torch.tensor([math.nan, math.inf, -math.inf, 1e-42, 3e38, -0.0]).to(x.dtype)
    places = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: len(bad)]
    x[places] = bad[: len(places)]
    return x


def at(device: torch.device, shift: int, x: Tensor) -> Tensor:
    """Copy to the device, this many elements after an aligned address."""
    return torch.cat([x.new_zeros(shift), x]).to(device)[shift:]


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether the bits are equal; any NaN equals any NaN."""
    one, other = one.cpu(), other.cpu()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    one, other = (torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(kind) for x in (one, other))
    return torch.equal(one, other)


def row(name: str, what: str, equal: bool, **more: Any) -> Row:
    """Return the row of one comparison."""
    return {"op": name, "case": what, "equal": equal, **more}


def steps(device: torch.device, sizes: Sequence[int], name: str) -> Iterator[Row]:
    """Run three steps of an optimizer from the same start on both devices."""
    op, count, numbers, shared = STEPS[name]
    for dtype in FLOATS:
        low = torch.bfloat16 if dtype == torch.float32 else dtype
        for n in sizes:
            start, gradients = spoiled(randn(n, 0), 1), [spoiled(randn(n, t, dtype), t) for t in (1, 2, 3)]
            for place in PLACES if n < LARGE else PLACES[1:2]:
                ends = []
                for where in (device, torch.device("cpu")):
                    p, out = at(where, place[0], start), at(where, place[3], torch.zeros(n, dtype=low))
                    state = [at(where, place[2], torch.zeros(n)) for _ in range(count)]
                    for t, gradient in enumerate(gradients, 1):
                        g = at(where, place[1], gradient)
                        lists = [[x] for x in (p, g, *state, out)]
                        getattr(OPS, op)(*lists, [], [], *([x] for x in numbers(t)), *shared)
                    ends.append((p, *state, out))
                equal = all(same(x, y) for x, y in zip(*ends, strict=True))
                yield row(name, f"{dtype} n={n} at {place}", equal)


def exact_adamw(device: torch.device, sizes: Sequence[int]) -> Iterator[Row]:
    """Compare ten steps with float64."""
    n = max(3000, *sizes)
    for dtype in FLOATS[:2]:
        p, m, v = randn(n, 0).to(device), torch.zeros(n, device=device), torch.zeros(n, device=device)
        right: Any = tuple(x.cpu().double() for x in (p, m, v))
        for t in range(1, 11):
            g = randn(n, t, dtype)
            columns = [[x] for x in (1e-3, 0.9, 0.999, 1e-8, 0.1, float(t))]
            OPS.adam_([p], [g.to(device)], [m], [v], [], [], [], *columns, 1.0, True)
            right = reference.adamw(right[0], g.double(), right[1], right[2], t, weight_decay=0.1)
        errors = [float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip((p, m, v), right, strict=True)]
        within = all(error <= limit for error, limit in zip(errors, LIMITS, strict=True))
        yield row("float64", f"{dtype} n={n}", within, errors=errors)


def sums(device: torch.device, sizes: Sequence[int]) -> Iterator[Row]:
    """Compare sums of squares bit for bit, also with one infinity."""
    for dtype in FLOATS:
        for n in sizes:
            for shift in SHIFTS:
                x = randn(n, n, dtype)
                got, want = OPS.square_sum(at(device, shift, x)), OPS.square_sum(x)
                close = math.isclose(got.item(), x.double().square().sum().item(), rel_tol=1e-13)
                yield row("sums", f"{dtype} n={n} shift={shift}", same(got, want) and close)
        x = torch.ones(5000, dtype=dtype)
        x[4321] = math.inf
        yield row("sums", f"{dtype} infinity", not math.isfinite(OPS.square_sum(x.to(device)).item()))


def many(device: torch.device, sizes: Sequence[int]) -> Iterator[Row]:
    """Compare ops on tables of tensors."""
    cpu, count = torch.device("cpu"), len(sizes)
    columns = [[x] * count for x in (1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0)]
    for dtype in FLOATS:
        low = torch.bfloat16 if dtype == torch.float32 else dtype
        ends: list[list[Tensor]] = []
        for where in (device, cpu):
            p, m, v = ([at(where, i % 2, randn(n, i + k).abs()) for i, n in enumerate(sizes)] for k in (0, 20, 40))
            g = [at(where, i % 3, randn(n, i + 60, dtype)) for i, n in enumerate(sizes)]
            out = [torch.zeros(n, dtype=low, device=where) for n in sizes]
            OPS.adam_(p, g, m, v, out, [], [], *columns, 0.7, True)
            ends.append([*p, *m, *v, *out])
        yield row("many", str(dtype), all(same(x, y) for x, y in zip(*ends, strict=True)))


def streams(device: torch.device, sizes: Sequence[int]) -> Iterator[Row]:
    """Check that a step on a side stream runs after earlier work of that stream, and that tables
    are not overwritten while they wait."""
    if device.type != "cuda":
        return
    n, count, ends = min(100_003, max(sizes)), 20, []
    for turn in range(2):
        tensors = [[randn(n, 4 * i + k).to(device).abs() for i in range(5)] for k in range(4)]
        with torch.cuda.stream(torch.cuda.Stream(device) if turn else torch.cuda.current_stream(device)):
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
            for t in range(1, count + 1):
                for gradient in tensors[1]:
                    gradient.mul_(0.99)
                columns = [[x] * 5 for x in (1e-3, 0.9, 0.999, 1e-8, 0.1, float(t))]
                OPS.adam_(*tensors, [], [], [], *columns, 1.0, True)
        torch.cuda.synchronize(device)
        ends.append([x for each in tensors for x in each])
    yield row("streams", f"{count} steps", all(same(x, y) for x, y in zip(*ends, strict=True)))


def narrow(device: torch.device, sizes: Sequence[int]) -> Iterator[Row]:
    """Compare the optimizers with states in bf16, rounded with the same noise."""
    makes: dict[str, Callable[..., FusedOptimizer]] = {
        "Adam": FusedAdam,
        "Lion": FusedLion,
        "Adagrad": FusedAdagrad,
        "SGD": partial(FusedSGD, lr=1e-3, momentum=0.9),
    }
    for (name, make), dtype in product(makes.items(), FLOATS):
        ends = []
        for where in (device, torch.device("cpu")):
            weights = [torch.nn.Parameter(at(where, i % 2, randn(n, i))) for i, n in enumerate(sizes)]
            optimizer = make(weights, states="bf16")
            for step in range(3):
                gradients = [at(where, i % 3, randn(n, 60 + i + step, dtype)) for i, n in enumerate(sizes)]
                with torch.no_grad():
                    updates = [ShardUpdate(w, g, None, 0) for w, g in zip(weights, gradients, strict=True)]
                    optimizer.update(updates, 0.7)
            kept = [value for state in optimizer.state.values() for value in state.values()]
            ends.append([weight.detach() for weight in weights] + [x.float() for x in kept if torch.is_tensor(x)])
        yield row("narrow", f"{name} bf16 {dtype}", all(same(x, y) for x, y in zip(*ends, strict=True)))


SECTIONS: dict[str, Callable[[torch.device, Sequence[int]], Iterator[Row]]] = {
    **{name: partial(steps, name=name) for name in STEPS},
    "float64": exact_adamw,
    "sums": sums,
    "many": many,
    "narrow": narrow,
    "streams": streams,
}


def run(device: torch.device, name: str, *, tiny: bool = False) -> tuple[Row, bool]:
    """Run one section; return its row, and whether the device is usable afterwards."""
    rows: list[Row] = []
    try:
        for each in SECTIONS[name](device, SIZES[:6] if tiny else SIZES):
            rows.append(each)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as trouble:
        rows.append(row(name, f"after {len(rows)} cases: {type(trouble).__name__}: {trouble}"[:400], False))
        return summary(name, rows), alive(device)
    return summary(name, rows), True


def alive(device: torch.device) -> bool:
    """Return whether the device is usable: after an illegal access, every later call fails with the
    same error."""
    try:
        return bool(torch.ones(2, device=device).sum().item() == 2.0)
    except Exception:
        return False


def not_native(device: torch.device) -> Row:
    """List the kernels that could not be loaded: they ran as plain torch, so equal results prove
    nothing."""
    backend = cuda_backend().native
    refused = {} if backend is None else {kernel.name: why for kernel, why in backend.refused.items()}
    if device.type == "cuda" and backend is None:
        refused = {"all": cuda_backend().why}
    return summary("kernels", [row("kernels", f"{name}: {why}", False) for name, why in refused.items()])


def summary(name: str, rows: Sequence[Row]) -> Row:
    """Return the number of cases, how many differ, the first that does, and the largest errors."""
    different = [each["case"] for each in rows if not each["equal"]]
    found: Row = {"name": name, "cases": len(rows), "different": len(different), "first": "; ".join(different[:1])}
    errors = [each["errors"] for each in rows if "errors" in each]
    return found | ({"errors": [max(column) for column in zip(*errors, strict=True)]} if errors else {})


def main() -> None:
    """Print a row per section."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="these only")
    options.add_argument("--dry-run", action="store_true", help="CPU against CPU")
    options.add_argument("--tiny", action="store_true", help="small sizes, as for a memory checker")
    given = options.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("gpu_exact.py: no CUDA device; --dry-run tries the script on the CPU")
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", torch.cuda.current_device())
    different = 0
    for name in given.sections or SECTIONS:
        line, usable = run(device, name, tiny=given.tiny or given.dry_run)
        print(json.dumps(line), flush=True)
        different += line["different"]
        if not usable:
            raise SystemExit(BROKEN)
    if refused := not_native(device)["different"]:
        print(json.dumps(not_native(device)), flush=True)
    raise SystemExit(1 if different or refused else 0)


if __name__ == "__main__":
    main()
