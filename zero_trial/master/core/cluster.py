"""The embedded cluster: all verbs on one hub, with the agent, the clock and the janitor that make them happen."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zero_trial.master.agent.agent import GRACE_SECONDS, Agent, AgentApi
from zero_trial.master.agent.devices import SlotDevices
from zero_trial.master.core.accounts import AccountService
from zero_trial.master.core.checkpoints import CheckpointService
from zero_trial.master.core.experiments import ExperimentService
from zero_trial.master.core.garbage import GarbageCollector
from zero_trial.master.core.machine import MachineService
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.tasks import TaskService
from zero_trial.master.core.trials import TrialService
from zero_trial.master.directory import MasterDirectory

log = logging.getLogger(__name__)


class Master:
    """See verbs.Cluster. ``begin`` once the address is known, ``close`` at the end."""

    def __init__(self, hub: MasterState, workers: AgentApi) -> None:
        self.hub = hub
        hub.workers = workers
        self.janitor = GarbageCollector(hub)
        self.experiments = ExperimentService(hub)
        self.trials = TrialService(hub)
        self.tasks = TaskService(hub)
        self.checkpoints = CheckpointService(hub)
        self.machine = MachineService(hub)
        self.accounts = AccountService(hub)

    @classmethod
    def on(
        cls, home: MasterDirectory, devices: SlotDevices, *, host_env: Mapping[str, str], grace: float = GRACE_SECONDS
    ) -> Master:
        """The cluster of this machine. ``home`` is prepared and locked; ``host_env``: what trials may see of the environment."""
        hub = MasterState(home, devices)
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
