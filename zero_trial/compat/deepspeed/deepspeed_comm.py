"""deepspeed.comm and deepspeed.utils.groups over torch.distributed: functions whose names or
arguments differ from torch's. The table maps all others directly to torch.distributed."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from zero_trial.comm import init_distributed as zero_trial_init_distributed
from zero_trial.comm import rank_and_size, read_rank_env, world_size
from zero_trial.comm.mesh import Mesh, latest_mesh
from zero_trial.comm.rendezvous import RankEnv
from zero_trial.errors import MeshError


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> RankEnv:
    """Call ``zero_trial.init_distributed``; without a GPU, also set up accelerate's state."""
    env = zero_trial_init_distributed(dist_backend, *args, **kwargs)
    if dist_backend is None:
        _let_accelerate_count()
    return env


def is_initialized() -> bool:
    """Return whether the ranks are connected. accelerate calls this before it connects them."""
    connected = dist.is_initialized()
    if connected:
        _let_accelerate_count()
    return connected


def _let_accelerate_count() -> None:
    """Make accelerate count all ranks if there is no GPU.

    Without a GPU, accelerate requests no backend, because it does not know that the engine runs on
    CPUs, and treats every rank as the only one: each would train on all of the data. So set the
    backend and the distributed type for CPUs in the state that accelerate is about to fill in.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and not torch.cuda.is_available():
        state = accelerate.PartialState._shared_state
        if "num_processes" not in state and state.get("backend", "") is None:
            state |= {"backend": "gloo", "distributed_type": accelerate.DistributedType.MULTI_CPU}


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    """Gather every rank's ``tensor`` (may be a scalar), in rank order, into ``output_tensor``."""
    return dist.all_gather_into_tensor(output_tensor, torch.atleast_1d(tensor), group=group, async_op=async_op)


def get_local_rank() -> int:
    """Return this process's number on its host."""
    return read_rank_env().local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of member ``group_rank`` of ``group``."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of all members of ``group``."""
    return dist.get_process_group_ranks(group)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def log_summary() -> None:
    """Print calls and bytes of each collective of the latest engine. There are no times per
    collective; ``engine.seconds_waited()`` returns their sum."""
    mesh = latest_mesh()
    for name, entry in (mesh.counters.table() if mesh is not None else {}).items():
        sys.stdout.write(f"{name:<28} {entry['calls']:>8} calls {entry['bytes']:>16} bytes\n")


# Groups are the axes of the latest engine's mesh; before an engine is built, all ranks are data
# parallel.


def _axis(name: str) -> Any:
    mesh: Mesh | None = latest_mesh()
    return None if mesh is None else getattr(mesh, name)


def _group(name: str) -> Any:
    """Return the group of an axis. Raises MeshError if the axis has a single rank but the world has
    more: groups of one rank do not exist, and torch interprets None as all ranks."""
    axis = _axis(name)
    if axis is None or axis.size == world_size():
        return dist.group.WORLD
    if axis.group is None:
        raise MeshError(
            "a single rank has no such group",
            where=f"deepspeed.utils.groups: the {name} parallel group",
            fix=f"Check get_{name}_parallel_world_size() first.",
        )
    return axis.group


def get_data_parallel_group() -> Any:
    """Return the group that splits the batch."""
    return _group("data")


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that split the batch."""
    axis = _axis("data")
    return world_size() if axis is None else axis.size


def get_data_parallel_rank() -> int:
    """Return the index of this rank's part of the batch."""
    axis = _axis("data")
    return rank_and_size()[0] if axis is None else axis.index


def get_model_parallel_group() -> Any:
    """Return the group of the ranks that share one model; None without an engine."""
    return None if _axis("model") is None else _group("model")


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that share one model."""
    axis = _axis("model")
    return 1 if axis is None else axis.size


def get_model_parallel_rank() -> int:
    """Return the index of this rank's part of the model."""
    axis = _axis("model")
    return 0 if axis is None else axis.index


def get_sequence_parallel_world_size() -> int:
    """Return 1: this module does not split sequences between ranks."""
    return 1


def get_sequence_parallel_rank() -> int:
    """Return 0."""
    return 0


def get_sequence_parallel_group() -> None:
    """Return None."""
    return


def get_expert_parallel_group_dict() -> dict[str, Any]:
    """Return {}: there is no expert parallelism."""
    return {}
