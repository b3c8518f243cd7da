"""The embedded cluster: all verbs on one hub, with the agent, the clock and the janitor that make them happen."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zero_trial.master.agent.agent import GRACE_SECONDS, Agent, Workers
from zero_trial.master.agent.devices import Devices
from zero_trial.master.core.accounts import Accounts
from zero_trial.master.core.checkpoints import Checkpoints
from zero_trial.master.core.experiments import Experiments
from zero_trial.master.core.hub import Hub
from zero_trial.master.core.janitor import Janitor
from zero_trial.master.core.machine import Machine
from zero_trial.master.core.tasks import Tasks
from zero_trial.master.core.trials import Trials
from zero_trial.master.home import Home

log = logging.getLogger(__name__)


class EmbeddedCluster:
    """See verbs.Cluster. ``begin`` once the address is known, ``close`` at the end."""

    def __init__(self, hub: Hub, workers: Workers) -> None:
        self.hub = hub
        hub.workers = workers
        self.janitor = Janitor(hub)
        self.experiments = Experiments(hub)
        self.trials = Trials(hub)
        self.tasks = Tasks(hub)
        self.checkpoints = Checkpoints(hub)
        self.machine = Machine(hub)
        self.accounts = Accounts(hub)

    @classmethod
    def on(
        cls, home: Home, devices: Devices, *, host_env: Mapping[str, str], grace: float = GRACE_SECONDS
    ) -> EmbeddedCluster:
        """The cluster of this machine. ``home`` is prepared and locked; ``host_env``: what trials may see of the environment."""
        hub = Hub(home, devices)
        agent = Agent(
            home,
            on_started=hub.on_started,
            on_exited=hub.on_exited,
            on_error=log.error,
            grace=grace,
            host_env=host_env,
        )
        return cls(hub, agent)

    def begin(self, master_url: str) -> None:
        """Take over what is there, give out slots, and look after what takes time in threads of their own."""
        self.hub.begin(master_url)
        self.hub.start_ticking()
        self.janitor.start()

    def stop_runs(self) -> None:
        """End all running trials, to go on under the next master; waits until they are gone."""
        self.hub.stop_runs()

    def close(self) -> None:
        """Let go; trials that run go on running."""
        self.hub.workers.close()
        self.janitor.close()
        self.hub.close()
