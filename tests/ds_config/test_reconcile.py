"""ds_config, hyperparameters, slots and mesh in agreement, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_trial.ds_config.batch import AxisSizes, ranks_of, reconcile, solve_axes
from zero_trial.ds_config.keys_zero import MeshSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.errors import ConfigError, InvalidHP


def config(stage: int = 2, mesh: MeshSection | None = None, **keys: Any) -> DsConfig:
    """A DsConfig with a mesh of any shape, pipelines included."""
    read = read_ds_config({"zero_optimization": {"stage": stage}, **keys})
    return replace(read, mesh=mesh) if mesh else read


def test_a_run_in_one_table():
    given = read_ds_config(
        '{"train_micro_batch_size_per_gpu": 4,\n"zero_optimization": {"stage": 2, "mics_shard_size": 2}}',
        hyperparameters={"global_batch_size": 64},
    )
    found = reconcile(given, 8, {"data_parallel_world_size": 8})
    assert str(found) == (
        "ranks                           8   launcher\n"
        "mesh.pipe                       1   default\n"
        "mesh.model                      1   default\n"
        "data-parallel ranks             8   derived: 8 ranks / (pipe 1 × model 1)\n"
        "mesh.shard                      2   config:2 (mics_shard_size)\n"
        "mesh.replica                    4   derived for ZeRO stage 2\n"
        "train_batch_size                64  hyperparameter global_batch_size\n"
        "train_micro_batch_size_per_gpu  4   config:1\n"
        "gradient_accumulation_steps     2   derived: 64 // 4 // 8 ranks"
    )


@pytest.mark.parametrize(("stage", "axes"), [(0, AxisSizes(1, 4, 1, 1)), (1, AxisSizes(4, 1, 1, 1))])
def test_the_axes_of_a_stage(stage: int, axes: AxisSizes):
    """With mesh sizes: test_batch."""
    assert solve_axes(config(stage), 4) == axes


@pytest.mark.parametrize(
    ("mesh", "world", "message"),
    [
        (MeshSection(pipe=2), 3, "mesh: 3 ranks cannot be divided by pipe 2 × model 1 = 2. Start 2 or 4 ranks"),
        (MeshSection(pipe=4), 3, "Start 4 ranks"),
        (
            MeshSection(shard=3),
            4,
            "mesh: shard 3 × replica 1 is not the 4 data-parallel ranks. shard × replica can be 1 × 4, 2 × 2, 4 × 1.",
        ),
        (MeshSection(replica=8), 4, "mesh: shard 0 × replica 8 is not the 4"),
        (MeshSection(shard=2, replica=1), 4, "mesh: shard 2 × replica 1 is not the 4"),
    ],
)
def test_axes_that_do_not_fit(mesh: MeshSection, world: int, message: str):
    with pytest.raises(ConfigError) as error:
        solve_axes(config(2, mesh), world)
    assert message in str(error.value)


@pytest.mark.parametrize("given", [MeshSection(shard=4), MeshSection(replica=1), MeshSection(shard=2, replica=2)])
def test_stage_0_shards_nothing_as_its_engine_says(given: MeshSection):
    """So a search passes over the point, and no run starts with it."""
    with pytest.raises(ConfigError, match="stage 0"):
        mesh_shape(config(0, given), 4)
    with pytest.raises(InvalidHP, match="stage 0"):
        reconcile(config(0, given, train_batch_size=4), 4, search=True)


def test_the_mesh_divides_the_ranks_before_the_batch():
    found = reconcile(config(2, MeshSection(pipe=2, model=2), train_batch_size=32, train_micro_batch_size_per_gpu=4), 8)
    assert (found.batch.accumulation, found.axes.data_parallel) == (4, 2)


def test_all_contradictions_come_together():
    given = config(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    with pytest.raises(ConfigError) as error:
        reconcile(given, 6, {"data_parallel_world_size": 2})
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "2 faults", "hyperparameters.data_parallel_world_size", "train_batch_size 64 ≠ micro 4 × accumulation 2 × ranks 6 = 48. Values",
    ]  # fmt: skip
    assert "Nearest that fit (batch = micro x accumulation x ranks): 60 = 5 x 2 x 6; 72 = 4 x 3 x 6; 48" in lines[2]


def test_in_a_search_it_is_an_invalid_point():
    for faulty in (config(train_batch_size=3), config(2, MeshSection(shard=3), train_batch_size=4)):
        with pytest.raises(InvalidHP):
            reconcile(faulty, 4, search=True)
        with pytest.raises(ConfigError) as error:
            reconcile(faulty, 4)
        assert not isinstance(error.value, InvalidHP)


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (1, {}),
        (1, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}),  # the accumulation is derived
        (2, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
        (1, {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
        (12, {"mesh": MeshSection(shard=3, replica=2, pipe=2)}),
    ],
)
def test_the_ranks_that_a_file_was_written_for(ranks: int, given: dict[str, Any]):
    assert ranks_of(config(**given)) == ranks
