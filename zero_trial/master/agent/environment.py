"""Resources that this machine provides to a run: slots, free ports, environment variables."""

from __future__ import annotations

import json
import os
import site
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zero_trial
from zero_trial.errors import ConfigError
from zero_trial.master.records import Allocation, Invalid, Json
from zero_trial.util.memory import RANK_MALLOC, usable_cores, visible_gpus


@dataclass(frozen=True)
class SlotDevices:
    """The devices behind the slots. ``gpus`` contains the values for CUDA_VISIBLE_DEVICES, by slot;
    if empty, slots are CPU processes."""

    count: int
    cores: int
    gpus: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def visible(self, slots: tuple[int, ...]) -> str:
        """Return CUDA_VISIBLE_DEVICES for an allocation; "" hides all GPUs."""
        return ",".join(self.gpus[slot] for slot in slots) if self.gpus else ""

    @property
    def threads(self) -> int:
        """Return OMP_NUM_THREADS per process: all slots together use each core once."""
        return max(1, self.cores // max(1, self.count))


def find_devices(
    wanted: int | None, env: Mapping[str, str], *, cpu: bool = False, files: Path = Path("/dev")
) -> SlotDevices:
    """Find the slots of this machine: the GPUs that are visible to this process, else its cores.

    Raises ConfigError for more slots than GPUs. There may be more CPU slots than cores.

    Args:
        wanted: number of slots; None means all.
        env: the environment that contains CUDA_VISIBLE_DEVICES.
        cpu: ignore GPUs.
        files: the folder of device files.
    """
    cores, gpus = usable_cores(), () if cpu else visible_gpus(env, files)
    if wanted is not None and wanted < 1:
        raise ConfigError(
            "a master needs at least one slot", where="--slots", got=wanted, expected="a positive integer"
        )
    if gpus and wanted is not None and wanted > len(gpus):
        raise ConfigError(
            "more slots than GPUs",
            where="--slots",
            got=wanted,
            expected=f"at most {len(gpus)}",
            fix="Add --cpu for slots that are processes on the CPU.",
        )
    if gpus:
        gpus = gpus[:wanted]
        return SlotDevices(len(gpus), cores, gpus)
    return SlotDevices(wanted or cores, cores)


@dataclass(frozen=True)
class StartOrder:
    """An order to start one allocation. ``token`` is passed to its environment and nowhere else."""

    allocation: Allocation
    config: Json
    hparams: Json
    seed: int
    steps_completed: int
    latest_checkpoint: str | None
    owner: str
    token: str
    master_url: str
    cluster_id: str
    nodes: int = 1
    avoid: tuple[str, ...] = ()  # machines whose slots are all disabled
    has_hook: bool = False  # the context directory has a startup-hook.sh


_PORTS = ("C10D_PORT", "INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2", "DTRAIN_SSH_PORT")


class HeldPorts:
    """The four ports that the harness reads from its environment: free ports of this machine that
    are reserved until they are closed or this process ends. Raises OSError if none are free.

    The sockets are bound but do not listen. On Linux, the servers of the allocation can still bind
    these ports, because both sides set SO_REUSEADDR (torch's store, ZeroMQ and sshd do); a process
    that asks for any free port gets a different one. On other systems the ports are only found and
    released, so another process may take them first.
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self._sockets: list[socket.socket] = []
        try:
            for name in _PORTS:
                held = socket.socket()
                self._sockets.append(held)
                held.bind(("", 0))  # no SO_REUSEADDR yet: it could share a port already in use
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.variables[name] = str(held.getsockname()[1])
        except OSError:
            self.close()
            raise
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Release the ports."""
        for held in self._sockets:
            held.close()


MARK = "DET_ALLOCATION_ID"
"""The variable that identifies the processes of an allocation whose supervisor has ended."""

LARGEST = 32 * 4096
"""Bytes of one variable, with its name and trailing NUL, that Linux passes to a process
(MAX_ARG_STRLEN).
"""

_ALLOWED = (
    *("HOME", "LANG", "LANGUAGE", "TMPDIR", "TZ", "USER", "LOGNAME", "SHELL", "TERM"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV"),
)
_ALLOWED_STARTS = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "XDG_CACHE", "OMP_", "MKL_"),
    *("MALLOC_", "TORCH_", "TRITON_", "HF_", "SSL_", "CONDA_"),
)

RELOCATION = Path(__file__).parents[2] / "compat" / "start"
"""The folder whose ``sitecustomize`` moves the harness's absolute paths; first on PYTHONPATH."""


def environment(order: StartOrder, kind: str, host: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variables of the allocation, except those that its nodes add (``agent.node``).

    Args:
        kind: the kind of its slots.
        host: the master's environment; only harmless variables are copied.
        python: the interpreter; its folder is placed first on PATH.
    """
    env = RANK_MALLOC | {
        name: value for name, value in host.items() if name in _ALLOWED or name.startswith(_ALLOWED_STARTS)
    }
    env["PATH"] = os.pathsep.join([str(Path(python).parent), host.get("PATH") or os.defpath])
    env["PYTHONUNBUFFERED"] = "1"
    env.update(of_user(order.config, kind))
    # A user's PYTHONPATH follows the relocation, and cannot override variables that the harness
    # needs. Last is the tree that the master itself runs from, unless it is a folder of installed
    # packages, which is on the path anyway.
    paths = [str(RELOCATION), env.get("PYTHONPATH", ""), tree_of(str(Path(__file__).parents[3]))]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env | _of_harness(order)


def tree_of(folder: str) -> str:
    """Return the folder that zero_trial is imported from; "" for a folder of installed packages,
    which must not precede the folders of Python itself, or of a virtual environment on top."""
    # includes the base interpreter's folders in a virtual environment with --system-site-packages
    known = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    return "" if os.path.realpath(folder) in map(os.path.realpath, known) else folder


def with_package(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with this package importable from any working directory."""
    root = str(Path(zero_trial.__file__).parents[1])
    return {**env, "PYTHONPATH": os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])}


def config_variable(config: Mapping[str, Any]) -> str:
    """Return DET_EXPERIMENT_CONFIG: the configuration plus the port that a cluster adds."""
    environment = config.get("environment") or {}
    ports = {**(environment.get("ports") or {}), "trial": 1734}
    return json.dumps({**config, "environment": {**environment, "ports": ports}})


def check_size(config: Mapping[str, Any]) -> None:
    """Raise Invalid if a completed configuration does not fit into the single environment variable
    that passes it to a trial.

    The same limit applies on a cluster: the harness reads its configuration only from there.
    """
    size = len(f"DET_EXPERIMENT_CONFIG={config_variable(config)}") + 1
    if size > LARGEST:
        raise _too_large(f"{size} bytes with all defaults", f"at most {LARGEST}")


def check_length(text: str) -> None:
    """Raise Invalid if the text of a configuration, or of a part of one, is far too large: parsing
    it value by value would take many seconds."""
    if len(text) > 2 * LARGEST:
        raise _too_large(f"{len(text)} characters", f"at most {2 * LARGEST}")


def _too_large(got: str, expected: str) -> Invalid:
    return Invalid(
        "the configuration is too large for the environment variable that passes it to trials",
        where="config",
        got=got,
        expected=expected,
        fix="Put large values into a file of the model definition, and name the file under data:.",
    )


def of_user(config: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return ``environment_variables`` (NAME=VALUE) for this ``kind`` of slot."""
    listed = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(listed, Mapping):
        listed = listed.get(kind) or []
    pairs = (str(item).partition("=") for item in listed)
    return {name: value for name, _, value in pairs if name}


def _of_harness(order: StartOrder) -> dict[str, str]:
    allocation = order.allocation
    env = {
        "DET_MASTER": order.master_url,
        "DET_CLUSTER_ID": order.cluster_id,
        "DET_TASK_ID": allocation.task_id,
        "DET_ALLOCATION_ID": allocation.id,
        "DET_SESSION_TOKEN": order.token,
        "DET_USER": order.owner,
        # for the SDK; it has the permissions of the allocation, not of its owner
        "DET_USER_TOKEN": order.token,
        "DET_TASK_TYPE": "TRIAL",
        "DET_RESOURCES_ID": allocation.resources_id,
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_CONTAINER_ID": allocation.container_id,
        "DET_TRIAL_ID": str(allocation.trial_id),
        "DET_EXPERIMENT_ID": str(allocation.experiment_id),
        "DET_TRIAL_SEED": str(order.seed),
        "DET_TRIAL_RUN_ID": str(allocation.run_id),
        "DET_HPARAMS": json.dumps(order.hparams),
        "DET_EXPERIMENT_CONFIG": config_variable(order.config),
        "DET_STEPS_COMPLETED": str(order.steps_completed),
    }
    if order.latest_checkpoint is not None:
        env["DET_LATEST_CHECKPOINT"] = order.latest_checkpoint
    return env
