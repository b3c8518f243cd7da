"""How far training with zero_trial ends from plain torch, for everything that people bring, at each
ZeRO stage and precision; docs/exactness.md is made from it.

python -m tests.exactness.measure docs/exactness.md      # two minutes; writes the page
python -m tests.exactness.measure --only EMA             # prints the rows whose name contains EMA
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_trial
from tests.support import pipelines
from tests.support.dense import Turn
from tests.support.models import ADAMW, Tower
from tests.support.pool import Pools
from zero_trial.errors import ConfigError, TrialError
from zero_trial.pipeline import PipelineModule
from zero_trial.zero import safe_get_full_fp32_param

STEPS = 3
RATE = 3e-2  # large: an update is far above the rounding of weights near 1
EXACT = 2e-5  # the largest difference in fp32 that needs no reason
ROUNDED = 1e-2  # the same in bf16, where one weight in 256 may round to its neighbor

# Small buckets and blocks, as in tests/support/dense.py, so that tiny models are cut and freed.
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "reduce_bucket_size": 3000},
    "1": {"stage": 1, "reduce_bucket_size": 3000},
    "2": {"stage": 2, "reduce_bucket_size": 3000},
    "3": {"stage": 3, "param_persistence_threshold": 20, "module_granularity_threshold": 1},
}
STAGES["3 freed"] = STAGES["3"] | {"param_persistence_threshold": 0, "reshard_after": "forward"}
DTYPES = ("fp32", "bf16")
Place = tuple[str, str]  # dtype and stage
CELLS: list[Place] = [(dtype, stage) for dtype in DTYPES for stage in STAGES]


def square(model: Any, turn: Turn) -> torch.Tensor:
    """Return the loss of tests/support/models.py's Tower."""
    return (model(turn.normal(4, 5)).float() - 1).square().mean()


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW as `ADAMW_FAST` says."""
    return torch.optim.AdamW(params, lr=RATE, weight_decay=0.01, eps=1e-3)


# For eps see ADAMW.
ADAMW_FAST = {"type": "AdamW", "params": ADAMW["params"] | {"lr": RATE}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that people bring, in zero_trial's form and in plain torch's.

    Args:
        loss: of ``loss(model, turn)``; the engine takes the model's place.
        optimizer: a section of ds_config, or what is passed to ``initialize``.
        plain: the same for plain torch.
        backward: of ``(engine, turn)``, instead of ``engine.backward(loss(engine, turn))``.
        plain_backward: of ``(model, turn)``, instead of ``loss(model, turn).backward()``.
        share: what plain torch multiplies the gradients of a step with, by step, instead of one
            over the number of micro-batches of all ranks.
        edit: done with the module between the last backward pass and the step, on both sides.
        before: makes what ``initialize`` gets of the module.
        after: done with the engine after ``initialize``.
        use: done with the module after each step, on both sides; what it returns is compared, too.
        engine_use: the same with the engine, where it replaces ``use`` there.
        ranks: of the world.
        stages: of a pipeline, whose layers ``build`` returns and ``loss`` is the loss_fn of.
        around: what both sides train in, in fp32.
        compiles: torch.compile must have made graphs of the model.
        raises: names of errors of torch that count as one in words.
        needs: the library without which the row cannot be measured.
        limits: the largest difference by dtype, where it is not `EXACT` or `ROUNDED`.
        remark: the reason for a limit or an error.
    """

    name: str
    build: Callable[[], Any] = Tower
    loss: Callable[[Any, Turn], torch.Tensor] = square
    optimizer: Any = field(default_factory=lambda: ADAMW_FAST)
    plain: Callable[[Any], torch.optim.Optimizer] = adamw
    config: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip: float = 0.0
    backward: Callable[[Any, Turn], Any] | None = None
    plain_backward: Callable[[Any, Turn], Any] | None = None
    share: Callable[[int], float] | None = None
    edit: Callable[[nn.Module], Any] | None = None
    before: Callable[[nn.Module], nn.Module] | None = None
    after: Callable[[Any], Any] | None = None
    use: Callable[[nn.Module, dict[str, Any]], Mapping[str, torch.Tensor]] | None = None
    engine_use: Callable[[zero_trial.Engine], Mapping[str, torch.Tensor]] | None = None
    ranks: int = 2
    stages: int = 1
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiles: bool = False
    raises: tuple[str, ...] = ()
    needs: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""

    def model(self, stages: int) -> nn.Module:
        """Build the model; a pipeline with layers of ``stages`` stages."""
        if self.stages == 1:
            return self.build()
        return PipelineModule(self.build(), num_stages=stages, loss_fn=pipelines.cross_entropy, seed_layers=True)

    def limit(self, dtype: str) -> float:
        """Return the largest difference that a cell of this row may show."""
        return self.limits.get(dtype, EXACT if dtype == "fp32" else ROUNDED)


@dataclass(frozen=True)
class Cell:
    """What was measured.

    Args:
        gap: the relative difference; None for an error, whose text is ``said``.
        kind: "error" for an error in words, "crash" for any other.
    """

    gap: float | None
    kind: str = ""
    said: str = ""

    def shown(self) -> str:
        """Return the cell as the page has it: rounded up to 1, 2 or 5 times a power of ten."""
        if not self.gap:
            return self.kind if self.gap is None else "0"
        bounds = (f"{digit}e{power}" for power in range(-9, 9) for digit in (1, 2, 5))
        return next((bound for bound in bounds if self.gap <= float(bound)), "NaN")


# --- plain torch ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """Where plain torch ends: the trained weights in fp32, how far an element has moved (root of
    the mean square), everything else of the state, and what `Row.use` returned."""

    weights: dict[str, torch.Tensor]
    moved: float
    others: dict[str, torch.Tensor]
    used: dict[str, torch.Tensor]


def train_plain(row: Row, dtype: str) -> Plain:
    """Train in one process on the micro-batches of all ranks.

    bf16: parameters and saved buffers in bf16, gradients of one micro-batch per rank summed in
    bf16, of several in fp32, and the optimizer on fp32 masters, as the engine has them.
    """
    torch.manual_seed(1)
    model, lines = row.model(1), row.ranks // row.stages
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    start = {name: param.detach().clone() for name, param in params.items()}
    masters = params
    if dtype == "bf16":
        masters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        _to_bf16(model)
    optimizer = row.plain(list(masters.values()))
    backward = row.plain_backward or (lambda model, turn: row.loss(model, turn).backward())
    if row.stages > 1:
        backward = _piped_backward
    memory: dict[str, Any] = {}
    used: Mapping[str, torch.Tensor] = {}
    for step in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(lines):
            own: dict[str, torch.Tensor] = {}
            for number in range(row.accumulation):
                backward(model, Turn(step, number, rank))
                _move(params, own, widen=row.accumulation > 1)
            for name, value in own.items():  # fp32: the sum of all ranks is rounded once
                sums[name] = sums[name] + value.float() if name in sums else value.float()
        share = row.share(step) if row.share else 1 / (lines * row.accumulation)
        for name, value in sums.items():
            params[name].grad = (value * share).to(params[name].dtype)
        if row.edit is not None:
            row.edit(model)
        for name, master in masters.items() if masters is not params else ():
            grad = params[name].grad
            if grad is not None and row.accumulation > 1:
                grad = sums[name] * share
            master.grad = None if grad is None else grad.float()
        if row.clip:
            nn.utils.clip_grad_norm_(masters.values(), row.clip)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, master in masters.items() if masters is not params else ():
                params[name].copy_(master)
        if row.use is not None:
            used = row.use(model, memory)
    weights = {name: master.detach().clone() for name, master in masters.items()}
    count = sum(value.numel() for value in start.values())
    moved = math.sqrt(sum((weights[name] - value).square().sum().item() for name, value in start.items()) / count)
    others = {name: value.clone() for name, value in model.state_dict().items() if name not in weights}
    return Plain(weights, moved, others, {name: value.detach().clone() for name, value in used.items()})


def _to_bf16(model: nn.Module) -> None:
    """Cast parameters, saved buffers and inputs. Buffers that are not saved keep fp32."""
    for module in model.modules():
        for param in module.parameters(recurse=False):
            param.data = param.data.bfloat16()
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                setattr(module, name, buffer.bfloat16())

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        def low(value: Any) -> Any:
            return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return tuple(map(low, args)), {name: low(value) for name, value in kwargs.items()}

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _piped_backward(model: nn.Module, turn: Turn) -> None:
    inputs, labels = pipelines.micro_batch(turn.step, turn.turn, turn.rank)
    pipelines.cross_entropy(model(inputs), labels).backward()


def _move(params: Mapping[str, nn.Parameter], into: dict[str, torch.Tensor], *, widen: bool) -> None:
    """Add gradients of one micro-batch ``into`` those before it, in fp32 if ``widen``."""
    for name, param in params.items():
        if param.grad is not None:
            grad = param.grad.float() if widen else param.grad
            into[name] = into[name] + grad if name in into else grad
            param.grad = None


# --- zero_trial -----------------------------------------------------------------------------------


def train_engine(row: Row, dtype: str, stage: str, plain: Plain) -> float:
    """Train on this rank and return the largest difference of a tensor to ``plain``, as the root of
    its mean square in units of ``plain.moved``. Collective."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": row.accumulation,
        "gradient_clipping": row.clip,
        "comm_timeout_seconds": 10.0,
        "zero_optimization": STAGES[stage],
        "bf16": {"enabled": dtype == "bf16"},
    }
    options: dict[str, Any] = {}
    if isinstance(row.optimizer, dict):
        config["optimizer"] = row.optimizer
    else:
        options["optimizer"] = row.optimizer
    torch.manual_seed(1)
    model = row.model(row.stages)
    if row.before is not None:
        model = row.before(model)
    engine = zero_trial.initialize(model=model, config=config | dict(row.config), **options)[0]
    try:
        if row.after is not None:
            row.after(engine)
        memory: dict[str, Any] = {}
        used: Mapping[str, torch.Tensor] = {}
        data = pipelines.batches(engine.mesh.data.index, row.accumulation, STEPS)
        for step in range(STEPS):
            if row.stages > 1:
                engine.train_batch(data)
            for number in range(row.accumulation if row.stages == 1 else 0):
                turn = Turn(step, number, engine.global_rank)
                if row.backward is not None:
                    row.backward(engine, turn)
                else:
                    engine.backward(row.loss(engine, turn))
                if row.edit is not None and number == row.accumulation - 1:
                    row.edit(engine.module)
                engine.step()
            if row.engine_use is not None:
                used = row.engine_use(engine)
            elif row.use is not None:
                used = row.use(engine.module, memory)
        if row.compiles and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise RuntimeError("nothing was compiled")
        return _difference(engine, plain, used)
    finally:
        engine.destroy()
        if row.compiles:  # a new model compiles again
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()


def _difference(engine: zero_trial.Engine, plain: Plain, used: Mapping[str, torch.Tensor]) -> float:
    masters = {_own_name(n): p for n, p in engine.module.named_parameters() if p.requires_grad}
    found = {name: safe_get_full_fp32_param(param) for name, param in masters.items()}
    state = {_own_name(name): value for name, value in engine.module_state_dict().items()}
    one_stage = engine.mesh.pipe.size == 1  # else a rank has the layers of its own alone
    pairs = [(found[name], value) for name, value in plain.weights.items() if one_stage or name in found]
    if engine.global_rank == 0 and one_stage:  # each rank has its own buffers
        pairs += [(state[name], value) for name, value in plain.others.items() if value.is_floating_point()]
    pairs += [(used[name].detach(), value) for name, value in plain.used.items()]
    gaps = [(a.float() - b.float()).square().mean().sqrt().item() for a, b in pairs if b.numel()]
    return max(gap if gap == gap else math.inf for gap in gaps) / plain.moved


def _own_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def measure(name: str, places: Sequence[Place] = CELLS) -> list[Cell]:
    """Measure these cells of the row of this name, in the order of `CELLS`. Collective.

    A row has functions that do not travel to ranks, so each finds it by its name.
    """
    from tests.exactness.rows import SECTIONS

    row = next(row for rows in SECTIONS.values() for row in rows if row.name == name)
    cells: list[Cell] = []
    for dtype in dict.fromkeys(dtype for dtype, _ in places):
        around = row.around if dtype == "fp32" else nullcontext
        with around():
            plain = train_plain(row, dtype)
        for stage in [stage for kind, stage in places if kind == dtype]:
            try:
                with around():
                    cells.append(Cell(train_engine(row, dtype, stage, plain)))
            except Exception as error:
                said = "".join(traceback.format_exception(error))
                if not isinstance(error, (ConfigError, TrialError)) and type(error).__name__ not in row.raises:
                    # The other rank may wait for this one: nothing more can be measured.
                    return cells + [Cell(None, "crash", said)] * (len(places) - len(cells))
                cells.append(Cell(None, "error", said))
    return cells


def measured(pools: Pools, row: Row, places: Sequence[Place] = CELLS) -> list[Cell]:
    """Measure cells of a row on its ranks: a crash where one of them has it, else an error, else
    the largest difference."""

    def harm(cell: Cell) -> tuple[bool, bool, bool, float]:
        return cell.kind == "crash", cell.gap is None, "MeshError" not in cell.said, cell.gap or 0.0

    return [max(cells, key=harm) for cells in zip(*pools(row.ranks).run(measure, row.name, places), strict=True)]


def missing(row: Row) -> str:
    """Return why the row cannot be measured here; nothing where it can."""
    if not row.needs or importlib.util.find_spec(row.needs) is not None:
        return ""
    return f"{row.needs} is not installed"


# --- the page -------------------------------------------------------------------------------------

_HEAD = f"""# The same numbers as plain torch

This page compares zero_trial on two CPU ranks with plain torch in one process, trained from the
same seed on the same micro-batches. A cell is the largest difference (root mean square) of any
tensor after {STEPS} steps, relative to how far the weights moved in these steps, rounded up; `0` means
bit-identical. **error** means that the call is refused with a message that names an alternative. "3
freed" is stage 3 with `param_persistence_threshold` 0: every parameter is freed after each use. For
fp32, the last column gives the reason for each difference above 2e-5.

The bf16 cells compare with plain torch under the same policy: parameters and gradients in bf16,
masters, optimizer and non-persistent buffers in fp32. If a master differs in its last bit, it may
round to the neighboring bf16 weight, and later steps use that weight: a few cells show up to 1e-2.

`python -m tests.exactness.measure docs/exactness.md` writes this page. `make test-all` measures two
cells of each row again ("3 freed" in fp32 and one other), `make test-extended` the rest. The models
are tiny. Measured with

{{versions}}.
"""


def page(shown: Mapping[str, Sequence[str]]) -> str:
    """Render the page from the cells of each row, by name."""
    from tests.exactness.rows import SECTIONS

    names = [f"{dtype} {stage}" for dtype, stage in CELLS]
    parts = [_HEAD.format(versions=",\n".join(sorted(_versions())))]
    for section, rows in SECTIONS.items():
        parts += [f"## {section}\n", f"| | {' | '.join(names)} | |", f"|---|{'---|' * (len(CELLS) + 1)}"]
        for row in rows:
            parts.append(f"| {row.name} | {' | '.join(shown[row.name])} | {row.remark} |")
        parts.append("")
    return "\n".join(parts)


def _versions() -> list[str]:
    from tests.exactness.rows import SECTIONS

    needed = {row.needs for rows in SECTIONS.values() for row in rows} - {""} | {"torch"}
    return [f"{name} {importlib.metadata.version(name)}" for name in needed if importlib.util.find_spec(name)]


def read_page(text: str) -> dict[str, tuple[list[str], str]]:
    """Read the cells and the remark of each row from a page."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return {row[0][2:]: (row[1 : 1 + len(CELLS)], row[-1].rstrip("| ")) for row in rows}


def main() -> int:
    """Measure the rows, print them, and write the page if one is given, with the other rows as they
    are there."""
    from tests.exactness.rows import SECTIONS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("page", nargs="?", type=Path)
    options.add_argument("--only", default="", help="a regular expression for 'section: row'")
    given = options.parse_args()
    pools, wrong = Pools(), 0
    old = read_page(given.page.read_text("utf-8")) if given.page is not None and given.only else {}
    shown = {name: cells for name, (cells, _) in old.items()}
    for section, rows in SECTIONS.items():
        for row in rows:
            if not re.search(given.only, f"{section}: {row.name}", re.IGNORECASE):
                continue
            start = time.monotonic()
            cells = [] if missing(row) else measured(pools, row)
            shown[row.name] = [cell.shown() for cell in cells] or ["not installed"] * len(CELLS)
            figures = [f"{cell.gap:7.1e}" if cell.gap is not None else cell.kind for cell in cells]
            print(f"{row.name:56}", *figures, f"{time.monotonic() - start:5.1f} s", missing(row), flush=True)
            for (dtype, stage), cell in zip(CELLS, cells, strict=False):
                if not acceptable(row, dtype, cell):
                    wrong += 1
                    print(f"    {dtype} {stage}: above {row.limit(dtype)}, or no error in words {cell.said[-2000:]}")
            if any(cell.kind == "crash" for cell in cells):
                pools(row.ranks).close()
    pools.close()
    if given.page is not None and not wrong:
        given.page.write_text(page(shown), "utf-8")
    return 1 if wrong else 0


def acceptable(row: Row, dtype: str, cell: Cell) -> bool:
    """Say whether a cell is within the row's limit, or an error in words."""
    return cell.kind == "error" if cell.gap is None else cell.gap <= row.limit(dtype)


if __name__ == "__main__":
    raise SystemExit(main())
