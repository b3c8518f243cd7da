"""The master's HTTP side as one thing: a server, the gate and all routes, for a cluster."""

from __future__ import annotations

from types import TracebackType

from zero_trial.master.api.connection import Patience
from zero_trial.master.api.gate import Gate
from zero_trial.master.api.router import Router
from zero_trial.master.api.routes import all_routes
from zero_trial.master.api.server import MAX_CONNECTIONS, HttpServer
from zero_trial.master.verbs import Cluster


class Server:
    """Answers for ``cluster`` on loopback from when it is made until ``close``; threads of its own do the work.

    ``port`` 0 takes a free one. Of the connections at most three quarters may wait in long polls and followed logs, so that there is always room for
    questions that are answered at once. Raises ZeroTrialError if the port is taken.
    """

    def __init__(
        self, cluster: Cluster, *, port: int = 0, connections: int = MAX_CONNECTIONS, patience: Patience | None = None
    ) -> None:
        self._http = HttpServer(port=port, limit=connections, patience=patience)
        self.port = self._http.port
        self.url = self._http.url
        self._http.start(Gate(cluster, Router(all_routes()), port=self.port, waits=max(1, connections * 3 // 4)))

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._http.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
