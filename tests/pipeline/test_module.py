"""A model as a list of layers, of which each pipeline rank builds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError, TrialError
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zero_trial.pipeline.module import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zero_trial.pipeline.schedule import ChunkPlacement


def head(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return value @ module.get_parameter("weight").T


def layers() -> list[Any]:
    tied = [TiedLayerSpec("embed", nn.Embedding, 11, 4), TiedLayerSpec("embed", nn.Embedding, 11, 4, forward_fn=head)]
    return [tied[0], LayerSpec(nn.Linear, 4, 6), torch.relu, nn.Linear(6, 4), tied[1]]


def test_with_one_stage_it_is_an_ordinary_module():
    module = PipelineModule(layers(), num_stages=1)
    assert module(torch.tensor([[1, 2]])).shape == (1, 2, 11)
    assert [name for name, _ in module.named_parameters()] == [
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
        "tied_modules.embed.weight",
    ]


@pytest.mark.parametrize(
    "placement",
    [
        ChunkPlacement.loop(2),
        ChunkPlacement.loop(4),
        ChunkPlacement.loop(2, 2),
        ChunkPlacement.v(2),
        ChunkPlacement.loop(5),
    ],
)
def test_weights_do_not_depend_on_the_cut(placement: ChunkPlacement):
    """With seeds per layer; the ranks together have every parameter once, tied ones on each rank
    that needs them."""
    whole = dict(PipelineModule(layers()[:3], num_stages=1, seed_layers=True).named_parameters())
    parts: list[Any] = [*layers()[:3], LayerSpec(nn.Linear, 6, 4), layers()[4]]
    found: dict[str, list[torch.Tensor]] = {}
    for stage in range(placement.stages):
        module = PipelineModule(parts, seed_layers=True)
        module.build(placement, stage)
        for name, param in module.named_parameters():
            found.setdefault(name, []).append(param)
    assert set(found) == {"1.weight", "1.bias", "3.weight", "3.bias", "tied_modules.embed.weight"}
    assert all(len(params) == 1 for name, params in found.items() if not name.startswith("tied"))
    for name in ("1.weight", "1.bias"):
        assert torch.equal(found[name][0], whole[name])


class NeverBuilt(nn.Module):
    def __init__(self) -> None:
        raise AssertionError("built")


def test_a_rank_builds_only_its_own_layers():
    specs = [LayerSpec(NeverBuilt), LayerSpec(nn.Linear, 2, 2)]
    module = PipelineModule(specs, partition_method="uniform", num_stages=2)
    assert not module.built  # there are no two ranks here
    with pytest.raises(ConfigError, match=r"PipelineModule\.parameters: the layers are not built yet"):
        list(module.parameters())
    with pytest.raises(ConfigError, match=r"PipelineModule\.forward: the layers are not built yet"):
        module(torch.ones(2))
    # counting builds on the meta device, which this one does not survive
    module._layers = [nn.Identity(), specs[1]]
    module.build(ChunkPlacement.loop(2), 1)
    assert [name for name, _ in module.named_parameters()] == ["1.weight", "1.bias"]


def test_building_again_changes_the_part():
    module = PipelineModule(layers(), num_stages=1)
    before = dict(module.named_parameters())
    module.build(ChunkPlacement.loop(1), 0)
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(param is before[name] for name, param in module.named_parameters())
    module.build(ChunkPlacement.loop(2), 1, partition_method="type:linear")
    assert module.parts == [0, 3, 5]  # one Linear in each
    assert "1.weight" not in dict(module.named_parameters()) and module.num_stages == module.num_pipeline_stages() == 2
    assert module.partition_method == "type:linear"


def test_parts_that_do_not_follow_each_other_cannot_be_called():
    module = PipelineModule(layers())
    module.build(ChunkPlacement.v(2), 0)
    with pytest.raises(TrialError, match=r"this rank's layers are not consecutive: got chunks \[0, 3\] of 4"):
        module(torch.tensor([1]))


def test_ordinary_models_become_pipelines():
    sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    module = PipelineModule.from_sequential(sequence, 1)
    value = torch.ones(3, 4)
    assert torch.equal(module(value), sequence(value))
    blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    module = PipelineModule.from_blocks(nn.Linear(2, 4), list(blocks), [nn.LayerNorm(4), nn.Linear(4, 2)], num_stages=1)
    assert module(torch.ones(1, 2)).shape == (1, 2) and len(list(module.children())) == 6


def test_shared_parameters_on_two_parts_are_refused():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    module = PipelineModule([first, nn.ReLU(), second], partition_method="uniform")
    with pytest.raises(ConfigError, match=r"share a parameter: got layers 0 and 2\. Define both with TiedLayerSpec"):
        module.build(ChunkPlacement.loop(2), 0)
    module.build(ChunkPlacement.loop(1), 0)


def test_stages_must_be_clear():
    topology = PipeDataParallelTopology(2, 1)
    assert PipelineModule(layers(), topology=topology).num_stages == 2
    assert PipelineModule(layers(), topology=topology).topology() is topology
    with pytest.raises(ConfigError, match="got num_stages 3, topology 2, expected one number"):
        PipelineModule(layers(), 3, topology)
    with pytest.raises(ConfigError, match="got num_stages 0"):
        PipelineModule(layers(), 0)
    assert PipelineModule(layers()).num_stages is None


def recorded(calls: list[int]) -> Any:
    def checkpoint(function: Any, *args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return checkpoint


@pytest.mark.parametrize(
    ("interval", "classes", "expected"), [(0, None, 0), (1, None, 4), (2, None, 3), (5, None, 1), (1, ["Linear"], 2)]
)
def test_layers_are_recomputed_in_groups(interval: int, classes: Sequence[str] | None, expected: int):
    """Only groups with something to train, or of the named classes; and only where there will be a
    backward."""
    calls: list[int] = []
    module = PipelineModule(
        layers(),
        num_stages=1,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=recorded(calls),
        checkpointable_layers=classes,
    )
    module(torch.tensor([1]))
    assert len(calls) == expected
    with torch.no_grad():
        module(torch.tensor([1]))
    assert len(calls) == expected


def test_one_cut_by_measured_time():
    module = PipelineModule(layers(), partition_method="profile", profile_input=lambda: torch.tensor([[1, 2]]))
    module.build(ChunkPlacement.loop(2), 0)
    assert module.parts[0] == 0 and module.parts[-1] == 5


class WithExtras(PipelineModule):
    """A pipeline with children of its own, made after the layers, and a loss that is a module with
    a buffer."""

    def __init__(self, extra: nn.Module, **options: Any) -> None:
        super().__init__(layers(), loss_fn=nn.CrossEntropyLoss(weight=torch.ones(11)), **options)
        self.extra = extra


def test_children_outside_the_layers_stay_when_layers_are_built_anew():
    module = WithExtras(nn.Linear(2, 2), num_stages=1)
    module.build_whole()
    module.build_whole()
    assert isinstance(module.loss_fn, nn.CrossEntropyLoss) and isinstance(module.extra, nn.Linear)
    assert {name for name, _ in module.named_children()} == {"loss_fn", "extra", "1", "3", "tied_modules"}


def test_parameters_outside_the_layers_are_refused_on_several_stages():
    module = WithExtras(nn.Linear(2, 2))
    with pytest.raises(ConfigError) as caught:
        module.build(ChunkPlacement.loop(2), 1)
    assert caught.value.where == "PipelineModule.extra"
    buffered = WithExtras(nn.BatchNorm1d(2, affine=False))
    buffered.build(ChunkPlacement.loop(2), 1)
    assert set(buffered.children_outside_layers()) == {"loss_fn", "extra"}


def test_a_topology():
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert topology.world_size() == 6 and topology.get_axis_names() == ["row", "col"]
    assert [topology.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == list(range(6))
    assert topology.get_coord(4) == (1, 1) and topology.get_coord(4).col == 1
    assert topology.get_coord(4) == topology.ProcessCoord(row=1, col=1)
    assert (topology.get_dim("col"), topology.get_dim("plane")) == (3, 0)
    assert topology.get_axis_list(axis="row", idx=1) == [3, 4, 5]
    assert topology.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("col") == [[0, 1, 2], [3, 4, 5]] and topology.get_axis_comm_lists("plane") == []
    assert topology.mapping[topology.get_coord(5)] == 5 and "ProcessCoord(row=0, col=0): 0" in str(topology)


def test_pipe_and_data():
    topology = PipeDataParallelTopology(num_pp=2, num_dp=4)
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]] and topology.get_rank_repr(3) == ""


def test_pipe_model_and_data():
    """DeepSpeed's order: model innermost, whatever the order of the arguments."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.axes == ["pipe", "data", "model"] and topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.filter_match(pipe=0, model=1) == [1, 3]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="=", outer_sep=" ") == "pipe=01 model=01"


def test_what_is_not_there():
    topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 2])
    with pytest.raises(ConfigError, match="get_rank needs every axis"):
        topology.get_rank(pipe=0)
    with pytest.raises(ConfigError, match="no rank has this coordinate"):
        topology.get_rank(pipe=0, data=2)
    with pytest.raises(ConfigError, match="no such rank in the topology: got 4, expected 0 to 3"):
        topology.get_coord(4)


@pytest.mark.parametrize(("axes", "dims"), [(["a", "b"], [2]), (["a", "a"], [2, 2]), (["a"], [0])])
def test_what_is_no_topology(axes: list[str], dims: list[int]):
    with pytest.raises(ConfigError, match="distinct axes"):
        ProcessTopology(axes, dims)
