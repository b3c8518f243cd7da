"""Rank variables of the launcher: the only reader of them.

torch.distributed.run, DeepSpeed's launcher, Determined's torch_distributed layer and SLURM's srun all
set one of these sets of variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from zero_trial.errors import MeshError


@dataclass(frozen=True)
class RankEnv:
    """This process's global rank, the number of ranks, and both within its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False  # True when a launcher set the variables, False for a plain `python script.py`


# (rank, world size, local rank, ranks on this host); the first set whose rank and size are both present wins.
_VARIABLE_SETS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """Read the rank variables, from ``os.environ`` unless a mapping is given.

    Raises MeshError for a variable that is set but is not an integer, and for a rank outside the world:
    with a guess of 1, a job would train N independent models without an error.
    """
    source = os.environ if environ is None else environ
    for names in _VARIABLE_SETS:
        rank_name, size_name, local_name, local_size_name = names
        if rank_name not in source or size_name not in source:
            continue
        rank, size = _integer(source, rank_name), _integer(source, size_name)
        if not 0 <= rank < size:
            raise MeshError(
                "the rank lies outside the world",
                where=f"{rank_name}={rank}, {size_name}={size}",
                expected=f"0 <= rank < {size}",
            )
        local = _integer(source, local_name) if local_name in source else rank
        local_size_text = source.get(local_size_name, str(size)).split("(")[0]  # SLURM writes "2(x3)"
        return RankEnv(rank, size, local, int(local_size_text) if local_size_text.isdigit() else size, True)
    return RankEnv()


def _integer(source: Mapping[str, str], name: str) -> int:
    try:
        return int(source[name])
    except ValueError:
        raise MeshError(
            "a rank variable is not an integer", where=name, got=repr(source[name]), expected="an integer"
        ) from None


def is_cluster_trial(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether a Determined master has started this process for a trial, and not for a shell or a notebook."""
    source = os.environ if environ is None else environ
    return source.get("DET_TASK_TYPE") == "TRIAL" and "DET_ALLOCATION_ID" in source


def launcher_run_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the run's folder, if ``zero-trial launch`` has started this process and keeps its logs in one."""
    return (os.environ if environ is None else environ).get("ZERO_TRIAL_RUN_DIR")


def launcher_error_file(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the file in which torch.distributed.run looks for a failed rank's error, if it has started this process."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")


def own_store_address(method: str, environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return host and port where rank 0 keeps the store of the meeting place ``method``; None where another process does, or it is a file."""
    source = os.environ if environ is None else environ
    if method.startswith("tcp://"):
        place = urlsplit(method)
        return (place.hostname, place.port) if place.hostname and place.port and not place.query else None
    given = source.get("MASTER_ADDR"), source.get("MASTER_PORT", "")
    if not method.startswith("env://") or source.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return (given[0], int(given[1])) if given[0] and given[1].isdigit() else None


def meeting_place(distributed_port: int, environ: Mapping[str, str] | None = None) -> str:
    """Return ``env://`` if the launcher named the meeting place, else MASTER_ADDR or this host at ``distributed_port`` (MPI and SLURM set none)."""
    source = os.environ if environ is None else environ
    if "MASTER_ADDR" in source and "MASTER_PORT" in source:
        return "env://"
    return f"tcp://{source.get('MASTER_ADDR', '127.0.0.1')}:{distributed_port}"
