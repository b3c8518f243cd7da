"""Faults of checkpoints: flipped bits, truncated or missing files; and every number of ranks and
stage loaded into every other."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults_runs import Result, Workbench
from benchmarks.faults_trial import PERIOD, Plan
from tests.support.pool import Pools

NEWEST, OLDER = 3 * PERIOD, 2 * PERIOD


def flipped_bits(workbench: Workbench, count: int) -> Iterator[Result]:
    """F4: one random bit of one file of the newest checkpoint."""
    files = damageable(workbench)
    for number in range(count):
        name = files[number % len(files)]
        yield damaged(workbench, name, kind_of(name), "flip")


def lost_files(workbench: Workbench, count: int) -> Iterator[Result]:
    """F5: a file of the newest checkpoint is truncated or missing."""
    files = damageable(workbench)
    for number in range(count):
        name, how = files[number % len(files)], ("cut", "gone")[number // len(files) % 2]
        yield damaged(workbench, name, f"{kind_of(name)} {'cut short' if how == 'cut' else 'gone'}", how)


def damageable(workbench: Workbench) -> list[str]:
    """Return the files of a checkpoint."""
    folder = newest(workbench.unbroken(Plan()))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def newest(run: Path) -> Path:
    """Return the newest checkpoint of an uninterrupted run."""
    return run / "checkpoints" / f"step-{NEWEST:06d}"


def kind_of(name: str) -> str:
    """Return the name of a file in the table."""
    return "a file of tensors" if name.endswith(".safetensors") else Path(name).name


def damaged(workbench: Workbench, name: str, kind: str, how: str) -> Result:
    """Damage the newest checkpoint, restart, and check the step and the logged reason."""
    from zero_trial.errors import ZeroTrialError
    from zero_trial.trial.runtime.local import agree_on_start
    from zero_trial.trial.runtime.protocols import Distributed

    run = workbench.copy(workbench.unbroken(Plan()))
    path = newest(run) / name
    damage(path, how, workbench)
    lines: list[str] = []
    begin = time.monotonic()
    try:
        start: dict[str, Any] = agree_on_start(Distributed(), run, note=lines.append)
        why = "" if start["step"] == OLDER else f"{name} {how}: starts from step {start['step']}"
        said = any(f"step-{NEWEST:06d}" in line for line in lines)
        why = why or ("" if said or (how == "gone" and name == "metadata.json") else f"{name} {how}: nothing is said")
    except (ZeroTrialError, ValueError, KeyError, OSError) as error:
        why = f"{name} {how}: {type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    shutil.rmtree(run)
    return Result(kind, not why, seconds, why)


def damage(path: Path, how: str, workbench: Workbench) -> None:
    """Flip one bit, truncate at a random byte, or remove the whole file."""
    content = bytearray(path.read_bytes())
    if how == "flip":
        bit = workbench.chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(content))
    elif how == "cut":
        path.write_bytes(bytes(content[: workbench.chance.randrange(len(content))]))
    else:
        path.unlink()


# --- F6 -------------------------------------------------------------------------------------------

GLOBAL_BATCH = 12  # divisible by one to four ranks
AFTER = 20  # steps after the load
TOLERANCE = 1e-6


def engine_of(stage: int, seed: int) -> Any:
    """Return an engine with an MLP that uses no random numbers."""
    import zero_trial

    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 19), torch.nn.Linear(19, 1)
    )
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "log_level": "error",
    }
    return zero_trial.initialize(model=model, config=config)[0]


def losses(engine: Any, first: int, steps: int) -> list[float]:
    """Return the loss of the global batch in each step."""
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(GLOBAL_BATCH, 7, generator=generator)
        rank, size = engine.global_rank, engine.world_size
        mine = x[rank * GLOBAL_BATCH // size : (rank + 1) * GLOBAL_BATCH // size]
        loss = (engine(mine) - mine.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(sum(engine.mesh.world.gather_json(loss.item(), "loss")) / size)
    return found


def tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return masters and moments as whole tensors. Collective."""
    from zero_trial import zero

    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = zero.safe_get_full_fp32_param(param)
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind} {name}"] = zero.safe_get_full_optimizer_state(param, kind)
    return {name: value.clone() for name, value in found.items()}


def write(stage: int, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Save after three steps; return its tensors and the losses of the steps that follow."""
    engine = engine_of(stage, 1)
    losses(engine, 0, 3)
    engine.save_checkpoint(folder, "here")
    saved = tensors(engine)
    after = losses(engine, 3, AFTER)
    engine.destroy()
    return saved, after


def read(stage: int, folder: str, saved: dict[str, torch.Tensor]) -> tuple[list[str], list[float]]:
    """Load the checkpoint on other ranks or at another stage; return the tensors that differ, and
    the losses of the steps that follow."""
    engine = engine_of(stage, 2)
    engine.load_checkpoint(folder, "here")
    mine = tensors(engine)
    wrong = sorted(
        name for name in saved.keys() | mine.keys() if name not in mine or not torch.equal(saved[name], mine[name])
    )
    after = losses(engine, 3, AFTER)
    engine.destroy()
    return wrong, after


def resharded(workbench: Workbench, count: int) -> Iterator[Result]:
    """F6: ranks x stages loaded into ranks x stages, ``count`` of the 256."""
    places = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))
    pairs = list(itertools.product(places, places))
    chosen = sorted(workbench.chance.sample(pairs, min(count, len(pairs))))
    pools = Pools()
    try:
        for source, of_source in itertools.groupby(chosen, key=lambda pair: pair[0]):
            folder = workbench.folder / f"from-{source[0]}-{source[1]}"
            saved, reference = pools(source[0]).run(write, source[1], str(folder))[0]
            for _, target in of_source:
                yield moved(pools, source, target, folder, saved, reference)
            shutil.rmtree(folder)
    finally:
        pools.close()


def moved(pools: Pools, source: Any, target: Any, folder: Path, saved: Any, reference: list[float]) -> Result:
    """Run one pair of (ranks, stage)."""
    begin = time.monotonic()
    name = f"{source[0]} ranks stage {source[1]} to {target[0]} ranks stage {target[1]}"
    try:
        wrong, after = pools(target[0]).run(read, target[1], str(folder), saved)[0]
    except AssertionError as error:
        return Result("ranks and stages", False, time.monotonic() - begin, f"{name}: {str(error).strip()[-200:]}")
    off = max(abs(a - b) / abs(b) for a, b in zip(after, reference, strict=True))
    why = f"{name}: {', '.join(wrong)} differ" if wrong else ""
    why = why or (f"{name}: losses differ by a factor of 1 + {off:.1e}" if off > TOLERANCE else "")
    return Result("ranks and stages", not why, time.monotonic() - begin, why)
