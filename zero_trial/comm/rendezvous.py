"""Rendezvous: the ranks find each other, torch.distributed is started once, and they leave it
together.

    read_rank_env      the rank variables of the launcher; no other module reads them
    init_distributed   rank 0 opens the store (or a launcher's agent has) ─► each rank signs in ─►
                       all are there ─► the process group is made over the store, with a time limit
                       on every collective
    fail_together      the fault of one rank is raised by all, so that none waits for the next
                       collective
    ExitNotice         one rank ends early for a good reason, and every other one ends too

torch.distributed.run, DeepSpeed's launcher, Determined's torch_distributed layer and SLURM's srun
each set one set of these variables. Without a launcher a process is a world of one and needs no
process group.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

from zero_trial.comm.backends import moves_host_tensors
from zero_trial.comm.collective import AxisComm
from zero_trial.comm.diagnosis import names, printable
from zero_trial.comm.waits import Heartbeat
from zero_trial.device import accelerator, own_device, torch_module
from zero_trial.errors import CheckpointError, ExitStatus, MeshError, ZeroTrialError
from zero_trial.util.failures import add_note, known_fault

log = logging.getLogger("zero_trial")

DEFAULT_TIMEOUT_SECONDS = 300.0
_LONG_WAIT_SECONDS = 10.0  # for other ranks, before the wait is logged
_LINES_SECONDS = 60.0  # between further lines

T = TypeVar("T")

# --- rank variables -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankEnv:
    """This process's global rank, the number of ranks, and both within its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # True when a launcher set the variables, False for a plain `python script.py`
    launched: bool = False


# (rank, world size, local rank, ranks on this host); the first set whose rank and size are both
# present wins. DeepSpeed's launcher names the last LOCAL_SIZE, and a program that starts its ranks
# itself, such as a test, sets it to announce how many there will be.
_VARIABLE_SETS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """Read the rank variables, from ``os.environ`` unless a mapping is given.

    Raises MeshError for a variable that is set but is not an integer, and for a rank outside the
    world: with a guess of 1, a job would train N independent models without an error.
    """
    source = os.environ if environ is None else environ
    for rank_name, size_name, local_name, local_size_name in _VARIABLE_SETS:
        if rank_name not in source or size_name not in source:
            continue
        rank, size = _integer(source, rank_name), _integer(source, size_name)
        if not 0 <= rank < size:
            raise MeshError(
                "the rank is outside the world",
                where=f"{rank_name}={rank}, {size_name}={size}",
                expected=f"0 <= rank < {size}",
            )
        local = _integer(source, local_name) if local_name in source else rank
        # SLURM writes "2(x3)"
        local_size_text = source.get(local_size_name, source.get("LOCAL_SIZE", str(size))).split("(")[0]
        return RankEnv(rank, size, local, int(local_size_text) if local_size_text.isdigit() else size, True)
    alone = source.get("LOCAL_SIZE", "")
    return RankEnv(local_world_size=int(alone) if alone.isdigit() and int(alone) > 0 else 1)


def _integer(source: Mapping[str, str], name: str) -> int:
    try:
        return int(source[name])
    except ValueError:
        raise MeshError(
            "a rank variable is not an integer", where=name, got=repr(source[name]), expected="an integer"
        ) from None


def is_cluster_trial() -> bool:
    """Return whether a Determined master has started this process for a trial."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL" and "DET_ALLOCATION_ID" in os.environ


def launcher_run_dir() -> str | None:
    """Return the run's folder, if ``zero-trial launch`` started this process and keeps its logs."""
    return os.environ.get("ZERO_TRIAL_RUN_DIR")


def launcher_error_file() -> str | None:
    """Return torch.distributed.run's file for this rank's error, if it started this process."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def own_store_address(method: str, environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return host and port where rank 0 keeps the store of the meeting place ``method``; None if
    another process does, or if it is a file."""
    source = os.environ if environ is None else environ
    if method.startswith("tcp://"):
        place = urlsplit(method)
        return (place.hostname, place.port) if place.hostname and place.port and not place.query else None
    given = source.get("MASTER_ADDR"), source.get("MASTER_PORT", "")
    if not method.startswith("env://") or source.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return (given[0], int(given[1])) if given[0] and given[1].isdigit() else None


def meeting_place(distributed_port: int, environ: Mapping[str, str] | None = None) -> str:
    """Return ``env://`` if the launcher named the meeting place, else MASTER_ADDR or this host at
    ``distributed_port`` (MPI and SLURM set none)."""
    source = os.environ if environ is None else environ
    if "MASTER_ADDR" in source and "MASTER_PORT" in source:
        return "env://"
    return f"tcp://{source.get('MASTER_ADDR', '127.0.0.1')}:{distributed_port}"


# --- the process group ----------------------------------------------------------------------------

# One heartbeat per default process group, which is torch's process-wide state; it ends with the
# group.
_HEARTBEATS: WeakKeyDictionary[Any, Heartbeat] = WeakKeyDictionary()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankEnv:
    """Start torch.distributed if it is not running, and return this rank's place.

    Collective: all ranks of the launcher must call it. Raises MeshError, naming the missing ranks,
    when they do not arrive in time.

    Args:
        dist_backend: default: the accelerator's own (NCCL for CUDA) with gloo for the host, or
            gloo alone. NCCL (``"nccl"``, ``"cpu:gloo,cuda:nccl"``) becomes gloo, with a warning, if
            torch is built for CPUs only, since scripts for GPUs request it. Otherwise a host on
            which torch sees no GPU is refused.
        distributed_port: rank 0's port if the launcher has set none.
        timeout: seconds or timedelta, bounds the start and every collective.
        init_method: ``env://``, ``tcp://host:port`` or ``file://...``, instead of the launcher's.
        dist_init_required: False raises MeshError if torch.distributed is not running.
        rank, world_size: instead of the launcher's variables.
        auto_mpi_discovery, verbose: accepted for compatibility: MPI's variables are always read,
            and nothing is printed.
    """
    env = read_rank_env()
    if rank >= 0 or world_size >= 0:
        env = RankEnv(max(rank, 0), max(world_size, 1), env.local_rank, env.local_world_size, True)
    if is_distributed():
        return RankEnv(dist.get_rank(), dist.get_world_size(), env.local_rank, env.local_world_size, env.launched)
    if dist_init_required is False:
        raise MeshError(
            "torch.distributed is not initialized, but dist_init_required=False requires it",
            fix="Call init_distributed first.",
        )
    limit = (
        timeout
        if isinstance(timeout, datetime.timedelta)
        else datetime.timedelta(seconds=timeout or DEFAULT_TIMEOUT_SECONDS)
    )
    kind = accelerator()
    backend = _backend(dist_backend, kind, env)
    why = "given" if dist_backend else f"{kind} is available" if kind else "CUDA is not available"
    log.debug("rank %d of %d: backend %s (%s)", env.rank, env.world_size, backend, why)
    if kind is not None:
        torch_module(kind).set_device(own_device(env.local_rank))
    try:
        if not env.launched:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=limit)  # type: ignore[attr-defined]
        else:
            method = init_method or meeting_place(distributed_port)
            store = arrive(method, env, limit)
            dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise rendezvous_error(env, error, []) from error
    # torch would warn about a group that still exists
    atexit.register(destroy_distributed)
    return env


def _backend(given: str | None, kind: str | None, env: RankEnv) -> str:
    """Return the backend for this rank, on whose host the accelerator is ``kind``.

    Raises MeshError if torch lacks the ``given`` backend, and for NCCL without a GPU: this rank
    alone would choose gloo, and wait for the ranks that did not.
    """
    if given is None:
        return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}" if kind else "gloo"
    where, names = "init_distributed(dist_backend)", [part.rpartition(":")[2] for part in given.lower().split(",")]
    if "nccl" in names and kind is None:
        if torch.version.cuda is not None or torch.version.hip is not None:
            raise MeshError(
                "no GPU is visible to torch on this host: the driver, the container or CUDA_VISIBLE_DEVICES hides it",
                where=where,
                got=repr(given),
                fix="Fix that, or omit dist_backend or set it to gloo to train on the CPU.",
            )
        if env.local_rank == 0:
            log.warning("%s=%r needs GPUs, but this torch supports only CPUs: the ranks use gloo", where, given)
        return "gloo"
    for name in names:
        if not dist.is_backend_available(name):
            fix = "Omit dist_backend: it is chosen from the available devices."
            raise MeshError("this torch was built without that backend", where=where, got=repr(name), fix=fix)
    return given


def expects_ranks() -> bool:
    """Return whether torch.distributed should run: under a launcher, and in a process that has
    imported deepspeed, because scripts and libraries ask for the rank after DeepSpeed has started
    it. Another process without a launcher trains alone without it."""
    return read_rank_env().launched or is_distributed() or "deepspeed" in sys.modules


def destroy_distributed() -> None:
    """Stop the heartbeat's thread, then destroy the process group. Safe to call twice."""
    if is_distributed():
        heartbeat = _HEARTBEATS.pop(dist.group.WORLD, None)
        if heartbeat is not None:
            heartbeat.close()
        dist.destroy_process_group()


def is_distributed() -> bool:
    """Return whether this process is a member of a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: Any = None) -> int:
    """Return the number of ranks of the world or of ``group``; 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world's size; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def agree_on(numbers: Sequence[float]) -> list[float]:
    """Return rank 0's ``numbers`` on every rank, which must pass equally many.

    Collective over the world.
    """
    if world_size() == 1:
        return list(numbers)
    device = "cpu" if moves_host_tensors(None) else own_device()
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.broadcast(values, 0)
    return [float(value) for value in values.tolist()]


def world_heartbeat() -> Heartbeat:
    """Return the heartbeat of the running process group, or of a single rank without one."""
    if not is_distributed():
        return Heartbeat(None, 0, 1)
    group = dist.group.WORLD
    if group not in _HEARTBEATS:
        _HEARTBEATS[group] = Heartbeat(_default_store(), dist.get_rank(), dist.get_world_size())
    return _HEARTBEATS[group]


def open_exit_notice() -> ExitNotice:
    """Return the exit notice of the ranks of the running process group."""
    if not is_distributed() or dist.get_world_size() == 1:
        return ExitNotice()
    return ExitNotice(_default_store(), dist.get_world_size())


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


# --- arriving -------------------------------------------------------------------------------------

KEY = "zero_trial/arrived/"
CHECKS_PER_SECOND = 500  # of all ranks together, at the store
# rank 0, whose store ends with it, stays this long so that the others can ask who is missing
LINGER_SECONDS = 1.0


def arrive(method: str, env: RankEnv, limit: datetime.timedelta) -> Any:
    """Sign in at ``method``, and return the store once all ranks have. Long waits are logged.

    Raises a MeshError that names the ranks that have not signed in within ``limit``.

    Collective. Only rank 0 waits for every rank's key; the others wait for rank 0's key, which is
    set last: the store serves N ranks with N keys, not N².
    """
    done, opened, place = threading.Event(), list[Any](), own_store_address(method)

    def announce() -> None:
        waited, pause = 0.0, _LONG_WAIT_SECONDS
        while not done.wait(pause):
            waited, pause = waited + pause, _LINES_SECONDS
            late = names(missing_ranks(opened[0], env.world_size)) if opened and env.rank == 0 else ""
            where = (not opened and place and _unreachable(*place)) or (f"{place[0]}:{place[1]}" if place else method)
            text = f"rank {env.rank} of {env.world_size} has waited %.0f s of %.0f (comm_timeout_seconds) for %s at %s"
            log.warning(text, waited, limit.total_seconds(), late or "the other ranks", where)

    threading.Thread(target=announce, daemon=True).start()
    try:
        return _arrive(method, env, limit, opened)
    finally:
        done.set()


def _arrive(method: str, env: RankEnv, limit: datetime.timedelta, opened: list[Any]) -> Any:
    try:
        store = open_store(method, env, limit)
    except (RuntimeError, ValueError) as error:
        place = own_store_address(method)
        raise rendezvous_error(env, error, [0] if env.rank and place else [], place and _unreachable(*place)) from error
    try:
        opened.append(store)
        store.set(f"{KEY}{env.rank}", "1")
        if env.rank == 0:
            keys = [f"{KEY}{rank}" for rank in range(env.world_size)]
            _wait_for(lambda: store.check(keys), env.world_size, limit)
            store.set(f"{KEY}all", "1")
        else:
            _wait_for(lambda: store.check([f"{KEY}all"]), env.world_size, limit)
    except RuntimeError as error:
        missing = missing_ranks(store, env.world_size)
        if env.rank == 0:
            time.sleep(LINGER_SECONDS)
        raise rendezvous_error(env, error, missing) from error
    return store


def _wait_for(ready: Callable[[], Any], world_size: int, limit: datetime.timedelta) -> None:
    """Poll until ``ready`` returns True. Raises RuntimeError after ``limit``.

    A wait in the store would print the library's own lines when it times out, and could not be
    interrupted.
    """
    deadline, nap = time.monotonic() + limit.total_seconds(), 0.002
    while not ready():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"waited {limit.total_seconds():g} s")
        time.sleep(nap)
        nap = min(2 * nap, max(0.1, world_size / CHECKS_PER_SECOND))


def open_store(method: str, env: RankEnv, limit: datetime.timedelta) -> Any:
    """Open the store of the meeting place ``method``.

    Waits only for the rank that hosts the store.

    Raises RuntimeError or ValueError if it cannot be opened.
    """
    address = own_store_address(method)
    if address is None:
        store, _, _ = next(rendezvous(method, env.rank, env.world_size, timeout=limit))
        return store
    host, port = address
    if env.rank != 0:  # torch's own client waits twice as long, and prints a stack for each try
        _wait_for(lambda: _unreachable(host, port) is None, env.world_size, limit)
    return TCPStore(
        host, port, env.world_size, env.rank == 0, limit, wait_for_workers=False, multi_tenant=True, use_libuv=True
    )


def missing_ranks(store: Any, world_size: int) -> list[int]:
    """Return the ranks that have not signed in; none if the store is gone."""
    try:
        return [rank for rank in range(world_size) if not store.check([f"{KEY}{rank}"])]
    except RuntimeError:
        return []


def rendezvous_error(env: RankEnv, error: Exception, missing: list[int], got: str | None = None) -> MeshError:
    """Return the MeshError of a rank that has not found the others."""
    absent = names(missing)
    alone = "RANK" in os.environ and "LOCAL_RANK" not in os.environ  # no launcher has set it
    return MeshError(
        f"the ranks did not find each other: {f'{absent} never arrived' if missing else printable(error)}",
        where=f"rank {env.rank} of {env.world_size}, init_distributed",
        got=got,
        fix=f"Check that {absent or 'every rank'} was started, and that MASTER_ADDR and MASTER_PORT are reachable from its host."
        + (" To train on one process, unset RANK and WORLD_SIZE." if alone else ""),
    )


def _unreachable(host: str, port: int) -> str | None:
    """Return why no connection to the address can be made; None if one can."""
    try:
        socket.create_connection((host, port), 3.0).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return None


# --- failing together -----------------------------------------------------------------------------


def fail_together(
    world: AxisComm, act: Callable[[], T], label: str, others: Callable[[str], ZeroTrialError] | None = None
) -> T:
    """Return what ``act`` returns on this rank; if it fails on any rank, raise on every rank.

    Collective over ``world``.

    Every rank raises a CheckpointError with the first fault. With ``others`` a rank that failed
    raises its own error instead, and the other ranks raise ``others(fault)``, which names the rank
    and has the exit code of that rank's error. An error that is not a ZeroTrialError or OSError is
    a mistake in a program: its own rank raises it unchanged. A MeshError passes at once, because
    the ranks can no longer be asked. A rank that failed and cannot notify the others, because one
    has ended, raises its own error.
    """
    try:
        result = act()
    except MeshError:
        raise
    except Exception as error:
        known = isinstance(error, ZeroTrialError | OSError)
        fault = str(error) if known else f"{type(error).__name__}: {error}"
        if known and others is None:
            raise_together(world, fault, label)
        try:
            world.gather_json([f"rank {world.ranks[world.index]}: {fault}", _exit_code(error)], label)
        except MeshError as gone:
            add_note(error, f"The other ranks could not be notified: {gone}")
        raise
    raise_together(world, None, label, others or CheckpointError)
    return result


def _exit_code(error: Exception) -> int:
    """Return the exit code of a rank that ends with ``error``."""
    known = known_fault(error) or error
    return known.exit_code if isinstance(known, ZeroTrialError) else ExitStatus.TRIAL_FAULT


def raise_together(
    world: AxisComm, fault: str | None, label: str, error: Callable[[str], ZeroTrialError] = CheckpointError
) -> None:
    """Raise the first rank's fault, or this rank's if a peer is gone. Collective over ``world``."""
    try:
        mine = None if fault is None else [fault, None]
        faults = [found for found in world.gather_json(mine, label) if found is not None]
    except MeshError as gone:
        if fault is None:
            raise
        raise error(fault) from gone
    if faults:
        text, exit_code = faults[0]
        raise error(text).ending_with(exit_code)


# --- leaving early, together ----------------------------------------------------------------------

PERIOD_SECONDS = 0.5
GRACE_SECONDS = 3.0  # for a rank that is about to end anyway
CLAIM_KEY = "zero_trial/claim/"


class ExitNotice:
    """An agreed early end: what the ranks have claimed, by way of the process group's ``store``
    (None for a world of one).

    rank 1   claim("early exit") -> True      a key in the store, so it is seen before rank 1's
                                              connections close
    rank 0   in a collective with rank 1      its watch sees the key within a second and ends the
                                              process in order
    rank 2   raises for the same reason       claim("early exit") -> False: another rank has claimed
                                              it
    """

    def __init__(self, store: Any = None, world_size: int = 1) -> None:
        self._store = store
        self._own: set[str] = set()
        self._period = max(PERIOD_SECONDS, world_size / CHECKS_PER_SECOND)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, name: str) -> bool:
        """Claim ``name``; return whether this rank is the first.

        If the store is gone, each rank is the first.
        """
        if name in self._own:
            return False
        self._own.add(name)
        if self._store is None:
            return True
        try:
            return int(self._store.add(CLAIM_KEY + name, 1)) == 1
        except RuntimeError:
            return True

    def claimed(self, name: str) -> bool:
        """Return whether any rank has claimed ``name``."""
        if name in self._own:
            return True
        try:
            return self._store is not None and bool(self._store.check([CLAIM_KEY + name]))
        except RuntimeError:  # the store's process is gone
            return False

    def watch(self, name: str, leave: Callable[[], None] | None = None) -> None:
        """Call ``leave()``, on a thread, soon after another rank has claimed ``name``.

        By default it ends this process with code 0: the main thread may be stuck in a collective
        that never ends.
        """
        if self._store is None or self._thread is not None:
            return
        arguments = (name, leave if leave is not None else _leave_process)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="zero_trial-exit", daemon=True)
        self._thread.start()

    def _watch(self, name: str, leave: Callable[[], None]) -> None:
        while not self._stop.wait(self._period):
            if name not in self._own and self.claimed(name):
                if not self._stop.wait(GRACE_SECONDS):
                    leave()
                return

    def close(self) -> None:
        """Stop watching. Before the process group is destroyed, which takes the store with it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None


def _leave_process() -> None:
    """End this process at once with code 0, after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
