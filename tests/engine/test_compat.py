"""DeepSpeed's and Megatron's names: script arguments, loaders, mesh units and the pipeline grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import zero_trial
from tests.support.dense import Case, build_engine
from tests.support.models import TinyLM
from tests.support.pool import Pools
from zero_trial.comm import MeshShape
from zero_trial.engine.accessors import ANSWERS, SETTINGS
from zero_trial.engine.compat import (
    DeepSpeedConfig,
    PipelineParallelGrid,
    RepeatingLoader,
    add_config_arguments,
    hints_of,
    rank_loader,
)
from zero_trial.errors import ConfigError, DataError, TrialError


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
    assert first != second and first == [seen(loader_of(data, 3, rank, 2)) for rank in range(2)]


def test_short_last_batches_and_iterable_data_sets() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(5))

    assert [len(batch) for batch in loader_of(list(range(7)), 4, 0, 1)] == [4, 3]
    assert [len(batch) for batch in loader_of(list(range(7)), 4, 0, 1, drop_last=True)] == [4]
    assert seen(loader_of(Stream(), 2, 1, 2)) == [0, 1, 2, 3, 4]
    assert list(loader_of([], 4, 0, 2, route="eval")) == []
    with pytest.raises(DataError, match=r"no batch: got 7 samples, expected at least 8: batches of 4 on 2 ranks\. Use"):
        loader_of(list(range(7)), 4, 0, 2, drop_last=True)
    with pytest.raises(DataError, match="got 0 samples, expected at least 1"):
        loader_of([], 4, 0, 2)


def test_repeating_starts_again_unless_there_is_nothing() -> None:
    endless = RepeatingLoader([torch.tensor([1]), torch.tensor([2])])
    assert [int(next(endless)) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(DataError, match=r"RepeatingLoader\(list\): the loader returned no batch"):
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


CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.25,
    "steps_per_print": 7,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 777, "offload_optimizer": {"device": "cpu"}},
}


def engine_with(client: Any = None, **config: Any) -> Any:
    return zero_trial.initialize(model=nn.Linear(3, 3), optimizer=client, config=CONFIG | config)[0]


def test_settings_by_deepspeeds_names() -> None:
    engine = engine_with()
    expected = {
        "gradient_clipping": 0.25,
        "steps_per_print": 7,
        "get_batch_info": (4, 2, 2),
        "get_data_types": (torch.bfloat16, torch.float32),
        "zero_optimization": True,
        "zero_optimization_stage": 2,
        "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": False,
        "zero_reduce_bucket_size": 777,
        "zero_cpu_offload": True,
        "zero_use_cpu_optimizer": True,
        "zero_nvme_offload_optimizer": False,
        "dynamic_loss_scale": False,
        "initial_dynamic_scale": 1.0,
        "bfloat16_enabled": True,
        "fp16_enabled": False,
        "optimizer_name": "adamw",
        "optimizer_params": {"lr": 0.1, "betas": (0.8, 0.9)},
        "scheduler_name": "WarmupLR",
        "scheduler_params": {"warmup_num_steps": 4},
        "checkpoint_tag_validation_fail": False,
        "managed_gradient_accumulation": True,
        "postscale_gradients": True,
        "get_data_parallel_rank": 0,
        "get_tensor_parallel_rank": 0,
    }
    assert expected == {name: getattr(engine, name)() for name in expected}
    assert engine.basic_optimizer is engine.optimizer.optimizer


def test_every_setting_that_is_asked_for_exists() -> None:
    engine = engine_with()
    for name in (*ANSWERS, *SETTINGS):
        getattr(engine, name)()


def test_a_clients_optimizer_and_momenta() -> None:
    engine = engine_with(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5), zero_optimization={"stage": 1})
    assert (engine.optimizer_name(), engine.get_mom(), engine_with().get_mom()) == ("SGD", [0.5], [(0.8, 0.9)])
    plain = engine_with(lambda params: torch.optim.Adagrad(params), zero_optimization={"stage": 1})
    assert plain.get_mom() == [0.0]


def test_config_is_a_mapping_of_what_was_written() -> None:
    config = engine_with().config
    assert config["zero_optimization"]["stage"] == 2
    assert config.get("train_batch_size") == 4 and config.get("fp16") is None
    assert "bf16" in config and "fp16" not in config
    assert dict(config).keys() == CONFIG.keys() == dict(config.items()).keys() == set(config)
    with pytest.raises(KeyError):
        config["fp16"]


def test_what_means_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with()
    monkeypatch.chdir(tmp_path)
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        for folder in ("", None):
            with pytest.raises(ConfigError, match="directory"):
                call(folder)
    assert not list(tmp_path.iterdir())
    zero_trial.initialize(model=nn.Linear(3, 3), config=CONFIG, mesh_param=(1, 1))
    for mesh in ((1, 2), (2, 1)):
        with pytest.raises(ConfigError, match="mesh_param"):
            zero_trial.initialize(model=nn.Linear(3, 3), config=CONFIG, mesh_param=mesh)
    with pytest.raises(AttributeError, match="allreduce_gradients does not exist in zero_trial: the engine reduces"):
        engine.allreduce_gradients  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018


def test_blocks_are_not_nested_and_no_step_is_taken_inside() -> None:
    engine = engine_with()
    with engine.coalesce_grad_reduction():
        for call in (engine.step, engine.no_sync().__enter__, engine.coalesce_grad_reduction().__enter__):
            with pytest.raises(TrialError):
                call()
    assert not engine.inside_no_sync_ctxt
    unmanaged = engine_with(managed_gradient_accumulation=False, gradient_accumulation_steps=1, train_batch_size=1)
    unmanaged.set_gradient_accumulation_boundary(False)
    unmanaged.backward(unmanaged(torch.ones(1, 3)).sum())
    for refused in (unmanaged.coalesce_grad_reduction, unmanaged.step):
        with pytest.raises(TrialError, match="managed_gradient_accumulation"):
            refused()


def test_loaders_take_deepspeeds_arguments() -> None:
    data = [torch.full((3,), float(i)) for i in range(6)]
    model, sampler = nn.Linear(3, 3), torch.utils.data.SequentialSampler(range(4))
    engine = zero_trial.initialize(model=model, config=CONFIG, collate_fn=lambda rows: len(rows))[0]
    assert list(engine.deepspeed_io(data, 4)) == [4, 2]
    rows = [
        each.tolist()[0] for batch in engine.deepspeed_io(data, 6, "eval", collate_fn=torch.stack) for each in batch
    ]
    assert rows == [0, 1, 2, 3, 4, 5]
    chosen = engine.deepspeed_io(data, 2, "train", True, sampler, torch.stack, 0)
    assert [batch[:, 0].tolist() for batch in chosen] == [[0, 1], [2, 3]]
    assert engine.deepspeed_io(data, num_local_io_workers=1).num_workers == 1
    with pytest.raises(ConfigError, match="route"):
        engine.deepspeed_io(data, route="training")
