"""Keys of ds_config from the file to what the engine does: each test fails if its key is
ignored."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_trial
from tests.engine.offloaded import differing
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, difference, tower_loss, train_dense
from tests.support.models import TinyLM, Tower, make_engine, train_engine
from tests.support.pool import Pools, logged_lines
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.resolved_config import resolve_config
from zero_trial.errors import CheckpointError, ConfigError


class Net(nn.Module):
    """Two layers, a table of frequencies and a count, and what its layers computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.register_buffer("frequencies", torch.linspace(1.0, 2.0, 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.down = nn.Linear(16, 1)
        self.computed: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.computed = hidden.dtype
        return self.down(F.relu(hidden) * self.frequencies.to(hidden.dtype)).float().square().mean()


def engine_of(**config: Any) -> zero_trial.Engine:
    torch.manual_seed(0)
    defaults = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
    }
    return zero_trial.initialize(model=Net(), config=defaults | config)[0]


def rows(seed: int, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torch_autocast(dtype: str) -> None:
    engine = engine_of(torch_autocast={"enabled": True, "dtype": dtype}, fp16={"initial_scale_power": 4})
    before = engine.module.up.weight.detach().clone()
    for step in range(2):
        engine.backward(engine(rows(step)))
        engine.step()
    assert engine.module.computed == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert engine.module.up.weight.dtype == torch.float32 and not torch.equal(engine.module.up.weight, before)
    assert engine.loss_scale == (16.0 if dtype == "fp16" else 1.0)  # fp16 gradients can underflow


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_buffer_dtype(asked: str | None, dtype: torch.dtype) -> None:
    engine = engine_of(bf16={"enabled": True}, data_types={"buffer_dtype": asked})
    assert engine.module.frequencies.dtype == dtype and engine.module.count.dtype == torch.int64
    engine.backward(engine(rows(0)))
    engine.step()
    assert engine.module.up.weight.dtype == torch.bfloat16


def sent(config: dict[str, Any]) -> tuple[float, float]:
    """The norm of the gradient, and the largest value of the first unit's buffer as it was handed
    to the reduction."""
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": 2}} | config)
    seen: list[float] = []
    scatter = engine.mesh.shard.reduce_scatter

    def watched(full: torch.Tensor, *more: Any) -> Any:
        seen.append(full.abs().max().item())
        return scatter(full, *more)

    engine.mesh.shard.reduce_scatter = watched  # type: ignore[method-assign]
    train_engine(engine, range(1))
    return engine.get_global_grad_norm() or 0.0, max(seen)


def test_predivision_scales_what_is_sent_and_not_the_mean(ranks: Pools) -> None:
    norm, plain = ranks(2).run(sent, {})[0]
    for config, factor in (({"prescale_gradients": True}, 2.0), ({"gradient_predivide_factor": 4.0}, 4.0)):
        same, scaled = ranks(2).run(sent, config)[0]
        assert same == pytest.approx(norm, rel=1e-6) and scaled == pytest.approx(plain / factor, rel=1e-6)


@pytest.mark.parametrize(("stage", "prescale"), [(0, True), (3, False)])
def test_gradient_allreduce_op_sum(ranks: Pools, stage: int, prescale: bool) -> None:
    zero = {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0}}
    asked = {"gradient_allreduce_op": "sum", "prescale_gradients": prescale}
    (mean, _), (total, _) = ranks(2).run(sent, zero)[0], ranks(2).run(sent, zero | asked)[0]
    assert total == pytest.approx(2 * mean, rel=1e-6)


def train_own_boundary(stage: str, managed: bool, announce: bool) -> tuple[float, int, int, int]:
    """Steps of 2 and 3 micro-batches; the difference to dense training, and the counters."""
    counts = (2, 3)

    def loss(model: Any, turn: Turn) -> torch.Tensor:
        """Counts for nothing after the last micro-batch of a step."""
        return tower_loss(model, turn) / counts[turn.step] * 3 * (turn.turn < counts[turn.step])

    case = Case(Tower, loss, steps=2, accumulation=3)
    dense = list(train_dense(case, 2))[-1]
    own = {"managed_gradient_accumulation": managed, "gradient_accumulation_steps": 1}
    engine = build_engine(replace(case, config=own), STAGES[stage])
    for step, count in enumerate(counts):
        for number in range(count):
            if announce:
                engine.set_gradient_accumulation_boundary(number == count - 1)
            engine.backward(tower_loss(engine, Turn(step, number, engine.global_rank)) / count, scale_wrt_gas=False)
            if managed:
                engine.step()
        assert managed or engine.pending_micro_batches() == count
        if not managed:
            engine.step()
        assert engine.was_step_applied() and engine.pending_micro_batches() == 0
    return difference(engine, dense), engine.global_steps, engine.micro_steps, engine.global_samples


@pytest.mark.parametrize(
    ("stage", "managed", "announce"),
    [
        ("zero0", False, False),
        ("zero1", True, True),
        ("zero2", False, True),
        ("zero3", True, True),
        ("zero3-free", False, False),
    ],
)
def test_the_caller_owns_the_boundary(ranks: Pools, stage: str, managed: bool, announce: bool) -> None:
    for worst, steps, micro, samples in ranks(2).run(train_own_boundary, stage, managed, announce):
        assert worst <= TOLERANCE
        assert (steps, micro, samples) == (2, 5, 4 if managed else 10)  # two train batches, or what came


@pytest.mark.parametrize("managed", [True, False])
def test_a_checkpoint_in_the_middle_of_an_accumulation_is_that_of_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, managed: bool
) -> None:
    """DeepSpeed's scripts count micro-batches when they save. Training goes on as without it."""

    def two_steps(save: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        engine = engine_of(managed_gradient_accumulation=managed, gradient_accumulation_steps=2)
        for turn in range(4):
            engine.backward(engine(rows(turn)))
            if managed or turn % 2:
                engine.step()
            if turn == 2 and save:
                engine.save_checkpoint(tmp_path)
            if turn == 1:
                saved = {name: value.clone() for name, value in engine.module_state_dict().items()}
        return engine, saved

    engine, saved = two_steps(save=True)
    assert "micro-batch" in caplog.text
    expected, _ = two_steps(save=False)
    assert differing(engine.module_state_dict(), expected.module_state_dict()) == []
    engine.backward(engine(rows(0)))
    engine.load_checkpoint(tmp_path)
    assert (engine.pending_micro_batches(), engine.global_steps) == (0, 1)
    assert differing(engine.module_state_dict(), saved) == []
    for turn in (2, 3):
        engine.backward(engine(rows(turn)))
        if managed or turn % 2:
            engine.step()
    assert engine.global_steps == 2 and differing(engine.module_state_dict(), expected.module_state_dict()) == []


def save_under(folder: str, validation: str | None) -> list[str]:
    """Each rank saves under another tag; the warnings of this rank, or its error."""
    lines = logged_lines(logging.WARNING)
    engine = make_engine(TinyLM, {"checkpoint": {"tag_validation": validation}} if validation else {})
    try:
        engine.save_checkpoint(folder, f"tag{engine.global_rank}")
    except CheckpointError as error:
        return [f"error: {error}"]
    return lines


WORDS = "save_checkpoint(tag): ranks passed different tags: got 'tag0', 'tag1', expected one tag."


@pytest.mark.parametrize("validation", [None, "Warn", "Ignore", "Fail"])
def test_tag_validation(ranks: Pools, tmp_path: Path, validation: str | None) -> None:
    first, second = ranks(2).run(save_under, str(tmp_path), validation)
    saved = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    if validation == "Fail":
        assert saved == [] and all(lines[0].startswith(f"error: {WORDS}") for lines in (first, second))
    else:
        assert saved == ["tag0"] and second == []
        assert (
            first == []
            if validation == "Ignore"
            else first[0].startswith(WORDS) and first[0].endswith("Saved as 'tag0'.")
        )


@pytest.mark.parametrize(("drop", "batches"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_dataloader_drop_last(drop: bool, batches: list[int]) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "dataloader_drop_last": drop}
    loader = zero_trial.initialize(model=Net(), config=config, training_data=list(torch.randn(10, 8)))[2]
    assert [len(batch) for batch in loader] == batches


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_always_live_cannot_be_none(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, "set_grads_to_none": True}}
    with pytest.raises(ConfigError, match="set_grads_to_none"):
        resolve_config(read_ds_config(config), 2)
