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
from torch import nn
from torch.nn import functional as F

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
from zero_trial.checkpoint.folder import checkpoint_folder
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zero_trial.pipeline.simulator import validate

TOLERANCE = 2e-6
STEPS = 4
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
        "mesh": list(engine.mesh.shape.sizes),
    }
    engine.destroy()
    return found


# Every schedule, every policy, both numbers of stages, data-parallel ranks or none, few and many
# micro-batches; not every combination.
CASES = [
    (2, {"stage": 0}, 4, "1f1b", "auto"),
    (4, {"stage": 1}, 1, "1f1b", "auto"),
    (4, {"stage": 2}, 4, "1f1b", "micro"),
    (4, FREE, 8, "1f1b", "free"),
    (2, FREE, 4, "gpipe", "micro"),
    (2, {"stage": 2}, 8, "interleaved", "micro"),
    (4, FREE, 4, "interleaved", "hold"),
    (2, FREE, 4, "looped_bfs", "chunk"),
    (4, {"stage": 1}, 8, "zb_h1", "auto"),
    (2, FREE, 8, "zb_v", "hold"),
    (1, {"stage": 0}, 2, "1f1b", "auto"),
    (1, {"stage": 1}, 2, "interleaved", "auto"),
]
# Replicas read their own data, model-parallel ranks the same.
MESHES = [({"replica": 2, "shard": 1}, [2, 2, 1, 1]), ({"model": 2}, [2, 1, 1, 2])]


@pytest.mark.parametrize(("stages", "section", "count", "schedule", "policy"), CASES)
def test_a_pipeline_is_the_whole_model(
    ranks: Pools, stages: int, section: dict[str, Any], count: int, schedule: str, policy: str
) -> None:
    pipeline = {"schedule": schedule, "zero_policy": policy}
    found = ranks(4).run(compare, stages, section, count, dense(count, 4 // stages), pipeline=pipeline)
    assert max(one["parameters"] for one in found) <= TOLERANCE and max(one["losses"] for one in found) <= TOLERANCE
    assert all(one["alike"] == found[0]["alike"] and one["norm"] == found[0]["norm"] for one in found)
    assert all(got == stated for got, stated in (one["peak"] for one in found))


@pytest.mark.parametrize(("mesh", "sizes"), MESHES)
def test_pipelines_beside_each_other(ranks: Pools, mesh: dict[str, int], sizes: list[int]) -> None:
    for found in ranks(4).run(compare, 2, {"stage": 1}, 2, dense(2, sizes[1]), mesh=mesh):
        assert found["mesh"] == sizes and max(found["parameters"], found["losses"]) <= TOLERANCE


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
        ({"stage": 2}, {"schedule": "1f1b", "zero_policy": "micro"}),
        (FREE, {"schedule": "1f1b", "zero_policy": "hold"}),
        (FREE, {"schedule": "zb_h1", "zero_policy": "free"}),
    ],
)
def test_traffic_is_what_the_schedule_states(ranks: Pools, section: dict[str, Any], pipeline: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks(4).run(traffic, section, 4, pipeline)):
        for name, (got, stated) in found.items():
            assert got == stated, (rank, name)


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


@pytest.mark.parametrize(("schedule", "section"), [("1f1b", {"stage": 1}), ("zb_v", FREE)])
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


@pytest.mark.parametrize(("schedule", "section"), [("1f1b", FREE), ("zb_v", {"stage": 2})])
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


def trained(pipeline: dict[str, Any]) -> Any:
    """Losses, and the weights of this stage."""
    engine = make_engine(layers(dropout=0.2), 2, FREE, 4, gradient_clipping=0.5, pipeline=pipeline)
    data = source(engine, 4, STEPS)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    state = {name: value.float() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_recomputed_layers_change_nothing(ranks: Pools, schedule: str) -> None:
    kept = ranks(2).run(trained, {"schedule": schedule})
    again = ranks(2).run(trained, {"schedule": schedule, "activation_checkpoint_interval": 2})
    for (losses, state), (others, twin) in zip(kept, again, strict=True):
        assert losses == others and all(torch.equal(state[name], twin[name]) for name in state)


def overflowing() -> tuple[list[bool], list[float], int, str]:
    """fp16 whose scale is far too high: all stages skip together until it fits."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 100, "hysteresis": 1}
    engine = make_engine(layers(), 2, {"stage": 1}, 2, fp16=fp16)
    data, applied, scales = source(engine, 2, 14), [], []
    for _ in range(14):
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
    assert skipped > 0 and applied[-1] and not applied[0] and name


class Frozen(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requires_grad_(False)


def frozen_layers() -> list[Any]:
    """A frozen first stage, a frozen layer in between, running statistics, a tied module with a
    weight that one end does not use."""
    return [
        LayerSpec(Frozen, 6, 6),
        LayerSpec(Frozen, 6, 6),
        LayerSpec(nn.BatchNorm1d, 6, affine=False),
        TiedLayerSpec("ends", nn.Linear, 6, 6),
        LayerSpec(nn.Linear, 6, 6),
        LayerSpec(Frozen, 6, 6),
        LayerSpec(nn.BatchNorm1d, 6),
        TiedLayerSpec("ends", nn.Linear, 6, 6, forward_fn=lambda module, x: x @ module.weight),
    ]


def pair(number: int, line: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * number + line)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)


def make(stages: int, section: dict[str, Any], **config: Any) -> Any:
    module = PipelineModule(
        frozen_layers(), num_stages=stages, loss_fn=F.mse_loss, seed_layers=True, partition_method="uniform"
    )
    return make_engine(module, stages, section, 2, train_micro_batch_size_per_gpu=4, gradient_clipping=1.0, **config)


def train(stages: int, section: dict[str, Any], folder: Path | None = None, **config: Any) -> Any:
    """Losses of three steps, the last after a restart where there is a folder; and all of this
    stage's values."""
    engine = make(stages, section, **config)
    line, losses = engine.mpu.get_data_parallel_rank(), []
    for step in range(3):
        if step == 2 and folder is not None:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = make(stages, section, **config)
            engine.load_checkpoint(folder)
        losses.append(engine.train_batch(iter([pair(2 * step, line), pair(2 * step + 1, line)])).item())
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize(("section", "schedule"), [({"stage": 0}, "1f1b"), (FREE, "zb_h1"), ({"stage": 2}, "zb_v")])
def test_frozen_layers_and_running_statistics(
    ranks: Pools, tmp_path: Path, section: dict[str, Any], schedule: str
) -> None:
    (whole, state), *_ = ranks(1).run(train, 1, section)
    for losses, part in ranks(2).run(train, 2, section, tmp_path, pipeline={"schedule": schedule}):
        assert losses == pytest.approx(whole, rel=1e-6)
        assert all(torch.allclose(part[name], state[name], atol=1e-6) for name in part)
