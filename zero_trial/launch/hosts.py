"""The hosts of a run: the ranks per host and the rendezvous, from the command line, a hostfile or
SLURM; and this host's cores, GPUs, network interface and names. Does not import torch."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zero_trial.errors import ConfigError
from zero_trial.util.memory import RANK_MALLOC, usable_cores, visible_gpus

DEFAULT_PORT = 29500

Slots = dict[str, list[int]]
"""Slot numbers by host, in the order of the hostfile."""


@dataclass(frozen=True)
class RendezvousSpec:
    """The rendezvous of a run's hosts.

    ``hosts`` is a number, or for an elastic run ``least:most``. With ``endpoint`` (host:port),
    torch's c10d rendezvous chooses the order of hosts; without it, host ``node_rank`` meets the
    others at ``master_addr``:``master_port``. A single host needs neither and picks a free port.
    """

    hosts: str = "1"
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    endpoint: str = ""
    run_id: str = "zero_trial"

    @property
    def single(self) -> bool:
        """Return whether all ranks are on this host."""
        return self.hosts in ("1", "1:1") and not self.endpoint

    @property
    def leads(self) -> bool:
        """Return whether this host holds rank 0, as far as known before the rendezvous."""
        return self.node_rank == 0

    @property
    def meeting_host(self) -> str:
        """Return the host part of the rendezvous address; empty on one host."""
        return (self.endpoint or self.master_addr).rpartition(":")[0] if self.endpoint else self.master_addr


@dataclass(frozen=True)
class HostPlan:
    """One host's part of a run. ``visible``: the GPUs chosen by the user; empty means all."""

    host: str
    ranks: int
    rendezvous: RendezvousSpec
    visible: tuple[int, ...] = ()

    @property
    def node_rank(self) -> int:
        return self.rendezvous.node_rank


@dataclass(frozen=True)
class PlacementRequest:
    """The user's options; None and "" mean not set. ``hostfile`` is the file's text."""

    slots: int | None = None
    hostfile: str | None = None
    hostfile_name: str = ""
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    nnodes: str = ""
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = "zero_trial"
    spread: bool = False  # start the other hosts from here


@dataclass(frozen=True)
class HostPlacement:
    """``own``: this host's plan, or None if this host only starts others. ``others``: the plans of
    the hosts to start from this host."""

    own: HostPlan | None
    others: tuple[HostPlan, ...] = ()


def place(
    request: PlacementRequest, env: Mapping[str, str], devices: HostDevices, names: Sequence[str], default_slots: int
) -> HostPlacement:
    """Return the placement. The first of these that is given decides: an explicit rendezvous, a
    hostfile, SLURM, this host alone.

    ``names`` are this host's names. Raises ConfigError if the options contradict each other or name
    something that does not exist.
    """
    port = request.master_port or DEFAULT_PORT
    slots = request.slots or default_slots
    explicit = _explicit(request, port)
    if explicit is not None:
        if request.include or request.exclude or request.hostfile is not None:
            raise ConfigError(
                "a hostfile and its filters cannot be combined with --nnodes or --rdzv-endpoint",
                fix="Use one or the other.",
            )
        return _alone(HostPlan("localhost", slots, explicit), devices)
    if request.hostfile is not None:
        return _from_hostfile(request, request.hostfile, port, names)
    if request.include or request.exclude:
        present: Slots = {"localhost": list(range(devices.gpus or devices.cores))}
        chosen = first_hosts(choose(present, request.include, request.exclude), None, request.slots)
        return _alone(plan_hosts(chosen, present, "", port)[0], devices)
    if request.num_nodes not in (None, 1):
        raise ConfigError(
            "several hosts need a hostfile", where="--num_nodes", got=request.num_nodes, fix="Pass --hostfile FILE."
        )
    slurm = from_slurm(env, port)
    return _alone(HostPlan("localhost", slots, slurm or RendezvousSpec()), devices)


def _alone(plan: HostPlan, devices: HostDevices) -> HostPlacement:
    check_slots(plan.ranks, devices, where="--slots")
    return HostPlacement(plan)


def _explicit(request: PlacementRequest, port: int) -> RendezvousSpec | None:
    """Return the rendezvous from torch.distributed.run's arguments, if they were given."""
    if request.rdzv_endpoint:
        return RendezvousSpec(
            request.nnodes or "1:1", request.node_rank or 0, endpoint=request.rdzv_endpoint, run_id=request.rdzv_id
        )
    if not request.nnodes or request.nnodes in ("1", "1:1"):
        return None
    if not request.nnodes.isdigit():
        raise ConfigError("a range of hosts needs --rdzv-endpoint", where="--nnodes", got=request.nnodes)
    if not request.master_addr:
        raise ConfigError(
            "several hosts need a rendezvous address",
            where="--master_addr",
            fix="Pass the first host's address, or --rdzv-endpoint.",
        )
    if request.node_rank is None or not 0 <= request.node_rank < int(request.nnodes):
        raise ConfigError(
            "the number of this host is missing or out of range",
            where="--node_rank",
            got=request.node_rank,
            expected=f"0 to {int(request.nnodes) - 1}",
        )
    return RendezvousSpec(request.nnodes, request.node_rank, request.master_addr, port)


def _from_hostfile(request: PlacementRequest, text: str, port: int, names: Sequence[str]) -> HostPlacement:
    present = parse_hostfile(text, request.hostfile_name or "hostfile")
    chosen = first_hosts(choose(present, request.include, request.exclude), request.num_nodes, request.slots)
    plans = plan_hosts(chosen, present, request.master_addr, port)
    if not request.spread:
        return HostPlacement(own_plan(plans, names, request.node_rank))
    own = next((plan for plan in plans if plan.host in names), None)
    return HostPlacement(own, tuple(plan for plan in plans if plan is not own))


def plan_hosts(
    chosen: Mapping[str, list[int]], present: Mapping[str, list[int]], master_addr: str, master_port: int
) -> list[HostPlan]:
    """Return one plan per chosen host, numbered in hostfile order. The hosts meet at
    ``master_addr``, by default the first host."""
    address = master_addr or next(iter(chosen))
    return [
        HostPlan(
            host,
            len(slots),
            RendezvousSpec(str(len(chosen)), number, address, master_port) if len(chosen) > 1 else RendezvousSpec(),
            tuple(slots) if list(slots) != list(present[host]) else (),
        )
        for number, (host, slots) in enumerate(chosen.items())
    ]


def own_plan(plans: Sequence[HostPlan], names: Sequence[str], node_rank: int | None) -> HostPlan:
    """Return this host's plan: by its number if given, else the plan whose host is in ``names``.

    Raises ConfigError unless exactly one plan matches.
    """
    if node_rank is not None:
        if not 0 <= node_rank < len(plans):
            raise ConfigError(
                "no host has this number", where="--node_rank", got=node_rank, expected=f"0 to {len(plans) - 1}"
            )
        return plans[node_rank]
    mine = [plan for plan in plans if plan.host in names]
    if len(mine) != 1:
        raise ConfigError(
            "this host is not in the hostfile" if not mine else "this host is in the hostfile under several names",
            where="hostfile",
            got=", ".join(names),
            expected=" or ".join(plan.host for plan in plans),
            fix="Pass this host's number with --node_rank, or start all hosts from here with --launcher ssh.",
        )
    return mine[0]


def ssh_command(plan: HostPlan, command: Sequence[str], cwd: str, exports: Mapping[str, str]) -> list[str]:
    """Return the ssh command for one host's part; ``-tt`` sends SIGHUP to it when ssh exits."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(exports.items())]
    line = " ".join(["exec env", *settings, shlex.join(command)]) if settings else "exec " + shlex.join(command)
    return ["ssh", "-tt", "-o", "BatchMode=yes", plan.host, f"cd {shlex.quote(cwd)} && {line}"]


def parse_exports(text: str, name: str = ".deepspeed_env") -> dict[str, str]:
    """Parse ``NAME=value`` lines, as in DeepSpeed's environment file, for the environment of the
    other hosts. Raises ConfigError for any other line."""
    exports = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(
                "not an environment line", where=f"{name}:{number}", got=repr(line), expected="NAME=value"
            )
        exports[key] = value
    return exports


_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def parse_hostfile(text: str, name: str = "hostfile") -> Slots:
    """Parse hosts and their slots from DeepSpeed's grammar, ``host slots=N`` per line; ``#`` starts
    a comment.

    Raises ConfigError, with the line, for any other syntax and for duplicate hosts.
    """
    hosts: Slots = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        where = f"{name}:{number}"
        if found is None:
            raise ConfigError("not a host line", where=where, got=repr(line), expected="host slots=N")
        host, slots = found[1], int(found[2])
        if host in hosts:
            raise ConfigError("the host appears twice", where=where, got=host, fix="Write one line with all its slots.")
        if slots < 1:
            raise ConfigError(
                "a host needs at least one slot", where=where, got=slots, fix="To exclude the host, remove the line."
            )
        hosts[host] = list(range(slots))
    if not hosts:
        raise ConfigError("the hostfile lists no host", where=name, expected="lines of the form: host slots=N")
    return hosts


def choose(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """Return the hosts and slots that remain after the filter.

    A filter is ``host1@host2:0,2``: whole hosts, or slots of a host. ``include`` keeps only the
    named ones, ``exclude`` drops them. Raises ConfigError if both are given, or if a named host or
    slot does not exist.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude cannot be combined", fix="Use only one of them.")
    if include:
        named = _parse_filter(include, "--include", hosts)
        return {host: named[host] for host in hosts if host in named}
    if exclude:
        dropped = _parse_filter(exclude, "--exclude", hosts)
        left = {host: [slot for slot in slots if slot not in dropped.get(host, ())] for host, slots in hosts.items()}
        left = {host: slots for host, slots in left.items() if slots}
        if not left:
            raise ConfigError("no host or slot is left", where="--exclude", got=exclude)
        return left
    return {host: list(slots) for host, slots in hosts.items()}


def first_hosts(hosts: Mapping[str, list[int]], num_nodes: int | None, num_slots: int | None) -> Slots:
    """Return the first ``num_nodes`` hosts, each with its first ``num_slots`` slots (None: all).
    Raises ConfigError if there are fewer."""
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise ConfigError(
            "the hostfile has fewer hosts", where="--num_nodes", got=num_nodes, expected=f"1 to {len(hosts)}"
        )
    chosen = dict(list(hosts.items())[:num_nodes])
    for host, slots in chosen.items():
        if num_slots is not None and not 1 <= num_slots <= len(slots):
            raise ConfigError(
                f"{host} has fewer slots", where="--num_gpus", got=num_slots, expected=f"1 to {len(slots)}"
            )
    return {host: slots[:num_slots] for host, slots in chosen.items()}


def _parse_filter(text: str, option: str, hosts: Mapping[str, list[int]]) -> Slots:
    """Parse ``a@b:0,2`` into slots by host, checked against ``hosts``."""
    named: Slots = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise ConfigError("no such host in the hostfile", where=option, got=repr(host), expected=" or ".join(hosts))
        if host in named:
            raise ConfigError("the host appears twice", where=option, got=host)
        named[host] = _slots(numbers, hosts[host], part, option) if colon else list(hosts[host])
    return named


def _slots(numbers: str, present: list[int], part: str, option: str) -> list[int]:
    items = numbers.split(",")
    if not all(item.isdigit() for item in items):
        raise ConfigError("not a list of slots", where=option, got=repr(part), expected="host:0,1")
    slots = sorted({int(item) for item in items})
    missing = [slot for slot in slots if slot not in present]
    if missing:
        raise ConfigError(
            "no such slot on this host", where=option, got=f"{part} (slot {missing[0]})", expected=f"0 to {present[-1]}"
        )
    return slots


def from_slurm(env: Mapping[str, str], port: int = DEFAULT_PORT) -> RendezvousSpec | None:
    """Return the rendezvous from SLURM's variables, for one task per host; None outside a SLURM
    step or on a single host.

    The hosts meet at the first host of the step's list. Raises ConfigError if the step runs several
    tasks per host: the launcher, not srun, starts the ranks of a host.
    """
    if "SLURM_JOB_ID" not in env or "SLURM_NODEID" not in env:
        return None
    hosts = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or env.get("SLURM_JOB_NUM_NODES") or "1")
    if hosts == 1:
        return None
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or hosts)
    if tasks != hosts:
        raise ConfigError(
            "this SLURM step starts several tasks per host, but a single zero-trial process per host starts all ranks of its host",
            where="SLURM_NTASKS",
            got=tasks,
            expected=f"{hosts} (one per host)",
            fix="Use srun --ntasks-per-node=1.",
        )
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    return RendezvousSpec(
        hosts=str(hosts),
        node_rank=int(env["SLURM_NODEID"]),
        master_addr=env.get("MASTER_ADDR") or first_host(nodelist),
        master_port=int(env.get("MASTER_PORT") or port),
        run_id=env["SLURM_JOB_ID"],
    )


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's list: gpu08x for ``gpu[08-10,12]x,login``."""
    found = re.match(r"(?:[^,\[\]]|\[\d[^\[\]]*\])+(?=,|$)", nodelist)
    if found is None:
        raise ConfigError(
            "this is not a list of hosts",
            where="SLURM_NODELIST",
            got=repr(nodelist[:80]),
            expected="for example gpu[01-03],login",
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


# --- this host ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostDevices:
    """The CPU cores and GPUs that are available to this process."""

    cores: int
    gpus: int


def count_devices(env: Mapping[str, str], device_files: Path = Path("/dev")) -> HostDevices:
    """Count the cores, and the GPUs that CUDA_VISIBLE_DEVICES makes visible."""
    return HostDevices(usable_cores(), len(visible_gpus(env, device_files)))


def check_slots(slots: int, devices: HostDevices, where: str = "slots") -> None:
    """Raise ConfigError if there are more ranks than GPUs; without GPUs, ranks share the cores."""
    if slots < 1:
        raise ConfigError("a run needs at least one rank", where=where, got=slots, expected="a positive integer")
    if devices.gpus and slots > devices.gpus:
        raise ConfigError(
            "more ranks than GPUs",
            where=where,
            got=slots,
            expected=f"at most {devices.gpus} (this host's GPUs)",
            fix=f"Use --slots {devices.gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )


def threads_per_rank(slots: int, devices: HostDevices) -> int:
    """Return the number of threads per rank, so that all ranks together use each core once."""
    return max(1, devices.cores // slots)


def loopback() -> str:
    """Return the name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_towards(host: str) -> str | None:
    """Return the interface for packets to ``host``, or the interface with that address; None if
    there is no route or the interface cannot be determined."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: UDP connect only looks up the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    known = psutil.net_if_addrs().items()
    return next((name for name, found in known if address in (each.address for each in found)), None)


def rank_environment(env: Mapping[str, str], *, threads: int, interface: str | None) -> dict[str, str]:
    """Return ``env`` with settings for ranks: number of threads, gloo's interface, an allocator
    that keeps its pages, unbuffered output, and a quiet torch.distributed.run.

    Drops variables that would make this process a rank of an outer run, because the agent sets its
    own.
    """
    inherited = {
        name: value for name, value in env.items() if name not in _OUTER_RUN and not name.startswith("TORCHELASTIC_")
    }
    defaults = RANK_MALLOC | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if interface:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    return {**defaults, **inherited}


_OUTER_RUN = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    ]
)


def host_names() -> list[str]:
    """Return the names that a hostfile may use for this host."""
    name = socket.gethostname()
    return list(dict.fromkeys([name, name.partition(".")[0], socket.getfqdn(), "localhost", "127.0.0.1"]))


def host_environment(plan: HostPlan, devices: HostDevices) -> dict[str, str]:
    """Return the environment of a host's ranks: threads, gloo's interface, chosen GPUs."""
    threads = threads_per_rank(plan.ranks, devices)
    where = plan.rendezvous  # gloo's interface: loopback on one host, else the one toward the rendezvous
    interface = loopback() if where.single else interface_towards(where.meeting_host)
    env = rank_environment(os.environ, threads=threads, interface=interface)
    if plan.visible:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.visible))
    return env
