"""The rendezvous of a run: this host's ranks, and the address of the ranks' store.

Several hosts meet through torch's rendezvous, which numbers the hosts and creates a store. A single
host needs neither, and no torch."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import MeshError
from zero_trial.launch.hosts import RendezvousSpec

_JOIN_SECONDS = 900  # time limit for all hosts to join, as in torch.distributed.run


@dataclass
class Meeting:
    """One host's part of a run after the rendezvous.

    Attributes:
        ranks: the number of ranks on this host.
        first: the lowest rank on this host.
        world: the number of ranks on all hosts.
        host: this host's number, below ``hosts``.
        address, port: of the ranks' store.
        round: the number of earlier rendezvous in this run.
        reserved: reserves the port until rank 0 listens on it.
        store, handler: torch's, for several hosts; the handler also keeps the ranks' store alive.
    """

    ranks: int
    first: int
    world: int
    host: int
    hosts: int
    address: str
    port: int
    run_id: str
    round: int = 0
    reserved: socket.socket | None = None  # on one host
    store: Any = None
    handler: Any = None

    def place(self, local_rank: int) -> dict[str, str]:
        """Return a rank's environment variables, the same as torch.distributed.run's."""
        rank, world = str(self.first + local_rank), str(self.world)
        return {
            "RANK": rank,
            "WORLD_SIZE": world,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.round),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store is not None),
        }

    def has_changed(self) -> bool:
        """Return whether a host waits to join an elastic run; if so, the hosts must meet again."""
        if self.handler is None:
            return False
        from torch.distributed.elastic.rendezvous import RendezvousError

        with contextlib.suppress(RendezvousError):  # the ranks will report that a host is gone
            return bool(self.handler.num_nodes_waiting() > 0)
        return False

    def is_over(self) -> bool:
        """Record that this host's ranks are done, and return whether those of all hosts are.

        Until then the host with the store must not exit; an unreachable one has failed or is done.
        """
        if self.reserved is not None:
            self.reserved.close()
            return True
        with contextlib.suppress(RuntimeError):
            self.store.set(f"done/{self.host}", "")
            return bool(self.store.check([f"done/{host}" for host in range(self.hosts)]))
        return True


def meet(spec: RendezvousSpec, ranks: int, earlier: Meeting | None = None) -> Meeting:
    """Wait until all hosts have joined, and return this host's part. Raises MeshError.

    Args:
        ranks: the number of ranks on this host; may differ between hosts.
        earlier: the previous meeting of an elastic run.
    """
    if spec.single:
        reserved = socket.socket()
        # Another socket with SO_REUSEADDR can also bind a port that is bound but not listening.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        # Use the address: a run on a single machine must not depend on resolving its host name.
        address, port = reserved.getsockname()
        return Meeting(ranks, 0, ranks, 0, 1, address, port, spec.run_id, reserved=reserved)
    # importing torch takes a second, and a single host does not need it
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    backend = "c10d" if spec.endpoint else "static"
    endpoint = spec.endpoint or f"{spec.master_addr}:{spec.master_port}"
    least, _, most = spec.hosts.partition(":")
    own = 0 if earlier is None else earlier.round + 1  # a host that joins later starts at 0
    try:
        options: dict[str, Any] = {"rank": spec.node_rank, "timeout": _JOIN_SECONDS, "join_timeout": _JOIN_SECONDS}
        asked = RendezvousParameters(backend, endpoint, spec.run_id, int(least), int(most or least), **options)
        handler = get_rendezvous_handler(asked) if earlier is None else earlier.handler
        found = handler.next_rendezvous()
        place: Any = found.bootstrap_store_info
        if found.rank == 0:  # torch sets these only in the first round, and a host that joins later waits for them
            found.store.set(place.MASTER_ADDR_KEY, place.master_addr)
            found.store.set(place.MASTER_PORT_KEY, str(place.master_port))
        found.store.set(f"host/{found.rank}", f"{ranks} {own}")  # this round's own namespace in torch's store
        said = [found.store.get(f"host/{host}").split() for host in range(found.world_size)]
        counts, rounds = [int(count) for count, _ in said], [int(number) for _, number in said]
    except (RendezvousError, RuntimeError, OSError, ValueError) as error:
        raise MeshError(
            "the hosts of this run did not find each other",
            where=endpoint,
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            expected=f"{spec.hosts} hosts within {_JOIN_SECONDS} s",
            fix="Check that every host was started with the same address, and that all hosts can reach it.",
        ) from error
    return Meeting(
        ranks,
        sum(counts[: found.rank]),
        sum(counts),
        found.rank,
        found.world_size,
        place.master_addr,
        place.master_port,
        spec.run_id,
        max(rounds),
        store=found.store,
        handler=handler,
    )
