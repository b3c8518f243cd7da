"""The plan of a run over several hosts: which host starts how many ranks, as which number, and by which command. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.launch.hostfile import Slots
from zero_trial.launch.rendezvous import Rendezvous


@dataclass(frozen=True)
class HostPlan:
    """One host's part. ``visible`` are the GPUs it may use, when the user chose among them; empty means all."""

    host: str
    ranks: int
    rendezvous: Rendezvous
    visible: tuple[int, ...] = ()

    @property
    def node_rank(self) -> int:
        return self.rendezvous.node_rank


def plan_hosts(
    chosen: Mapping[str, list[int]], present: Mapping[str, list[int]], master_addr: str, master_port: int
) -> list[HostPlan]:
    """One plan per chosen host, numbered in hostfile order; they meet at the first one unless ``master_addr`` says otherwise."""
    address = master_addr or next(iter(chosen))
    return [
        HostPlan(
            host,
            len(slots),
            Rendezvous(str(len(chosen)), number, address, master_port) if len(chosen) > 1 else Rendezvous(),
            tuple(slots) if list(slots) != list(present[host]) else (),
        )
        for number, (host, slots) in enumerate(chosen.items())
    ]


def own_plan(plans: Sequence[HostPlan], names: Sequence[str], node_rank: int | None) -> HostPlan:
    """The plan of this host: by its number when given, else the one whose host is among this host's ``names``.

    Raises ConfigError when neither finds exactly one.
    """
    if node_rank is not None:
        if not 0 <= node_rank < len(plans):
            raise ConfigError(
                "there is no host of this number", where="--node_rank", got=node_rank, expected=f"0 to {len(plans) - 1}"
            )
        return plans[node_rank]
    mine = [plan for plan in plans if plan.host in names]
    if len(mine) != 1:
        raise ConfigError(
            "this host is not in the hostfile" if not mine else "this host is in the hostfile under several names",
            where="hostfile",
            got=", ".join(names),
            expected=" or ".join(plan.host for plan in plans),
            fix="Say which one it is with --node_rank, or start all of them from here with --launcher ssh.",
        )
    return mine[0]


def ssh_command(plan: HostPlan, command: Sequence[str], cwd: str, exports: Mapping[str, str]) -> list[str]:
    """The command that starts one host's part from here. ``-tt``: when ssh ends here, the other side is told (SIGHUP)."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(exports.items())]
    line = " ".join(["exec env", *settings, shlex.join(command)]) if settings else "exec " + shlex.join(command)
    return ["ssh", "-tt", "-o", "BatchMode=yes", plan.host, f"cd {shlex.quote(cwd)} && {line}"]


def parse_exports(text: str, name: str = ".deepspeed_env") -> dict[str, str]:
    """``NAME=value`` lines, as in DeepSpeed's environment file, which go to the other hosts. Raises ConfigError for any other line."""
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


def localhost(slots: int) -> Slots:
    """The hosts of a run without a hostfile."""
    return {"localhost": list(range(slots))}
