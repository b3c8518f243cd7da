"""Free TCP ports, asked of the kernel, for the programs of one allocation."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

GAP = 16
"""Between the two ports of the training processes, as the harness has it: both are moved by the lowest slot."""

_TRIES = 200


@dataclass(frozen=True)
class Ports:
    """The four ports that the harness reads from its environment."""

    c10d: int
    comm_1: int
    ssh: int

    @property
    def comm_2(self) -> int:
        return self.comm_1 + GAP

    def taken(self) -> set[int]:
        """All numbers that the allocation may use."""
        return {self.c10d, self.ssh, *range(self.comm_1, self.comm_2 + GAP)}


def free_ports(avoid: Set[int] = frozenset()) -> Ports:
    """Ports that are free now and are none of ``avoid`` (given out, but maybe not yet in use). Raises OSError if there are none."""
    with ExitStack() as held:
        for _ in range(_TRIES):
            ports = Ports(*(held.enter_context(_any_port()) for _ in range(3)))
            fits = ports.comm_2 + GAP < 65536 and len(ports.taken()) == 2 * GAP + 2
            if fits and not ports.taken() & avoid and _is_free(ports.comm_2):
                return ports
    raise OSError("no free TCP ports")


@contextmanager
def _any_port() -> Iterator[int]:
    """A port that is ours as long as the context is open."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
