"""Small pipelines for the tests of this folder."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import zero_trial
from tests.support.models import Block
from tests.support.pipelines import cross_entropy, logits
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.pipeline.layers import LayerSpec, TiedLayerSpec
from zero_trial.pipeline.module import PipelineModule
from zero_trial.planning.live_bytes import LiveBytes

WIDTH, VOCABULARY, LENGTH, ROWS = 32, 50, 16, 4


def pipeline(blocks: int = 4, **options: Any) -> PipelineModule:
    """A language model whose embedding and head are one matrix."""
    embedding = (nn.Embedding, VOCABULARY, WIDTH)
    body = [LayerSpec(Block, WIDTH) for _ in range(blocks)]
    ends = TiedLayerSpec("embedding", *embedding), TiedLayerSpec("embedding", *embedding, forward_fn=logits)
    return PipelineModule([ends[0], *body, ends[1]], loss_fn=cross_entropy, **options)


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randint(0, VOCABULARY, (2, rows, LENGTH), generator=generator)
    return inputs, labels


def ds_config(
    stage: int = 0, schedule: str = "1f1b", accumulation: int = 4, pipe: int = 2, **more: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 100},
        "mesh": {"pipe": pipe},
        "comm_timeout_seconds": 30.0,
        "pipeline": {"schedule": schedule, **more.pop("pipeline", {})},
        **more,
    }


def settings(*args: Any, **kwargs: Any) -> DsConfig:
    return read_ds_config(ds_config(*args, **kwargs))


def watched_step(config: dict[str, Any], steps: int = 2) -> dict[str, int]:
    """Bytes of one rank of a pipeline: what really lived in the last step."""
    live = LiveBytes()
    given = batch()
    with live:
        torch.manual_seed(1)
        engine = zero_trial.initialize(model=pipeline(), config=config)[0]
        live.hold([*engine.module.parameters(), *engine.module.buffers(), *given])
        live.follow(engine.sharded.buffers)
        for _ in range(steps):
            live.restart()
            with live.saving():
                engine.train_batch(itertools.repeat(given))
    found = {"peak": live.peak, "activations": live.saved_peak, "states": sum(engine.persistent_bytes().values())}
    engine.destroy()
    return found
