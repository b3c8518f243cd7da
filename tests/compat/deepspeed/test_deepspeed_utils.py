"""The functions that the stand-in for DeepSpeed has of its own: accelerator, groups, log, norms,
moving tensors."""

from __future__ import annotations

import csv
import logging
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import Pools
from zero_trial.comm import init_distributed
from zero_trial.comm.mesh import MeshShape, build_mesh
from zero_trial.compat.deepspeed import deepspeed_comm as comm
from zero_trial.compat.deepspeed import deepspeed_utils as utils
from zero_trial.compat.deepspeed.accelerator import (
    Accelerator,
    CpuAccelerator,
    CudaAccelerator,
    get_accelerator,
)
from zero_trial.errors import ConfigError, MeshError


def test_the_processor_as_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    device = CpuAccelerator()
    assert device.device_name() == device.device_name(1) == device.current_device_name() == "cpu"
    assert device.communication_backend_name() == "gloo" and device.is_available()
    assert torch.zeros(2, device=device.device(0)).device.type == "cpu"
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    device.manual_seed_all(7)
    assert device.initial_seed() == 7
    with device.stream(device.current_stream()):
        device.synchronize()
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory()
    assert device.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]
    assert device.LongTensor([1, 2]).dtype == torch.long and device.BFloat16Tensor([1.0]).dtype == torch.bfloat16
    tensor = torch.ones(2)
    assert device.on_accelerator(tensor) and device.pin_memory(tensor) is tensor
    monkeypatch.setenv("LOCAL_SIZE", "4")  # the ranks that a program announces
    assert CpuAccelerator().device_count() == 4


# What scripts ask of DeepSpeed's accelerators.
METHODS = """
device_name device set_device current_device current_device_name device_count synchronize random set_rng_state
get_rng_state manual_seed manual_seed_all initial_seed default_generator Stream stream current_stream default_stream Event
empty_cache memory_allocated max_memory_allocated memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved
total_memory available_memory is_bf16_supported is_fp16_supported supported_dtypes is_available range_push range_pop
lazy_call communication_backend_name BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
pin_memory on_accelerator
"""


@pytest.mark.parametrize("kind", [CpuAccelerator, CudaAccelerator])
def test_both_accelerators_have_every_method(kind: type[Accelerator]):
    assert [name for name in METHODS.split() if not hasattr(kind(), name)] == []
    with pytest.raises(AttributeError, match="no 'create_op_builder'"):
        kind().create_op_builder("x")


def test_cuda_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch):
    """What needs no device: names, and which function of torch.cuda a method is."""
    device = CudaAccelerator()
    assert device.device(1) == torch.device("cuda:1") and device.communication_backend_name() == "nccl"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5, 9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert device.current_device_name() == "cuda:3" and device.current_device() == 3
    assert (device.available_memory(), device.total_memory(), device.memory_reserved()) == (5, 9, 7)
    assert device.supported_dtypes() == [torch.float, torch.half] and device.Event is torch.cuda.Event


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_as_an_accelerator():
    device = get_accelerator()
    before = device.memory_allocated()
    tensor = torch.ones(1 << 20, device=device.current_device_name())
    assert device.memory_allocated() - before >= 4 << 20 and device.on_accelerator(tensor)
    assert device.device_count() == torch.cuda.device_count() and device.device_name(0) == "cuda:0"
    with device.stream(device.Stream()):
        device.synchronize()


def test_the_log_says_it_once_and_on_the_chosen_ranks(caplog: pytest.LogCaptureFixture):
    # an engine that an earlier test made in this process may have started it
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else -1
    utils.logger.addHandler(caplog.handler)
    # The logger gives its level to its handlers, and pytest's serve every later test.
    levels = [(handler, handler.level) for handler in utils.logger.handlers]
    try:
        for _ in range(2):
            utils.logger.warning_once("beware of %s", "dogs")
            utils.log_dist("heard", ranks=[0], level=logging.ERROR)
        utils.log_dist("quiet", ranks=[0])
        assert [record.getMessage() for record in caplog.records] == ["beware of dogs", *[f"[Rank {rank}] heard"] * 2]
        utils.logger.setLevel("INFO")
        utils.log_dist("loud", ranks=[0])
        assert caplog.records[-1].getMessage().endswith("loud")
    finally:
        utils.logger.setLevel("WARNING")
        for handler, level in levels:
            handler.setLevel(level)
        utils.logger.removeHandler(caplog.handler)


def test_small_helpers(capsys: pytest.CaptureFixture[str]):
    pair = namedtuple("pair", "a b")
    item = {"x": [torch.ones(2), "text"], "y": pair(torch.zeros(1), None)}
    moved = utils.move_to_device(item, "meta")
    assert moved["x"][0].device.type == "meta" and moved["x"][1] == "text"
    assert isinstance(moved["y"], pair) and moved["y"].a.device.type == "meta"
    assert item["x"][0].device.type == "cpu"
    kept = torch.ones(2, dtype=torch.float64)
    assert utils.move_to_device(kept, torch.device("cpu"), lambda t: True) is kept
    part = utils.clone_tensors_for_torch_save({"a": [torch.zeros(1000)[:3]]})["a"][0]
    assert part.untyped_storage().nbytes() == 12 and not part.requires_grad
    drawn = [utils.set_random_seed(3) or torch.rand(1) for _ in range(2)]
    assert torch.equal(*drawn)
    for force, said in (False, []), (True, ["before"]):
        utils.see_memory_usage("before", force=force)
        assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == said
    # without ranks every group is this process
    assert comm.get_data_parallel_world_size() >= 1 and comm.get_data_parallel_rank() == 0
    assert comm.get_sequence_parallel_world_size() == 1 and comm.get_sequence_parallel_group() is None


def _use_groups() -> list[Any]:
    env = init_distributed()
    assert comm.get_data_parallel_world_size() == 2 and comm.get_model_parallel_world_size() == 1
    out = torch.empty(4)
    comm.all_gather_into_tensor(out, torch.full((2,), float(env.rank)))
    scalars = torch.empty(2)
    comm.all_gather_into_tensor(scalars, torch.tensor(5.0 + env.rank))
    assert scalars.tolist() == [5.0, 6.0]
    mesh = build_mesh(MeshShape(pipe=2))
    alone = (comm.get_data_parallel_world_size(), comm.get_data_parallel_rank())
    with pytest.raises(MeshError):
        comm.get_data_parallel_group()
    del mesh
    ranks = comm.get_all_ranks_from_group(comm.get_world_group())
    return [out.tolist(), alone, ranks, comm.get_global_rank(None, 1)]


def test_groups_and_collectives_on_two_ranks():
    pools = Pools()  # of its own: the groups are those of the newest engine, which another test may have left
    try:
        assert pools(2).run(_use_groups) == [[[0, 0, 1, 1], (1, 0), [0, 1], 1]] * 2
    finally:
        pools.close()


def test_groups_of_a_model_without_experts_stay_and_experts_are_refused():
    """DeepSpeed's cifar example imports this, also where it trains without experts."""
    split = utils.split_params_into_different_moe_groups_for_optimizer
    layer = torch.nn.Linear(2, 1)
    group = {"params": list(layer.parameters()), "name": "parameters"}
    assert split(group) == split([group]) == [group]
    assert utils.has_moe_layers(layer) == (False, 0) and not utils.is_moe_param(layer.weight)
    layer.bias.allreduce = False  # type: ignore[union-attr]
    assert utils.is_moe_param(layer.bias)
    with pytest.raises(ConfigError, match="experts"):
        split(group)


def written(folder: str) -> bool:
    given: dict[str, Any] = {"enabled": True, "output_path": folder, "job_name": "run"}
    monitor = utils.MonitorMaster(utils.get_monitor_config({"csv_monitor": given, "train_batch_size": 3}))
    monitor.write_events([("Train/loss", 0.5, 7)])
    return monitor.enabled


def test_monitors_write_on_rank_0(ranks: Pools, tmp_path: Path):
    assert ranks(2).run(written, str(tmp_path)) == [True, False]
    (file,) = tmp_path.rglob("*.csv")
    assert list(csv.reader(file.open()))[1] == ["7", "0.5"]


def test_a_profile_of_several_forwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model[1].eval()
    profiler = utils.FlopsProfiler(model)
    for _ in range(2):
        profiler.start_profile(ignore_list=[torch.nn.ReLU])
        model(torch.ones(3, 4))
        profiler.stop_profile()
    flops = 2 * 2 * 3 * (4 * 8 + 8 * 2)
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (flops, flops // 2)
    assert profiler.get_total_params() == 58 and profiler.get_total_duration() > 0
    assert profiler.get_total_flops(as_string=True) == f"{flops} FLOP"
    profiler.print_model_profile(output_file=tmp_path / "profile.txt")
    profiler.end_profile()
    text = (tmp_path / "profile.txt").read_text()
    assert "Linear" in text and "ReLU" not in text
    model(torch.ones(3, 4))
    assert profiler.get_total_flops() == flops
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    assert utils.get_model_profile(model, (3, 4), as_string=False) == (flops // 2, flops // 4, 58)
    assert "Linear" in capsys.readouterr().out
    with pytest.raises(RuntimeError):
        utils.get_model_profile(model, (3, 5))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert not any(module._forward_hooks for module in model.modules())
