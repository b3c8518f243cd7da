"""The functions that the stand-in for DeepSpeed has of its own: accelerator, groups, log, norms,
moving tensors."""

from __future__ import annotations

import logging
from collections import namedtuple
from types import SimpleNamespace
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


def test_the_processor_as_an_accelerator():
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


# DeepSpeed's abstract accelerator, without its op builders and its own pinned memory.
METHODS = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device set_device
current_device current_device_name device_count synchronize random set_rng_state get_rng_state manual_seed manual_seed_all
initial_seed default_generator Stream stream current_stream default_stream Event empty_cache memory_allocated
max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached memory_stats
reset_peak_memory_stats memory_reserved max_memory_reserved total_memory available_memory is_bf16_supported
is_fp16_supported is_fp64_supported supported_dtypes is_available range_push range_pop lazy_call
communication_backend_name is_triton_supported is_current_stream_capturing create_graph capture_to_graph replay_graph
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned on_accelerator
export_envs visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend
"""


@pytest.mark.parametrize("kind", [CpuAccelerator, CudaAccelerator])
def test_both_accelerators_have_every_method(kind: type[Accelerator]):
    assert [name for name in METHODS.split() if not hasattr(kind(), name)] == []


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
    assert (device.available_memory(), device.total_memory(), device.memory_cached()) == (5, 9, 7)
    assert device.supported_dtypes() == [torch.float, torch.half] and not device.is_triton_supported()
    chosen: dict[str, str] = {}
    device.set_visible_devices_envs(chosen, [0, 2])
    assert chosen == {"CUDA_VISIBLE_DEVICES": "0,2"} and device.Event is torch.cuda.Event


def test_the_accelerator_refuses_by_name():
    device = get_accelerator()
    with pytest.raises(AttributeError, match="op builders"):
        device.create_op_builder("x")
    with pytest.raises(AttributeError, match="no 'memory_alocated'"):
        device.memory_alocated()
    with pytest.raises(ConfigError):
        device.set_compile_backend("nonsense")
    device.set_compile_backend("eager")
    assert device.get_compile_backend() == "eager"
    device.set_compile_backend("inductor")


def test_processors_count_as_the_ranks_that_a_program_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert CpuAccelerator().device_count() == 4


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
            utils.warning_once("beware of %s", "dogs")
            utils.log_dist("heard", ranks=[0], level=logging.ERROR)
        utils.log_dist("quiet", ranks=[0])
        assert [record.getMessage() for record in caplog.records] == ["beware of dogs", *[f"[Rank {rank}] heard"] * 2]
        utils.set_log_level_from_string("info")
        utils.log_dist("loud", ranks=[0])
        assert caplog.records[-1].getMessage().endswith("loud")
    finally:
        utils.set_log_level_from_string("warning")
        for handler, level in levels:
            handler.setLevel(level)
        utils.logger.removeHandler(caplog.handler)
    with pytest.raises(ConfigError):
        utils.set_log_level_from_string("shout")


def test_tensors_are_moved_in_nested_values():
    pair = namedtuple("pair", "a b")
    item = {"x": [torch.ones(2), "text"], "y": pair(torch.zeros(1), None)}
    moved = utils.move_to_device(item, "meta")
    assert moved["x"][0].device.type == "meta" and moved["x"][1] == "text"
    assert isinstance(moved["y"], pair) and moved["y"].a.device.type == "meta"
    assert item["x"][0].device.type == "cpu"
    kept = torch.ones(2, dtype=torch.float64)
    assert utils.move_to_device(kept, torch.device("cpu"), lambda t: True) is kept


def test_a_cloned_part_does_not_bring_its_whole():
    whole = torch.zeros(1000)
    part = utils.clone_tensors_for_torch_save({"a": [whole[:3]]})["a"][0]
    assert part.untyped_storage().nbytes() == 12 and not part.requires_grad


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, float("inf")])
def test_norms_are_those_of_one_vector(norm_type: float):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(2, 3))]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    expected = torch.linalg.vector_norm(flat, norm_type)
    for p in parameters:
        p.grad = p.detach().clone()
    torch.testing.assert_close(utils.clip_grad_norm_(parameters, float(expected) / 2, norm_type), expected)
    clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(clipped, flat / 2, rtol=1e-5, atol=0)
    same = utils.clip_grad_norm_(parameters, 1e6, norm_type)
    torch.testing.assert_close(same, expected / 2, rtol=1e-5, atol=0)


def test_partitions():
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10] and utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([1, 1, 1, 9], 2) == [0, 3, 4] and utils.partition_balanced([5], 2) == [0, 1, 1]


def test_a_seed_is_one_for_all_generators():
    utils.set_random_seed(3)
    first = torch.rand(1)
    utils.set_random_seed(3)
    assert torch.equal(torch.rand(1), first)


def test_memory_is_said_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]):
    utils.see_memory_usage("before", force=False)
    assert capsys.readouterr().out == ""
    utils.see_memory_usage("before", force=True)
    utils.memory_status("after", reset_max=True)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["before", "after"]


def test_without_ranks_every_group_is_this_process():
    assert comm.get_data_parallel_world_size() >= 1 and comm.get_data_parallel_rank() == 0
    assert comm.get_sequence_parallel_world_size() == 1 and comm.get_sequence_parallel_group() is None
    with pytest.raises(MeshError):
        comm.log_summary(show_straggler=True)


def _use_groups() -> list[Any]:
    env = init_distributed()
    assert comm.get_data_parallel_world_size() == 2 and comm.get_model_parallel_world_size() == 1
    out = torch.empty(4)
    comm.all_gather_into_tensor(out, torch.full((2,), float(env.rank)))
    scalars = torch.empty(2)
    comm.all_gather_into_tensor(scalars, torch.tensor(5.0 + env.rank))
    assert scalars.tolist() == [5.0, 6.0]
    part = torch.empty(2)
    comm.reduce_scatter_tensor(part, tensor=torch.arange(4.0))
    mixed = torch.empty(2)
    comm.all_to_all_single(mixed, torch.tensor([0.0, 1.0]) + 10 * env.rank)
    mesh = build_mesh(MeshShape(pipe=2))
    alone = (comm.get_data_parallel_world_size(), comm.get_data_parallel_rank())
    with pytest.raises(MeshError):
        comm.get_data_parallel_group()
    halves = torch.nn.Parameter(torch.zeros(1))
    halves.grad = torch.tensor([3.0 if env.rank == 0 else 4.0])
    halves.model_parallel = True  # type: ignore[attr-defined]
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_rank=lambda: env.rank,
        get_model_parallel_group=comm.get_world_group,
    )
    norm = float(utils.clip_grad_norm_([halves], 100.0, mpu=mpu))
    del mesh
    summary = comm.log_summary(return_dict=True)
    ranks = comm.get_all_ranks_from_group(comm.get_world_group())
    return [out.tolist(), part.tolist(), mixed.tolist(), alone, norm, summary, ranks, comm.get_global_rank(None, 1)]


def test_groups_and_collectives_on_two_ranks():
    pools = Pools()  # of its own: the groups are those of the newest engine, which another test may have left
    try:
        found = pools(2).run(_use_groups)
    finally:
        pools.close()
    for rank, (out, part, mixed, alone, norm, summary, members, second) in enumerate(found):
        assert out == [0, 0, 1, 1] and part == [4.0 * rank, 4.0 * rank + 2] and mixed == [rank, rank + 10.0]
        assert alone == (1, 0) and norm == pytest.approx(5.0) and summary == {} and members == [0, 1] and second == 1


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
