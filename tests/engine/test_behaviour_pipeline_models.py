"""Models that are more than a chain of trained layers: frozen parts, running statistics, hybrid
sharding, and what watches a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.pipelines import batches, layers, make_engine, train_dense
from tests.support.pool import Pools, logged_lines
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

FREE = {"stage": 3, "stage3_param_persistence_threshold": 0}


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


@pytest.mark.parametrize(
    ("section", "schedule"), [({"stage": 0}, "1f1b"), (FREE, "1f1b"), (FREE, "zb_h1"), ({"stage": 2}, "zb_v")]
)
def test_frozen_layers_and_running_statistics(
    ranks: Pools, tmp_path: Path, section: dict[str, Any], schedule: str
) -> None:
    (whole, state), *_ = ranks(1).run(train, 1, section)
    for losses, part in ranks(2).run(train, 2, section, tmp_path, pipeline={"schedule": schedule}):
        assert losses == pytest.approx(whole, rel=1e-6)
        assert all(torch.allclose(part[name], state[name], atol=1e-6) for name in part)


def hybrid(steps: int, mesh: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    engine = make_engine(layers(), 2, {"stage": 1}, 2, gradient_clipping=0.5, mesh=mesh)
    line = engine.mpu.get_data_parallel_rank()
    data = batches(line, 2, steps) if engine.is_first_stage() else None
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    sizes = list(engine.mesh.shape.sizes)
    engine.destroy()
    return losses, state, sizes


@pytest.mark.parametrize(("mesh", "sizes"), [({"replica": 2, "shard": 1}, [2, 2, 1, 1]), ({"model": 2}, [2, 1, 1, 2])])
def test_pipelines_beside_each_other(ranks: Pools, mesh: dict[str, int], sizes: list[int]) -> None:
    """Replicas read their own data, model-parallel ranks the same."""
    reference, dense = train_dense(layers(), 4, 2, sizes[1], clip=0.5)
    for losses, state, found in ranks(4).run(hybrid, 4, mesh):
        assert found == sizes
        assert losses == pytest.approx(dense, abs=2e-6)
        assert max((state[name] - reference[name]).abs().max().item() for name in state) <= 2e-6


def watched(folder: Path) -> tuple[list[str], list[str]]:
    lines = logged_lines()
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "pipe"}
    details = {"wall_clock_breakdown": True, "memory_breakdown": True, "comms_logger": {"enabled": True}}
    profiler = {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}}
    engine = make_engine(layers(2), 2, {"stage": 1}, 4, steps_per_print=2, csv_monitor=monitor, **details, **profiler)
    for step in range(4):
        engine.train_batch(batches(0, 4, 1, step) if engine.is_first_stage() else None)
        engine.eval_batch(batches(0, 4, 1, 9) if engine.is_first_stage() else None)
    engine.destroy()
    return lines, sorted(path.name for path in folder.rglob("*.csv"))


def test_a_pipeline_is_watched_like_any_engine(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(watched, tmp_path)
    text = "\n".join(first[0])
    assert "pipeline: 1f1b, 2 stages" in text
    for word in ("forward", "backward", "step=4", "send/pipe"):
        assert word in text, text
    assert any("train_loss" in name for name in first[1])
    assert any("eval_loss" in name for name in first[1])
    assert "step=4" not in "\n".join(second[0])


class Classifier(PipelineModule):
    """A loss that is a module with a buffer (the weights of classes), and a child that is not a
    layer."""

    def __init__(self, stages: int) -> None:
        weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
        linears = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
        super().__init__(linears, num_stages=stages, loss_fn=nn.CrossEntropyLoss(weight), seed_layers=True)
        self.extra = nn.BatchNorm1d(2, affine=False)


def classify(stages: int, zero_stage: int, folder: Path) -> list[float]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    losses = []
    engine = make_engine(Classifier(stages), stages, {"stage": zero_stage}, 2, **config)
    for step in range(3):
        if step == 2:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = make_engine(Classifier(stages), stages, {"stage": zero_stage}, 2, **config)
            engine.load_checkpoint(folder)
        pairs = [pair(2 * step + number, 0) for number in range(2)]
        losses.append(engine.train_batch(iter([(x, y.argmax(1)) for x, y in pairs])).item())
    assert isinstance(engine.module.loss_fn, nn.CrossEntropyLoss) and engine.module.extra.running_mean.shape == (2,)
    engine.destroy()
    return losses


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_loss_that_is_a_module_and_children_outside_the_layers(ranks: Pools, tmp_path: Path, zero_stage: int):
    """Bits: two stages do the sums of one stage."""
    whole = ranks(1).run(classify, 1, zero_stage, tmp_path / "one")[0]
    assert ranks(2).run(classify, 2, zero_stage, tmp_path / "two") == [whole, whole]
