"""DeepSpeed's process topologies."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.pipeline.module import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


def test_a_topology():
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert topology.world_size() == 6 and topology.get_axis_names() == ["row", "col"]
    assert [topology.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == list(range(6))
    assert topology.get_coord(4) == (1, 1) and topology.get_coord(4).col == 1
    assert topology.get_coord(4) == topology.ProcessCoord(row=1, col=1)
    assert (topology.get_dim("col"), topology.get_dim("plane")) == (3, 0)
    assert topology.get_axis_list(axis="row", idx=1) == [3, 4, 5]
    assert topology.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("col") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("plane") == []
    assert topology.mapping[topology.get_coord(5)] == 5 and "ProcessCoord(row=0, col=0): 0" in str(topology)


def test_pipe_and_data():
    topology = PipeDataParallelTopology(num_pp=2, num_dp=4)
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_rank_repr(3) == ""


def test_pipe_model_and_data():
    """DeepSpeed's order: model innermost, whatever the order of the arguments."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.axes == ["pipe", "data", "model"]
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.filter_match(pipe=0, model=1) == [1, 3]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="=", outer_sep=" ") == "pipe=01 model=01"


def test_what_is_not_there():
    topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 2])
    with pytest.raises(ConfigError, match="get_rank needs every axis"):
        topology.get_rank(pipe=0)
    with pytest.raises(ConfigError, match="no rank is at this coordinate"):
        topology.get_rank(pipe=0, data=2)
    with pytest.raises(ConfigError, match="no such rank in the topology: got 4, expected 0 to 3"):
        topology.get_coord(4)


@pytest.mark.parametrize(("axes", "dims"), [(["a", "b"], [2]), (["a", "a"], [2, 2]), (["a"], [0])])
def test_what_is_no_topology(axes: list[str], dims: list[int]):
    with pytest.raises(ConfigError, match="distinct axes"):
        ProcessTopology(axes, dims)
