"""Placement: how many ranks this host starts and where they meet the others, from what the command
line, a hostfile or SLURM say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.launch.environment import HostDevices, check_slots
from zero_trial.launch.hosts import (
    DEFAULT_PORT,
    HostPlan,
    RendezvousSpec,
    choose,
    first_hosts,
    from_slurm,
    localhost,
    own_plan,
    parse_hostfile,
    plan_hosts,
)


@dataclass(frozen=True)
class PlacementRequest:
    """What the user asked for; None and "" mean nothing. ``hostfile`` is the file's text,
    ``hostfile_name`` its name."""

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
    """``own`` is this host's plan, None when this host only starts others; ``others`` are the plans
    of the hosts to be started from here."""

    own: HostPlan | None
    others: tuple[HostPlan, ...] = ()


def place(
    request: PlacementRequest, env: Mapping[str, str], devices: HostDevices, names: Sequence[str], default_slots: int
) -> HostPlacement:
    """Return the placement. The first of these that was given decides: a meeting point, a hostfile,
    SLURM, this host alone.

    ``names`` are this host's names. Raises ConfigError where they contradict each other or ask for
    what does not exist.
    """
    port = request.master_port or DEFAULT_PORT
    slots = request.slots or default_slots
    explicit = _explicit(request, port)
    if explicit is not None:
        if request.include or request.exclude or request.hostfile is not None:
            raise ConfigError(
                "a hostfile and its filters do not go with --nnodes or --rdzv-endpoint", fix="Give one or the other."
            )
        return _alone(HostPlan("localhost", slots, explicit), devices)
    if request.hostfile is not None:
        return _from_hostfile(request, request.hostfile, port, names)
    if request.include or request.exclude:
        present = localhost(devices.gpus or devices.cores)
        chosen = first_hosts(choose(present, request.include, request.exclude), None, request.slots)
        return _alone(plan_hosts(chosen, present, "", port)[0], devices)
    if request.num_nodes not in (None, 1):
        raise ConfigError(
            "several hosts need a hostfile", where="--num_nodes", got=request.num_nodes, fix="Give --hostfile FILE."
        )
    slurm = from_slurm(env, port)
    return _alone(HostPlan("localhost", slots, slurm or RendezvousSpec()), devices)


def _alone(plan: HostPlan, devices: HostDevices) -> HostPlacement:
    check_slots(plan.ranks, devices, where="--slots")
    return HostPlacement(plan)


def _explicit(request: PlacementRequest, port: int) -> RendezvousSpec | None:
    """Return the rendezvous that the arguments of torch.distributed.run describe, if they were
    given."""
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
            "several hosts need an address to meet at",
            where="--master_addr",
            fix="Give the first host's address, or --rdzv-endpoint.",
        )
    if request.node_rank is None or not 0 <= request.node_rank < int(request.nnodes):
        raise ConfigError(
            "which of the hosts is this?",
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
