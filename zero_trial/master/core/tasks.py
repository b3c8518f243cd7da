"""The verbs of running allocations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from zero_trial.master import logs
from zero_trial.master.core import lifecycle
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import transaction
from zero_trial.master.core.trials import read_logs
from zero_trial.master.errors import Invalid, NotFound
from zero_trial.master.records import (
    EARLIEST,
    LATEST,
    Allocation,
    AllocationState,
    Json,
    LogLine,
    LogQuery,
    RendezvousInfo,
    Task,
    Trial,
)
from zero_trial.master.store import experiments, trials

_LOOK_SECONDS = 1.0  # a waiting request looks again at least so often


class TaskService:
    """What a running allocation asks for."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def task(self, task_id: str) -> Task:
        """NotFound if there is none."""
        return self._task(self._trial(task_id))

    def tasks(self) -> list[Task]:
        """Those with an allocation that has not ended."""
        with self._state.database.reading() as connection:
            ids = dict.fromkeys(run.trial_id for run in trials.allocations(connection))
            found = [trials.get(connection, trial_id) for trial_id in ids]
        return [self._task(trial) for trial in found if trial is not None]

    def _task(self, trial: Trial) -> Task:
        with self._state.database.reading() as connection:
            experiment = experiments.get(connection, trial.experiment_id, derived=False)
            runs = trials.allocations(connection, trial_id=trial.id)
        if experiment is None:
            raise NotFound(f"experiment {trial.experiment_id} not found")
        return Task(
            id=trial.task_id,
            trial_id=trial.id,
            experiment_id=trial.experiment_id,
            name=f"Trial {trial.id} (Experiment {trial.experiment_id})",
            owner=experiment.owner,
            started=trial.created,
            ended=trial.ended,
            allocations=tuple(runs),
        )

    def allocation(self, allocation_id: str) -> Allocation:
        """NotFound if there is none."""
        with self._state.database.reading() as connection:
            found = trials.allocation(connection, allocation_id)
        if found is None:
            raise NotFound(f"allocation {allocation_id} not found")
        return found

    def context(self, task_id: str) -> bytes:
        """The context directory of the task's experiment as .tar.gz."""
        trial = self._trial(task_id)
        with self._state.database.reading() as connection:
            return experiments.context(connection, trial.experiment_id) or b""

    def rendezvous(self, allocation_id: str, resources_id: str) -> RendezvousInfo:
        """Where the ranks meet. NotFound for other resources than its own."""
        found = self.allocation(allocation_id)
        if found.resources_id != resources_id:
            raise NotFound(f"resources {resources_id} not found")
        return RendezvousInfo(("127.0.0.1",), 0, (len(found.slots),))

    def logs(self, task_id: str, query: LogQuery) -> Iterator[LogLine | None]:
        """As the trial's logs."""
        return read_logs(self._state, self._trial(task_id), query)

    def _trial(self, task_id: str) -> Trial:
        with self._state.database.reading() as connection:
            found = trials.of_task(connection, task_id)
        if found is None:
            raise NotFound(f"task {task_id} not found")
        return found

    # -- what an allocation says and waits for

    def preemption_signal(self, allocation_id: str, timeout: float) -> bool:
        """Wait until the allocation should stop, at most ``timeout`` seconds (0: do not wait); True if it should."""
        until = time.monotonic() + timeout
        while True:
            with self._state.signaled:  # held while looking, so that no signal comes between the look and the wait
                found = self.allocation(allocation_id)
                left = until - time.monotonic()
                if (
                    found.preempt
                    or found.state is AllocationState.TERMINATED
                    or left <= 0
                    or self._state.closed.is_set()
                ):
                    return found.preempt
                self._state.signaled.wait(min(left, _LOOK_SECONDS))

    def ack_preemption(self, allocation_id: str) -> None:
        """It will end now because it was asked to."""
        with transaction(self._state) as tx:
            run = trials.allocation(tx.connection, allocation_id)
            if run is None:
                raise NotFound(f"allocation {allocation_id} not found")
            newest = trials.newest_allocation(tx.connection, run.trial_id)
            if newest is not None and newest.id == run.id:
                tx.trial(run.trial_id, lifecycle.Acked())

    def accelerator_data(self, allocation_id: str, data: Json) -> None:
        """What the harness saw of the accelerators."""
        self._set(allocation_id, accelerators=dict(data))

    def set_ready(self, allocation_id: str) -> None:
        """The harness says that its processes run."""
        self._set(allocation_id, ready=1)

    def _set(self, allocation_id: str, **columns: object) -> None:
        with transaction(self._state) as tx:
            if trials.allocation(tx.connection, allocation_id) is None:
                raise NotFound(f"allocation {allocation_id} not found")
            trials.change_allocation(tx.connection, allocation_id, **columns)

    def append_logs(self, task_id: str, lines: Sequence[Json]) -> None:
        """Lines sent over HTTP (``POST /task/logs``) instead of written to the pipe: dicts with log, and maybe timestamp, level, rankId, stdtype."""
        trial = self._trial(task_id)
        path = logs.path_of(self._state.directory.trial_logs(trial.id), trial.run_id)
        logs.append(path, [self._entry(line) for line in lines])

    def _entry(self, line: Json) -> bytes:
        more: dict[str, str | int] = {}
        if line.get("level"):
            more["l"] = str(line["level"]).removeprefix("LOG_LEVEL_")
        if line.get("rankId") is not None:
            try:
                more["r"] = int(line["rankId"])
            except (TypeError, ValueError, OverflowError) as error:
                raise Invalid("not a whole number", where="rankId", got=repr(line["rankId"])[:60]) from error
        stamp = line.get("timestamp")
        try:
            at = datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp() if stamp else self._state.clock()
        except (ValueError, OverflowError) as error:
            raise Invalid("not a time", where="timestamp", got=repr(stamp)[:60]) from error
        if not EARLIEST <= at <= LATEST:
            raise Invalid("not a time in the years 1 to 9999 of UTC", where="timestamp", got=repr(stamp)[:60])
        return logs.entry(str(line.get("log", "")).rstrip("\n"), at, str(line.get("stdtype") or "stdout"), **more)
