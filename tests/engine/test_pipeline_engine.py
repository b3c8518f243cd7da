"""Pipelines on ranks against plain torch in one process: every schedule, every ZeRO stage, and what
else a step can meet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import LENGTH, WIDTH
from tests.support.pipelines import (
    SAMPLES,
    batches,
    cross_entropy,
    difference,
    layers,
    make_engine,
    micro_batch,
    train_dense,
)
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.checkpoint.folder import checkpoint_folder
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.engine import RepeatingLoader
from zero_trial.pipeline import PipelineModule
from zero_trial.pipeline.simulator import validate

TOLERANCE = 2e-6
STEPS = 8
FREE = {"stage": 3, "stage3_param_persistence_threshold": 0}


def source(engine: Any, count: int, steps: int, start: int = 0) -> Iterator[Any] | None:
    """The data of this rank's line, on the rank that reads."""
    return batches(engine.mpu.get_data_parallel_rank(), count, steps, start) if engine.is_first_stage() else None


Whole = tuple[dict[str, torch.Tensor], list[float]]


@cache
def dense(count: int, lines: int) -> Whole:
    """Plain torch, once for all cases of a size."""
    return train_dense(layers(), STEPS, count, lines, clip=0.5)


def compare(stages: int, zero_section: dict[str, Any], count: int, whole: Whole, **config: Any) -> dict[str, Any]:
    """How far training here and plain torch end apart, the peak of activations, and what the
    schedule predicts. No parameter counts as unused, whatever the schedule."""
    zero_section = zero_section | {"ignore_unused_parameters": False}
    engine = make_engine(layers(), stages, zero_section, count, gradient_clipping=0.5, **config)
    data = source(engine, count, STEPS)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    report = validate(engine.schedule(count)).ranks[engine.stage_id]
    found = {
        "parameters": difference(engine, whole[0]),
        "losses": max(abs(ours - theirs) for ours, theirs in zip(losses, whole[1], strict=True)),
        "alike": losses,
        "peak": (engine.stage.peak, report.peak_activations),
        "norm": engine.get_global_grad_norm(),
    }
    engine.destroy()
    return found


# Every schedule, every policy, both numbers of stages, data-parallel ranks or none, few and many
# micro-batches; not every combination.
CASES = [
    (2, {"stage": 0}, 4, "1f1b", "auto"),
    (2, {"stage": 1}, 8, "1f1b", "auto"),
    (4, {"stage": 1}, 1, "1f1b", "auto"),
    (4, {"stage": 2}, 4, "1f1b", "micro"),
    (2, FREE, 4, "1f1b", "hold"),
    (4, FREE, 8, "1f1b", "free"),
    (2, {"stage": 2}, 4, "gpipe", "boundary"),
    (4, FREE, 4, "gpipe", "micro"),
    (2, {"stage": 2}, 8, "interleaved", "micro"),
    (4, FREE, 4, "interleaved", "hold"),
    (2, FREE, 4, "looped_bfs", "chunk"),
    (4, {"stage": 0}, 4, "looped_bfs", "auto"),
    (2, FREE, 4, "zb_h1", "free"),
    (4, {"stage": 1}, 8, "zb_h1", "auto"),
    (2, FREE, 8, "zb_v", "hold"),
    (4, {"stage": 2}, 1, "zb_v", "auto"),
]


@pytest.mark.parametrize(("stages", "section", "count", "schedule", "policy"), CASES)
def test_a_pipeline_is_the_whole_model(
    ranks: Pools, stages: int, section: dict[str, Any], count: int, schedule: str, policy: str
) -> None:
    pipeline = {"schedule": schedule, "zero_policy": policy}
    found = ranks(4).run(compare, stages, section, count, dense(count, 4 // stages), pipeline=pipeline)
    assert max(one["parameters"] for one in found) <= TOLERANCE
    assert max(one["losses"] for one in found) <= TOLERANCE
    assert all(one["alike"] == found[0]["alike"] and one["norm"] == found[0]["norm"] for one in found)
    assert all(got == stated for got, stated in (one["peak"] for one in found))


def traffic(section: dict[str, Any], count: int, pipeline: dict[str, Any]) -> dict[str, Any]:
    """One step's traffic beside the schedule's statement, on this rank of 2 stages x 2 shards."""
    engine = make_engine(layers(tied=False), 2, section, count, pipeline=pipeline)
    data = source(engine, count, 2)
    engine.train_batch(data)
    engine.mesh.counters.reset()
    engine.train_batch(data)
    counters, report = engine.mesh.counters, validate(engine.schedule(count)).ranks[engine.stage_id]
    chunks = len(engine.pipeline.chunks)
    padded = sum(group.layout.numel for group in engine.sharded.groups)
    activations, positions = SAMPLES * (LENGTH - 1) * WIDTH * 4, SAMPLES * (LENGTH - 1)
    labels = positions * 8 if engine.is_first_stage() else 0  # they travel beside the activations
    moved = sum(counters.get(kind, "shard").elements for kind in ("reduce_scatter", "all_gather"))
    found = {
        "messages": (counters.get("header", "pipe").calls, report.messages),
        "volume": (moved, engine.policy.volume(report, chunks) * padded / 2),
        "reductions": (
            counters.get("reduce_scatter", "shard").calls,
            report.reductions * len(engine.sharded.grad_buffers) // chunks,
        ),
        "bytes": (counters.get("send", "pipe").bytes, report.messages * activations + count * labels),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("section", "pipeline"),
    [
        ({"stage": 1}, {"schedule": "1f1b"}),
        ({"stage": 2}, {"schedule": "1f1b", "zero_policy": "micro"}),
        (FREE, {"schedule": "1f1b", "zero_policy": "hold"}),
        (FREE, {"schedule": "gpipe", "zero_policy": "free"}),
        (FREE, {"schedule": "zb_h1", "zero_policy": "free"}),
    ],
)
def test_traffic_is_what_the_schedule_states(ranks: Pools, section: dict[str, Any], pipeline: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks(4).run(traffic, section, 4, pipeline)):
        for name, (got, stated) in found.items():
            assert got == stated, (rank, name)


# --- tied weights ---------------------------------------------------------------------------------


def tied_bits(schedule: str, section: dict[str, Any], count: int) -> tuple[int, list[str]]:
    """The tied weight's bits on this rank after every step, with its moments at the end."""
    engine = make_engine(layers(), 2, section, count, gradient_clipping=0.5, pipeline={"schedule": schedule})
    data, found = source(engine, count, 3), []
    holds = "embed" in engine.pipeline.ties and hasattr(engine.module, "tied_modules")
    for _ in range(3):
        engine.train_batch(data)
        weight = engine.module_state_dict().get("tied_modules.embed.weight")
        found.append("" if weight is None else str(weight.double().sum().item()))
    if holds:
        param = engine.module.tied_modules["embed"].weight
        for kind in ("exp_avg", "exp_avg_sq"):
            found.append(str(zero.safe_get_full_optimizer_state(param, kind).double().sum().item()))
    engine.destroy()
    return engine.stage_id, found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
@pytest.mark.parametrize("section", [{"stage": 1}, FREE])
def test_tied_weights_stay_alike_bit_by_bit(ranks: Pools, schedule: str, section: dict[str, Any]) -> None:
    found = ranks(4).run(tied_bits, schedule, section, 4)
    holders = [bits for _, bits in found if bits[0]]
    assert len(holders) == (2 if schedule == "zb_v" else 4)
    assert all(bits == holders[0] for bits in holders)
    assert len(set(holders[0][:3])) == 3  # it trains


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(schedule: str, section: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(layers(dropout=0.3), 2, section, 4, pipeline={"schedule": schedule})
    engine.train_batch(source(engine, 4, 1))
    before = engine.module_state_dict()
    loss, outputs = engine.eval_batch(source(engine, 3, 1, 5), return_logits=True, num_micro_batches=3)
    each = engine.eval_batch(source(engine, 3, 1, 5), reduce_output=None, num_micro_batches=3)
    only = engine.eval_batch(source(engine, 3, 1, 5), compute_loss=False, num_micro_batches=3)
    after = engine.module_state_dict()
    found = {
        "loss": loss.item(),
        "each": [one.item() for one in each],
        "outputs": outputs,
        "same": outputs is None or all(torch.equal(a, b) for a, b in zip(outputs, only, strict=True)),
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "training": engine.module.training,
        "weights": after,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(("schedule", "section"), [("1f1b", {"stage": 1}), ("zb_v", FREE), ("interleaved", FREE)])
def test_evaluation_gives_losses_and_the_logits_of_all_micro_batches(
    ranks: Pools, schedule: str, section: dict[str, Any]
) -> None:
    found = ranks(4).run(evaluate, schedule, section)
    model = PipelineModule(layers(dropout=0.3), num_stages=1)
    model.load_state_dict(found[0]["weights"] | found[2]["weights"])
    model.eval()
    expected = []
    for line in (0, 1):
        pairs = [micro_batch(5, number, line) for number in range(3)]
        with torch.no_grad():
            answers = [model(inputs) for inputs, _ in pairs]
        losses = [cross_entropy(answer, labels).item() for answer, (_, labels) in zip(answers, pairs, strict=True)]
        expected += losses
        for rank in (line, line + 2):
            assert found[rank]["each"] == pytest.approx(losses, rel=1e-5)
        judge = found[line if schedule == "zb_v" else line + 2]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(judge["outputs"], answers, strict=True))
    assert sum(one["outputs"] is not None for one in found) == 2
    assert all(one["loss"] == found[0]["loss"] == pytest.approx(sum(expected) / 6, rel=1e-5) for one in found)
    assert all(one["same"] and one["untouched"] and one["training"] for one in found)


# --- saving ---------------------------------------------------------------------------------------


def resumed(folder: Path, schedule: str, section: dict[str, Any]) -> dict[str, Any]:
    """Trains 2 + 2 steps in one go and with a restart between; whether any bit differs, and what
    was written."""
    options: dict[str, Any] = {"gradient_clipping": 0.5, "pipeline": {"schedule": schedule}}
    unbroken = make_engine(layers(dropout=0.2), 2, section, 2, **options)
    data = source(unbroken, 2, 4)
    for _ in range(2):
        unbroken.train_batch(data)
    unbroken.save_checkpoint(folder)
    losses = [unbroken.train_batch(data).item() for _ in range(2)]
    again = make_engine(layers(dropout=0.2), 2, section, 2, **options)
    assert again.load_checkpoint(folder)[0] is not None
    data = source(again, 2, 2, start=2)
    resumed = [again.train_batch(data).item() for _ in range(2)]
    ours, theirs = unbroken.module_state_dict(), again.module_state_dict()
    unbroken.save_16bit_model(folder, "model.safetensors")
    found = {
        "losses": losses == resumed,
        "weights": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours),
        "norm": unbroken.get_global_grad_norm() == again.get_global_grad_norm(),
        "state": ours,
        "steps": again.global_steps,
    }
    unbroken.destroy()
    again.destroy()
    return found


@pytest.mark.parametrize(
    ("schedule", "section"), [("1f1b", {"stage": 1}), ("zb_v", FREE), ("interleaved", {"stage": 2})]
)
def test_a_resumed_pipeline_has_the_bits_of_the_unbroken_one(
    ranks: Pools, tmp_path: Path, schedule: str, section: dict[str, Any]
) -> None:
    found = ranks(4).run(resumed, tmp_path, schedule, section)
    assert all(one["losses"] and one["weights"] and one["norm"] and one["steps"] == 4 for one in found)
    shapes = CheckpointReader(checkpoint_folder(tmp_path, "global_step2")).shapes
    model = PipelineModule(layers(dropout=0.2), num_stages=1)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert {name: shapes[f"param/{name}"] for name in expected} == expected
    assert sum(name.startswith("param/") for name in shapes) == len(expected)
    whole = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(whole)  # the whole model in one file
    assert all(torch.equal(whole[name], value) for one in found for name, value in one["state"].items())


def on_other_stages(folder: Path, stages: int) -> float:
    engine = make_engine(layers(), stages, {"stage": 1}, 2)
    engine.load_checkpoint(folder)
    loss: float = engine.eval_batch(source(engine, 2, 1, 9)).item()
    engine.destroy()
    return loss


def saved_and_evaluated(folder: Path) -> float:
    engine = make_engine(layers(), 2, {"stage": 1}, 2)
    engine.train_batch(source(engine, 2, 1))
    engine.save_checkpoint(folder)
    loss: float = engine.eval_batch(source(engine, 2, 1, 9)).item()
    engine.destroy()
    return loss


def test_a_checkpoint_names_no_stage(ranks: Pools, tmp_path: Path) -> None:
    """So another number of pipeline stages reads it: here 1, with two data-parallel ranks instead
    of two stages."""
    written = ranks(2).run(saved_and_evaluated, tmp_path)[0]
    # With one line the same micro-batches are read; two lines read their own.
    assert ranks(2).run(on_other_stages, tmp_path, 2)[0] == written
    assert ranks(2).run(on_other_stages, tmp_path, 1)[0] != 0


# --- precision, recomputation ---------------------------------------------------------------------


def trained(stages: int, build: Any, steps: int = 4, count: int = 4, seed_layers: bool = True, **config: Any) -> Any:
    """Losses, and the weights of this stage."""
    engine = make_engine(build, stages, config.pop("zero", {"stage": 1}), count, gradient_clipping=0.5, **config)
    data = source(engine, count, steps)
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    state = {name: value.float() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("section", [{"stage": 1}, FREE])
def test_16_bit_pipelines_follow_the_unpipelined_engine(ranks: Pools, section: dict[str, Any]) -> None:
    """One stage and one rank is the same engine without messages; sums over micro-batches are fp32
    in both."""
    options: dict[str, Any] = {"bf16": {"enabled": True}, "zero": section}
    (whole, state), *_ = ranks(1).run(trained, 1, layers(), **options)
    for losses, part in ranks(2).run(trained, 2, layers(), pipeline={"schedule": "zb_h1"}, **options):
        assert losses == pytest.approx(whole, rel=2e-3)
        assert max((part[name] - state[name]).abs().max().item() for name in part) < 1e-2


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_recomputed_layers_change_nothing(ranks: Pools, schedule: str) -> None:
    options: dict[str, Any] = {"zero": FREE, "pipeline": {"schedule": schedule}}
    recomputed = {"pipeline": {"schedule": schedule, "activation_checkpoint_interval": 2}}
    kept = ranks(2).run(trained, 2, layers(dropout=0.2), **options)
    again = ranks(2).run(trained, 2, layers(dropout=0.2), **(options | recomputed))
    for (losses, state), (others, twin) in zip(kept, again, strict=True):
        assert losses == others
        assert all(torch.equal(state[name], twin[name]) for name in state)


def test_dropout_does_not_depend_on_the_cut(ranks: Pools) -> None:
    """Layers are seeded one by one, also before each forward."""
    (whole, _), *_ = ranks(1).run(trained, 1, layers(dropout=0.3))
    for schedule in ("1f1b", "interleaved"):
        for losses, _ in ranks(2).run(trained, 2, layers(dropout=0.3), pipeline={"schedule": schedule}):
            assert losses == pytest.approx(whole, rel=1e-5)


def overflowing() -> tuple[list[bool], list[float], int, str]:
    """fp16 whose scale is far too high: all stages skip together until it fits."""
    fp16 = {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 100, "hysteresis": 1}
    engine = make_engine(layers(), 2, {"stage": 1}, 2, fp16=fp16)
    data, applied, scales = source(engine, 2, 24), [], []
    for _ in range(24):
        engine.train_batch(data)
        applied.append(engine.was_step_applied())
        scales.append(engine.loss_scale)
    name = engine.last_nonfinite.parameter if engine.last_nonfinite is not None else ""
    engine.destroy()
    return applied, scales, engine.skipped_steps, name


def test_all_stages_skip_a_step_together(ranks: Pools) -> None:
    found = ranks(2).run(overflowing)
    assert found[0] == found[1]
    applied, _, skipped, name = found[0]
    assert skipped > 0
    assert applied[-1]
    assert not applied[0]
    assert name


def test_a_loader_in_place_of_an_iterator() -> None:
    """As DeepSpeed's documentation writes it, train_batch(dataloader): the losses of an endless
    iterator over it."""
    found = []
    for endless in (False, True):
        engine = make_engine(layers(2), 1, {"stage": 1}, 2)
        loader = list(batches(0, 2, 2))
        data = RepeatingLoader(loader) if endless else loader
        found.append([engine.train_batch(data).item() for _ in range(3)])
        assert engine.eval_batch(loader).item() == engine.eval_batch(iter(loader)).item()
        engine.destroy()
    assert found[0] == found[1]
