"""The parts of a pipeline, built where they cost nothing."""

from __future__ import annotations

import pytest
from torch import nn

from tests.planning.pipelines import VOCABULARY, WIDTH, pipeline, settings
from zero_trial.engine.pipeline_build import pipeline_settings
from zero_trial.pipeline.module import PipelineModule
from zero_trial.planning.pipeline_dry_run import parts_of

TIED = VOCABULARY * WIDTH


def test_every_stage_has_its_layers_and_nothing_has_values():
    model = pipeline()
    parts = parts_of(model, pipeline_settings(settings(schedule="looped_bfs")))
    assert parts.placement.ranks == (0, 1, 0, 1)
    # a block is five embeddings large, so the chunks hold one block each
    assert parts.bounds == (0, 2, 3, 4, 6)
    assert [parts.layers(rank) for rank in (0, 1)] == ["0-1,3", "2,4-5"]
    assert parts.ties == ((0, 3),)
    assert sum(parts.elements) == parts.parameters + TIED == model.total_parameters + TIED
    assert len(parts.stages) == 2 and not model.built


def test_the_cut_is_ds_configs_where_it_says_one():
    one = pipeline_settings(settings(pipeline={"partition_method": "type:Embedding"}))
    assert parts_of(pipeline(), one).bounds != parts_of(pipeline(), pipeline_settings(settings())).bounds


def test_layers_that_are_built_stay_as_they_are():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = parts_of(PipelineModule.from_sequential(net, partition_method="uniform"), pipeline_settings(settings()))
    assert parts.elements == (6, 6) and [parts.layers(rank) for rank in (0, 1)] == ["0", "1"]
    assert not next(net.parameters()).is_meta


@pytest.mark.parametrize("interval", [0, 1])
def test_checkpointed_layers(interval: int):
    one = pipeline_settings(settings(pipeline={"activation_checkpoint_interval": interval}))
    model = parts_of(pipeline(), one).whole.options(fake=True)["model"]
    assert all(chunk.recomputes == bool(interval) for chunk in model.values())
