"""The engine on the stand-in device: the bits of ranks that compute on the CPU, with no access that
events do not order, no memory that is freed too early, and few waits of the host.

A cell trains twice on the same ranks, once as if there were no device.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.engine.offloaded import PRECISIONS
from tests.support import pipelines
from tests.support.dense import STAGES
from tests.support.device import device
from tests.support.models import ADAMW, TinyLM, tokens
from tests.support.pool import Pools, RankPool

STEPS, BATCH = 3, 8


@dataclass(frozen=True)
class Cell:
    """``order``: in which the device runs streams that no event orders."""

    stage: str
    precision: str = "fp32"
    order: str = "late"
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    blocks: int = 2
    first: str = "built"  # where first values come from: the model or "weights"

    def engine(self, folder: str | None = None) -> zero_trial.Engine:
        """``folder``: of the weights."""
        # dropout of accelerators and of the CPU differ in how they round 16-bit gradients
        drop = 0.1 if self.precision == "fp32" else 0.0
        config = {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.5,
            "optimizer": ADAMW,
            "comm_timeout_seconds": 30.0,
            "comm_transport": "gloo",  # whose control values the host would wait for
            "zero_optimization": STAGES[self.stage] | self.zero,
        }
        torch.manual_seed(1)
        with torch.device("cpu" if self.first == "built" else "meta"):
            model = TinyLM(self.blocks, dropout=drop)
        config |= PRECISIONS[self.precision] | self.config
        return zero_trial.initialize(model=model, config=config, weights=folder if self.first == "weights" else None)[0]


@dataclass
class Found:
    """What a rank ended with, and what its host did in the last step."""

    losses: list[float]
    norm: float | None
    state: dict[str, torch.Tensor]
    waits: list[str]
    copies: list[tuple[str, int, bool]]
    growth: int  # bytes of the device's memory from one step to the next

    def differences(self, other: Found) -> list[str]:
        parts = [name for name, value in self.state.items() if not torch.equal(value, other.state[name])]
        numbers = (self.losses, self.norm) == (other.losses, other.norm)
        return parts if numbers else [f"{self.losses} {self.norm}, {other.losses} {other.norm}", *parts]


def train(cell: Cell) -> Found:
    here = device.use()
    engine = cell.engine()
    torch.manual_seed(5 + engine.global_rank)
    micro, losses, live = engine.train_micro_batch_size_per_gpu(), [], 0
    for step in range(STEPS):
        here.scheduler.reset()
        growth, live = here.live - live, here.live
        for turn in range(cell.accumulation):
            start = (turn * engine.dp_world_size + engine.mpu.get_data_parallel_rank()) * micro
            batch = tokens(step, BATCH)[start : start + micro]
            if engine.device.type != "cpu":
                batch = batch.pin_memory().to(engine.device, non_blocking=True)
            losses.append(engine(batch))
            engine.backward(losses[-1])
            engine.step()
        losses[-cell.accumulation :] = [loss.detach() for loss in losses[-cell.accumulation :]]
    waits, copies = list(here.waits), here.copies()
    state = {name: value.cpu().clone() for name, value in engine.module_state_dict().items()}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return Found([loss.item() for loss in losses], norm, state, waits, copies, growth)


def on_both(cells: list[Cell]) -> list[tuple[Found, list[str]]]:
    return compared(cells, train)


def compared(cells: Sequence[Any], run: Callable[[Any], Found]) -> list[tuple[Found, list[str]]]:
    """What each cell leaves on the device, and how it differs from the CPU."""
    found = []
    for cell in cells:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.standin, "is_available", lambda: False)
            want = run(copy.deepcopy(cell))
        device.use().scheduler.order = cell.order
        got = run(copy.deepcopy(cell))
        torch.standin.synchronize()
        device.use().scheduler.order = "late"
        found.append((got, got.differences(want)))
    return found


COVERING = [
    Cell("zero0", "bf16", "early", blocks=1),
    Cell("zero2", "fp16", "random", accumulation=2, blocks=1),
    Cell("zero3-free", order="late", blocks=1),
]


def check(pool: RankPool, cells: list[Cell], *, waits: int | None) -> None:
    for answers in pool.run(on_both, cells):
        for cell, (found, differences) in zip(cells, answers, strict=True):
            assert differences == [], cell
            if waits is not None:
                assert len(found.waits) <= waits, (cell, found.waits)


def test_each_stage_has_the_bits_of_the_cpu_and_waits_once_per_step(devices: Pools) -> None:
    """The one wait is for the sums of the norm."""
    check(devices(2), COVERING, waits=1)


def fullest(cells: list[Cell], folder: str) -> list[tuple[dict[str, int], int, set[str]]]:
    """For each engine: by how much the device's memory was fuller while it was built, and while the
    whole model left it, than in the end; the bytes of its largest group, or two fp32 copies of
    its largest parameter; and the names that this rank got."""
    here, found = device.use(), []
    for cell in cells:
        gc.collect()  # the engine before
        here.library.standin_reset_peak()
        engine = cell.engine(folder)
        torch.standin.synchronize()
        largest = max(
            max(
                group.layout.numel * group.dtype.itemsize,
                # wide first values of a 16-bit group come one parameter at a time, in two copies
                2 * 4 * max(slot.numel for slot in group.layout.slots),
            )
            for group in engine.sharded.groups
        )
        over, live = {"initialize": here.peak - here.live}, here.live
        whole = engine.module_state_dict()
        for act in ("state", "save", "destroy"):
            here.library.standin_reset_peak()
            if act == "state":
                state = engine.module_state_dict(rank0_only=True)
            elif act == "save":
                engine.save_16bit_model(folder)
            else:
                engine.destroy()
            torch.standin.synchronize()
            over[act] = here.peak - live
        assert all(value.is_cpu and torch.equal(value, whole[name].cpu()) for name, value in state.items())
        found.append((over, largest, set(whole) ^ set(state)))
        del engine
    return found


def test_the_device_holds_one_group_at_most_beside_what_stays(devices: Pools, tmp_path: Path) -> None:
    """Also where 16-bit groups get their values from an fp32 model: those come in parts. A model on
    the meta device reads what an engine before has saved."""
    cells = [
        *(Cell(stage, "fp32", blocks=1, first="built") for stage in ("zero0", "zero2", "zero3")),
        *(Cell(stage, "bf16", blocks=1, first="weights") for stage in ("zero1", "zero3-free")),
        *(Cell(stage, "bf16", blocks=1, first="built") for stage in ("zero1", "zero3")),
    ]
    for rank, answers in enumerate(devices(2).run(fullest, cells, str(tmp_path))):
        for cell, (over, largest, missing) in zip(cells, answers, strict=True):
            assert max(over.values()) <= largest + 512, (cell, over, largest)  # an allocation is rounded up
            assert bool(missing) is bool(rank and cell.stage != "zero0")


MUON = {"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3, "eps": 1e-3}}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "eps": 1e-3}}}


@pytest.mark.slow
def test_more_ranks(devices: Pools) -> None:
    """Hybrid sharding, and optimizers whose update needs sums over ranks in between, or whole
    tensors."""
    cells = [
        Cell("zero1", "bf16", "random", accumulation=2, config=LAMB, blocks=1),
        Cell("zero3", order="early", config={"mesh": {"replica": 2}}, blocks=1),
        Cell("zero1", config=MUON, blocks=1),
    ]
    check(devices(4), cells, waits=1)


def offloading(folder: Path | None, **keys: Any) -> dict[str, Any]:
    if folder is None:
        return {"offload_optimizer": {"device": "cpu", "pin_memory": True, **keys}}
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **keys}, "sub_group_size": 4096}


def test_an_offloaded_step_asks_for_one_number(devices: Pools) -> None:
    """Beside the gradients that the update needs, the host waits for the sums of the norm."""
    cells = [Cell("zero2", "bf16", blocks=blocks, zero=offloading(None)) for blocks in (1, 3)]
    for (few, _), (many, _) in devices(2).run(on_both, cells):
        for found in (few, many):
            assert len([wait for wait in found.waits if " at copies.py" not in wait]) == 1, found.waits
        assert len(many.copies) > len(few.copies) + 3  # there are more groups


@pytest.mark.parametrize("count", [1, 2])
def test_whole_tensors_are_updated_on_the_device_wherever_their_state_is(
    devices: Pools, tmp_path: Path, count: int
) -> None:
    params = {"device": "cpu"}
    cells = [
        Cell("zero0", "bf16", config=MUON, zero=offloading(None), blocks=1),
        Cell("zero1", "fp32", config=MUON, zero=offloading(None), blocks=1),
        Cell("zero2", "bf16", "early", config=MUON, zero=offloading(tmp_path), blocks=1),
        Cell("zero3-free", "bf16", config=MUON, zero=offloading(tmp_path) | {"offload_param": params}, blocks=1),
        Cell("zero3-free", "fp32", config=MUON, zero={"offload_param": params}, blocks=1),
        Cell("zero2", "bf16", config=LAMB, zero=offloading(tmp_path), blocks=1),
    ]
    check(devices(count), cells, waits=None)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of two stages, with one rank on each or two."""

    zero: dict[str, Any]
    order: str = "late"
    count: int = 4
    schedule: str = "1f1b"

    def train(self) -> Found:
        here = device.use()
        section = {"stages": 2, "schedule": self.schedule}
        engine = pipelines.make_engine(pipelines.layers(2), 2, self.zero, self.count, pipeline=section)
        line = engine.mpu.get_data_parallel_rank()
        data = pipelines.batches(line, self.count, STEPS)
        losses = [engine.train_batch(data if engine.is_first_stage() else None) for _ in range(STEPS - 1)]
        here.scheduler.reset()
        losses.append(engine.train_batch(data if engine.is_first_stage() else None))
        waits, copies = list(here.waits), here.copies()
        state = {name: value.cpu().clone() for name, value in engine.module_state_dict().items()}
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return Found([loss.item() for loss in losses], norm, state, waits, copies, 0)


def pipelines_on_both(cells: list[Pipeline]) -> list[tuple[Found, list[str]]]:
    return compared(cells, lambda cell: cell.train())


@pytest.mark.parametrize(
    ("size", "cell"),
    [
        (2, Pipeline({"stage": 3, "stage3_param_persistence_threshold": 0}, "random")),
        (4, Pipeline({"stage": 2}, "early")),
    ],
)
def test_a_pipeline_has_the_bits_of_the_cpu(devices: Pools, size: int, cell: Pipeline) -> None:
    for answers in devices(size).run(pipelines_on_both, [cell]):
        assert [differences for _, differences in answers] == [[]]


def resumed(folder: str, stage: str, order: str) -> dict[str, bool]:
    """Whether what is saved while training goes on is what was there at the call, on a device that
    copies as late as it may; and whether the CPU reads it."""
    cell, here = Cell(stage, "bf16", order, blocks=1), device.use()

    def go_on(engine: zero_trial.Engine, step: int) -> dict[str, torch.Tensor]:
        share = BATCH // engine.dp_world_size
        start = engine.global_rank * share
        engine.backward(engine(tokens(step, BATCH)[start : start + share].to(engine.device)))
        engine.step()
        return {name: value.cpu().clone() for name, value in engine.module_state_dict().items()}

    here.scheduler.order = order
    engine, found = cell.engine(), {}
    go_on(engine, 0)
    before = go_on(engine, 1)
    engine.save_checkpoint(folder, "now")
    engine.save_checkpoint(folder, "later", asynchronous=True)
    after = go_on(engine, 2)
    engine.wait_for_checkpoint()
    engine.destroy()
    for tag in ("now", "later"):
        for where in ("cpu", "standin"):
            with pytest.MonkeyPatch.context() as patch:
                if where == "cpu":
                    patch.setattr(torch.standin, "is_available", lambda: False)
                again = cell.engine()
                again.load_checkpoint(folder, tag)
                assert again.device.type == where
                state = again.module_state_dict()
                found[f"{tag} {where} read"] = all(
                    torch.equal(value, state[name].cpu()) for name, value in before.items()
                )
                state = go_on(again, 2)
                found[f"{tag} {where} resumed"] = all(torch.equal(value, state[name]) for name, value in after.items())
                again.destroy()
    torch.standin.synchronize()
    here.scheduler.order = "late"
    return found


@pytest.mark.parametrize(("stage", "order"), [("zero2", "late"), ("zero3-free", "random")])
def test_a_checkpoint_holds_what_was_there_at_the_call(devices: Pools, tmp_path: Path, stage: str, order: str) -> None:
    for found in devices(2).run(resumed, str(tmp_path), stage, order):
        assert len(found) == 8 and all(found.values()), found
