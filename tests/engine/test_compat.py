"""DeepSpeed's and Megatron's names: script arguments, loaders, mesh units and the pipeline grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.support.dense import Case, build_engine
from tests.support.models import TinyLM
from tests.support.pool import Pools
from zero_trial.comm import MeshShape
from zero_trial.engine.compat import (
    DeepSpeedConfig,
    PipelineParallelGrid,
    RepeatingLoader,
    add_config_arguments,
    hints_of,
    rank_loader,
)
from zero_trial.errors import ConfigError, DataError


@pytest.mark.parametrize("option", ["--deepspeed_config", "--zero_trial_config"])
def test_either_name_gives_the_file(option: str, tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    parser = add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", option, str(path)])
    assert args.deepspeed_config == str(path)  # scripts write their arguments as JSON


def test_deepspeedconfig_reads_a_file_and_solves_the_batch_sizes(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}')
    found = DeepSpeedConfig(path)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (12, 6)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 3)
    assert DeepSpeedConfig(str(path), mpu).gradient_accumulation_steps == 2
    with pytest.raises(ConfigError):
        DeepSpeedConfig(path, SimpleNamespace(get_data_parallel_world_size=lambda: 5))


def test_training_arguments_are_understood():
    args = argparse.Namespace(
        learning_rate=3e-5,
        adam_beta1=0.9,
        adam_beta2=0.98,
        bf16=True,
        output_dir="x",
        weight_decay=0.0,
        per_device_train_batch_size=4,
        train_batch_size=4,
        max_steps=-1,
        warmup_steps=0,
        warmup_ratio=0.1,
    )
    assert hints_of(args) == {
        "learning_rate": 3e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "bf16": True,
        "weight_decay": 0.0,
        "per_device_train_batch_size": 4,
        "warmup_ratio": 0.1,
    }


def test_a_plain_script_s_arguments():
    """``train_batch_size`` alone is the global one, as in ds_config; no warm-up is a warm-up of no
    steps."""
    args = argparse.Namespace(lr=0.1, train_batch_size=32, warmup_steps=0, max_steps=10, model=object())
    assert hints_of(args) == {"lr": 0.1, "train_batch_size": 32, "warmup_steps": 0, "max_steps": 10}
    assert hints_of(None) == {}


def seen(loader: object) -> list[int]:
    return [int(value) for batch in loader for value in batch]  # type: ignore[attr-defined]


def loader_of(data: Any, size: int, rank: int, ranks: int, **options: Any) -> Any:
    mesh: Any = SimpleNamespace(data=SimpleNamespace(index=rank, size=ranks))
    config: Any = SimpleNamespace(dataloader_drop_last=False)
    return rank_loader(data, size, mesh, config, **options)


def test_ranks_share_the_data_and_every_pass_is_shuffled_anew() -> None:
    data = list(range(20))
    loaders = [loader_of(data, 3, rank, 2) for rank in range(2)]
    first, second = ([seen(loader) for loader in loaders] for _ in range(2))
    for parts in (first, second):
        assert sorted(parts[0] + parts[1]) == data
    assert first != second
    assert first == [seen(loader_of(data, 3, rank, 2)) for rank in range(2)]


def test_short_last_batches_and_iterable_data_sets() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(5))

    assert [len(batch) for batch in loader_of(list(range(7)), 4, 0, 1)] == [4, 3]
    assert [len(batch) for batch in loader_of(list(range(7)), 4, 0, 1, drop_last=True)] == [4]
    assert seen(loader_of(Stream(), 2, 1, 2)) == [0, 1, 2, 3, 4]


def test_repeating_starts_again_unless_there_is_nothing() -> None:
    endless = RepeatingLoader([torch.tensor([1]), torch.tensor([2])])
    assert [int(next(endless)) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(DataError, match=r"RepeatingLoader\(list\): the loader yields nothing"):
        next(RepeatingLoader([]))


def answers(stage: int, mesh: dict[str, int]) -> tuple[int, ...]:
    config = {"mesh": mesh} if mesh else {}
    engine = build_engine(Case(TinyLM, lambda model, turn: model, config=config), {"stage": stage})
    mpu = engine.mpu
    assert mpu.get_global_rank() == engine.global_rank == engine.mesh.rank
    assert engine.dp_world_size == mpu.get_data_parallel_world_size()
    assert engine.data_parallel_group is mpu.get_data_parallel_group()
    assert mpu.get_slice_parallel_world_size() == mpu.get_model_parallel_world_size() == engine.mp_world_size
    return (
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        mpu.get_pipe_parallel_rank(),
        mpu.get_pipe_parallel_world_size(),
        mpu.get_model_parallel_rank(),
        mpu.get_slice_parallel_rank(),
    )


def test_every_rank_has_data_of_its_own(ranks: Pools) -> None:
    """With hybrid sharding too: the data-parallel rank counts over all shard groups."""
    assert ranks(2).run(answers, 3, {}) == [(0, 2, 0, 1, 0, 0), (1, 2, 0, 1, 0, 0)]
    found = ranks(4).run(answers, 2, {"shard": 2, "replica": 2})
    assert [row[:2] for row in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def grid(rank: int) -> PipelineParallelGrid:
    """Of a mesh with 3 stages x 2 replicas x 2 shards."""
    shape = MeshShape(pipe=3, replica=2, shard=2)
    at = shape.coordinates(rank)
    group = {name: SimpleNamespace(group=f"{name} group") for name in ("pipe", "model")}
    data: Any = SimpleNamespace(index=at["replica"] * 2 + at["shard"], size=4, group="data group")
    mesh: Any = SimpleNamespace(shape=shape, rank=rank, coordinates=at, data=data, **group)
    return PipelineParallelGrid(mesh)


def test_where_a_rank_is():
    found = grid(6)
    assert (found.get_stage_id(), found.get_pipe_parallel_rank(), found.get_data_parallel_id()) == (1, 1, 2)
    assert (found.pipe_parallel_size, found.data_parallel_size, found.slice_parallel_size, found.world_size) == (
        3,
        4,
        1,
        12,
    )
    assert (found.is_first_stage, found.is_last_stage, grid(11).is_last_stage) == (False, False, True)
    assert (found.get_pipe_parallel_group(), found.get_slice_parallel_group()) == ("pipe group", "model group")


def test_neighbours_in_the_pipeline_and_the_topology():
    """The topology numbers ranks as the mesh does."""
    assert [grid(6).stage_to_global(stage) for stage in range(3)] == [2, 6, 10]
    assert grid(6).stage_to_global(0, data=3) == 3
    for rank in range(12):
        place = grid(rank).topology().get_coord(rank)
        assert (place.pipe, place.data) == (grid(rank).stage_id, grid(rank).data_parallel_id)
