"""The runs of trials in one change: queued, given slots, ordered to start, ended."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zero_trial.master import scheduler, tokens
from zero_trial.master.agent.order import StartOrder
from zero_trial.master.records import Allocation, AllocationState
from zero_trial.master.store import accounts, checkpoints, metrics, trials
from zero_trial.master.verbs import NotFound

if TYPE_CHECKING:
    from zero_trial.master.core.change import Change
    from zero_trial.master.core.hub import Hub


class Runs:
    """The allocations' part of one change."""

    def __init__(self, change: Change, hub: Hub) -> None:
        self._change = change
        self._hub = hub

    def request(self, trial_id: int) -> None:
        """A new run goes into the queue. It starts from the newest checkpoint, and what was reported after that is archived."""
        trial = self._change.trial_of(trial_id)
        saved = checkpoints.latest(self._change.connection, trial_id)
        steps = saved.steps_completed if saved else 0
        if trial.run_id:
            metrics.archive_after(self._change.connection, trial_id, steps)
        run_id = trial.run_id + 1
        trials.change(
            self._change.connection,
            trial_id,
            run_id=run_id,
            steps_completed=steps,
            latest_checkpoint=saved.uuid if saved else None,
            early_exit="",
            runner_state="",
        )
        name = f"{trial.task_id}.{run_id}"
        trials.add_allocation(
            self._change.connection,
            Allocation(
                id=name,
                trial_id=trial_id,
                experiment_id=trial.experiment_id,
                task_id=trial.task_id,
                run_id=run_id,
                state=AllocationState.QUEUED,
                slots=(),
                created=self._change.now,
                resources_id=str(uuid.uuid4()),
                container_id=str(uuid.uuid4()),
            ),
        )
        self._change.queue_changed = True

    def end(self, run: Allocation, code: int | None) -> None:
        """It holds nothing any more; ``code`` None: it never started."""
        trials.change_allocation(
            self._change.connection,
            run.id,
            state=AllocationState.TERMINATED,
            ended=self._change.now,
            exit_code=code,
            deadline=None,
        )
        accounts.drop_tokens_of(self._change.connection, run.id)
        self._change.queue_changed = self._change.signal = True

    def order_start(self, run: Allocation) -> None:
        """Order the start of an allocation that has its slots, with a token of its own."""
        trial = self._change.trial_of(run.trial_id)
        experiment = self._change.experiment_of(run.experiment_id)
        token = tokens.new_token()
        accounts.add_token(self._change.connection, tokens.digest(token), allocation_id=run.id)
        order = StartOrder(
            allocation=run,
            config=experiment.config,
            hparams=trial.hparams,
            seed=trial.seed,
            steps_completed=trial.steps_completed,
            latest_checkpoint=trial.latest_checkpoint or trial.warm_start_checkpoint,
            owner=experiment.owner,
            token=token,
            master_url=self._hub.master_url,
            cluster_id=self._hub.info.cluster_id,
            agent_id=self._hub.agent_id,
            visible_devices=self._hub.devices.visible(run.slots),
            threads=self._hub.devices.threads,
            has_hook=self._hub.context_of(self._change.connection, run.experiment_id).has_hook,
        )
        self._change.orders.append(lambda: self._hub.workers.start(order))

    def schedule(self) -> None:
        """Give free slots to those who wait."""
        self._change.queue_changed = False
        runs = trials.allocations(self._change.connection)
        holding = {slot for run in runs for slot in run.slots}
        off = accounts.disabled_slots(self._change.connection)
        free = [slot for slot in range(self._hub.devices.count) if slot not in holding and slot not in off]
        used: dict[int, int] = {}
        for run in runs:
            used[run.experiment_id] = used.get(run.experiment_id, 0) + len(run.slots)
        for made in scheduler.place(self._waiting(runs), free, used):
            self._give(made)

    def _waiting(self, runs: list[Allocation]) -> list[scheduler.Waiting]:
        known: dict[int, Mapping[str, Any]] = {}
        queue = []
        for run in runs:
            if run.state is not AllocationState.QUEUED:
                continue
            if run.experiment_id not in known:
                known[run.experiment_id] = self._change.experiment_of(run.experiment_id).config.get("resources") or {}
            queue.append(waiting(run, known[run.experiment_id]))
        return queue

    def _give(self, made: scheduler.Placement) -> None:
        trials.change_allocation(
            self._change.connection,
            made.allocation_id,
            state=AllocationState.STARTING,
            slots=made.slots,
            started=self._change.now,
        )
        run = trials.allocation(self._change.connection, made.allocation_id)
        if run is None:
            raise NotFound(f"allocation {made.allocation_id} is gone")
        self.order_start(run)


def waiting(run: Allocation, resources: Mapping[str, Any]) -> scheduler.Waiting:
    """A queued allocation as the scheduler sees it; ``resources`` is its experiment's section."""
    slots = resources.get("slots_per_trial")
    priority = resources.get("priority")
    return scheduler.Waiting(
        allocation_id=run.id,
        experiment_id=run.experiment_id,
        slots=1 if slots is None else int(slots),
        priority=42 if priority is None else int(priority),
        order=(run.experiment_id, run.trial_id),
        max_slots=resources.get("max_slots"),
    )
