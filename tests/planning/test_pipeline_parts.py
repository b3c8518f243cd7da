"""The parts of a pipeline, built where they cost nothing, and what a row of a schedule holds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.planning.pipelines import LENGTH, ROWS, VOCABULARY, WIDTH, batch, pipeline, settings
from zero_trial.engine.pipeline_build import pipeline_settings, training_schedule
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import ParameterLifetime
from zero_trial.planning.pipeline_parts import Copies, HeldBytes, Parts, chunk_bytes, copies_of, parts_of, play_row
from zero_trial.sharding.plan import plan_for_stage

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
    model = parts_of(pipeline(), one).whole.given["model"]
    assert all(chunk.recomputes == bool(interval) for chunk in model.values())


NOTHING = Copies()


@cache
def parts(schedule: str) -> Parts:
    return parts_of(pipeline(), pipeline_settings(settings(schedule=schedule)))


def held(
    schedule: str = "1f1b", rank: int = 0, micro_batches: int = 4, copies: Copies = NOTHING, **more: Any
) -> HeldBytes:
    one, of_all = pipeline_settings(settings(schedule=schedule)), more.pop("parts", None) or parts(schedule)
    policy = choose(Sharding(*plan_for_stage(3).cuts), more.pop("parameters", None))
    row = training_schedule(one, policy, micro_batches).rows[rank]
    chunks = {int(name): chunk for name, chunk in of_all.whole.given["model"].named_children()}
    mine = {chunk: chunks[chunk] for chunk in of_all.placement.of(rank)}
    return play_row(row, chunk_bytes(of_all, batch(), torch.float32, micro_batches), copies_of(mine, copies))


def test_activations_are_those_of_the_micro_batches_in_flight():
    """1F1B holds two on the first of two ranks and one on the last; GPipe holds them all."""
    first, last = held(rank=0).activations, held(rank=1).activations
    assert held("1f1b", micro_batches=8).activations == first
    assert held("gpipe", micro_batches=2).activations == first
    assert held("gpipe", micro_batches=4).activations == 2 * first
    assert held("gpipe", rank=1, micro_batches=4).activations == pytest.approx(4 * last, rel=0.05)


def test_two_halves_of_a_backward_hold_on_until_the_second():
    assert held("zb_h1").activations >= held("1f1b").activations
    assert held("zb_h1", rank=1).peak > held("1f1b", rank=1).peak


def test_what_is_whole_is_counted_while_it_is():
    plain = held("looped_bfs").peak
    size = sum(param.numel() for param in parts("looped_bfs").stages[0].given["model"].parameters())
    whole = Copies(parameter=4)
    assert held("looped_bfs", copies=whole, parameters=ParameterLifetime.HOLD).peak == plain + 4 * size
    assert plain < held("looped_bfs", copies=whole, parameters=ParameterLifetime.CHUNK).peak < plain + 4 * size
    later = held("1f1b", micro_batches=8, copies=Copies(gradient=4)).peak
    assert later > held("1f1b", micro_batches=8).peak, "not at the first backward, but at the others"
    assert held("looped_bfs", copies=Copies(4, 0, 10**9)).peak == plain, "too small to be freed"


def test_recomputed_layers_hold_their_inputs_only():
    one = pipeline_settings(settings(pipeline={"activation_checkpoint_interval": 1}))
    found = held(parts=parts_of(pipeline(), one))
    assert found.activations < held().activations / 3
    assert found.activations >= 2 * ROWS * LENGTH * WIDTH * 4
