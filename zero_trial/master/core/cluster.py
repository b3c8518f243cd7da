"""The embedded cluster: all verbs on one hub, with the agent, the clock and the janitor that make them happen."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zero_trial.master.agent.agent import GRACE_SECONDS, Agent
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
    """See verbs.Cluster. ``home`` is prepared and locked; ``begin`` once the address is known, ``close`` at the end."""

    def __init__(
        self, home: Home, devices: Devices, *, host_env: Mapping[str, str], grace: float = GRACE_SECONDS
    ) -> None:
        self._hub = Hub(home, devices)
        self._agent = Agent(
            home,
            on_started=self._hub.on_started,
            on_exited=self._hub.on_exited,
            on_error=log.error,
            grace=grace,
            host_env=host_env,
        )
        self._hub.workers = self._agent
        self._janitor = Janitor(self._hub)
        self.experiments = Experiments(self._hub)
        self.trials = Trials(self._hub)
        self.tasks = Tasks(self._hub)
        self.checkpoints = Checkpoints(self._hub)
        self.machine = Machine(self._hub)
        self.accounts = Accounts(self._hub)

    def begin(self, master_url: str) -> None:
        """Take over what is there and start to give out slots."""
        self._hub.begin(master_url)
        self._hub.start_ticking()
        self._janitor.start()

    def stop_runs(self) -> None:
        """End all running trials, to go on under the next master; waits until they are gone."""
        self._hub.stop_runs()

    def close(self) -> None:
        """Let go; trials that run go on running."""
        self._agent.close()
        self._janitor.close()
        self._hub.close()
