"""What a schedule's actions do to domains, told to a model that only writes them down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zero_trial.comm import MeshShape, build_mesh
from zero_trial.engine.pipeline_build import ChunkShards, manual_groups
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zero_trial.pipeline.schedule import ChunkPlacement


def module_of(placement: ChunkPlacement, stage: int) -> PipelineModule:
    ends = [TiedLayerSpec("e", nn.Linear, 4, 4), TiedLayerSpec("e", nn.Linear, 4, 4)]
    module = PipelineModule(
        [ends[0], *[LayerSpec(nn.Linear, 4, 4) for _ in range(6)], ends[1]], partition_method="uniform"
    )
    module.build(placement, stage)
    return module


class Told:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.unsharder: Any = SimpleNamespace(
            unshard_async=lambda domain: self.words.append(f"start {domain}"),
            unshard=lambda domain, record: self.words.append(f"ensure {domain}"),
            reshard=lambda domain: self.words.append(f"release {domain}"),
        )

    def __getattr__(self, name: str) -> Any:
        return lambda domain: self.words.append(f"{name} {domain}")


def shards_of(placement: ChunkPlacement, stage: int, *, micro: bool = False) -> tuple[ChunkShards, list[str]]:
    told: Any = Told()
    return ChunkShards(told, module_of(placement, stage), every_micro_batch=micro), told.words


def test_a_tied_module_goes_with_its_chunks():
    """On one rank with both its chunks: gathered with the first, freed and reduced with the last."""
    shards, words = shards_of(ChunkPlacement.v(2), 0)
    shards.unshard(0)
    shards.unshard(3)
    shards.reshard(3)
    shards.reduce(3)
    shards.reshard(0)
    shards.reduce(0)
    assert words == [
        "start chunk0",
        "start tied.e",
        "start chunk3",
        "start tied.e",
        "release chunk3",
        "reduce chunk3",
        "release chunk0",
        "release tied.e",
        "reduce chunk0",
        "reduce tied.e",
    ]


def test_per_micro_batch_it_is_reduced_with_each():
    shards, words = shards_of(ChunkPlacement.v(2), 0, micro=True)
    shards.reduce(3)
    shards.reduce(0)
    assert words == ["reduce chunk3", "reduce tied.e", "reduce chunk0", "reduce tied.e"]


def test_a_new_step_starts_anew():
    shards, words = shards_of(ChunkPlacement.v(2), 0)
    shards.reduce(3)
    shards.start_step()
    shards.reduce(0)
    assert words == ["reduce chunk3", "reduce chunk0"]


def test_a_chunk_without_tied_layers_is_alone():
    shards, words = shards_of(ChunkPlacement.v(2), 1)
    shards.need(1)
    shards.backward_done(2)
    assert words == ["ensure chunk1", "end_pass chunk2"]
    first, words = shards_of(ChunkPlacement.loop(2), 0)
    first.tied_reduce(0)
    assert words == ["sum_copies tied.e"]


def test_every_parameter_is_in_one_domain():
    module = module_of(ChunkPlacement.loop(1), 0)
    mesh = build_mesh(MeshShape())
    domains = manual_groups(module, mesh)
    assert [domain.name for domain in domains] == ["tied.e", "chunk0"]
    listed = [param for domain in domains for param in domain.params]
    assert sorted(listed) == sorted(id(param) for param in module.parameters())
    assert all(domain.owned and domain.holders == 1 for domain in domains)
    assert domains[0].module == "tied_modules.e"
    assert isinstance(module.tied_modules["e"].weight, torch.Tensor)
