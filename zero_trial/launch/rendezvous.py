"""Where the ranks of a run meet: how many hosts, which of them this is, and the address at which they find each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.launch.slurm import expand_hosts

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Rendezvous:
    """``hosts`` is a number, or for an elastic run ``least:most``; ``endpoint`` (host:port) hands the ordering of hosts to torch's c10d rendezvous,
    otherwise host ``node_rank`` meets the others at ``master_addr``:``master_port``. One host needs neither: it picks a free port."""

    hosts: str = "1"
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    endpoint: str = ""
    run_id: str = "zero_trial"

    @property
    def single(self) -> bool:
        """Whether all ranks are on this host."""
        return self.hosts in ("1", "1:1") and not self.endpoint

    @property
    def leads(self) -> bool:
        """Whether this host holds rank 0, as far as is known before the hosts have met."""
        return self.node_rank == 0

    @property
    def meeting_host(self) -> str:
        """The host part of the address at which the hosts meet; empty on one host."""
        return (self.endpoint or self.master_addr).rpartition(":")[0] if self.endpoint else self.master_addr

    def agent_arguments(self) -> list[str]:
        """The arguments of torch.distributed.run that say this."""
        if self.single:
            # A host name that does not resolve must not matter to a run that never leaves the machine.
            return ["--standalone", "--local-addr", "127.0.0.1"]
        if self.endpoint:
            return [
                *("--nnodes", self.hosts, "--node-rank", str(self.node_rank), "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id),
            ]
        return [
            *("--nnodes", self.hosts, "--node-rank", str(self.node_rank)),
            *("--master-addr", self.master_addr, "--master-port", str(self.master_port)),
        ]


def from_slurm(env: Mapping[str, str], port: int = DEFAULT_PORT) -> Rendezvous | None:
    """The rendezvous that SLURM's variables describe, for one task per host; None outside a SLURM step or on one host.

    The first host of the step's list is where they meet. Raises ConfigError when the step runs several tasks per host: the ranks of a host are
    started here, not by srun.
    """
    if "SLURM_JOB_ID" not in env or "SLURM_NODEID" not in env:
        return None
    hosts = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or env.get("SLURM_JOB_NUM_NODES") or "1")
    if hosts == 1:
        return None
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or hosts)
    if tasks != hosts:
        raise ConfigError(
            "this SLURM step starts several tasks per host, but one zero-trial per host starts all ranks of its host",
            where="SLURM_NTASKS",
            got=tasks,
            expected=f"{hosts} (one per host)",
            fix="Use srun --ntasks-per-node=1.",
        )
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    return Rendezvous(
        hosts=str(hosts),
        node_rank=int(env["SLURM_NODEID"]),
        master_addr=env.get("MASTER_ADDR") or expand_hosts(nodelist)[0],
        master_port=int(env.get("MASTER_PORT") or port),
        run_id=env["SLURM_JOB_ID"],
    )
