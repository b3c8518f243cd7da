"""What the search of an experiment is told in a change, and what it answers: trials created, stopped, pruned, the experiment's end."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from zero_trial.master.core import experiment_lifecycle as experiment_life
from zero_trial.master.core import trial_lifecycle as trial_life
from zero_trial.master.core.search import MAX_PRUNED, LiveSearch
from zero_trial.master.core.sources import source_of
from zero_trial.master.records import Experiment, ExperimentState, Trial, TrialState
from zero_trial.master.search import Action, Create, ExitReason, MetricMissing, Shutdown, Stop, pruning
from zero_trial.master.store import experiments, trials

if TYPE_CHECKING:
    from zero_trial.master.core.state import MasterState
    from zero_trial.master.core.transaction import Transaction

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validated:
    """A trial has reported a validation."""

    trial: Trial
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Ended:
    """A trial is over."""

    trial: Trial
    reason: ExitReason


@dataclass(frozen=True)
class Begun:
    """The search begins."""

    experiment_id: int


SearchEvent: TypeAlias = Validated | Ended | Begun


class Searching:
    """The searches' part of one change: events wait until the change is settled, since one may follow from another."""

    def __init__(self, change: Transaction, hub: MasterState) -> None:
        self._change = change
        self._hub = hub
        self._events: deque[SearchEvent] = deque()

    def put(self, event: SearchEvent) -> None:
        """Something that a search is told before the commit."""
        self._events.append(event)

    def settle(self) -> None:
        """Tell the searches what happened until nothing follows any more, and keep where they stand."""
        while self._events:
            self._tell(self._events.popleft())
        for experiment_id in sorted(self._change.touched):
            live = self._hub.searches.get(experiment_id)
            if live is not None:
                experiments.change(self._change.connection, experiment_id, snapshot=live.searcher.snapshot())

    def _tell(self, event: SearchEvent) -> None:
        experiment_id = event.experiment_id if isinstance(event, Begun) else event.trial.experiment_id
        experiment = self._change.experiment_of(experiment_id)
        if experiment.state not in (ExperimentState.ACTIVE, ExperimentState.PAUSED):
            return  # it is stopping: there is nothing left to decide
        live = self._hub.search_of(self._change.connection, experiment)
        self._change.touched.add(experiment_id)
        try:
            actions = self._ask(live, event)
        except MetricMissing as error:
            if isinstance(event, Validated):
                self._change.trial(event.trial.id, trial_life.Fail(str(error)))
            return
        except Exception as error:  # a fault of ours ends this experiment, not the master
            log.exception("the search of experiment %d failed", experiment_id)
            self._change.give_up(experiment_id, f"the search failed: {type(error).__name__}: {error}")
            return
        for action in actions:
            self._act(experiment_id, live, action)

    def _ask(self, live: LiveSearch, event: SearchEvent) -> list[Action]:
        if isinstance(event, Begun):
            return live.searcher.start()
        if isinstance(event, Validated):
            return live.searcher.on_validation(event.trial.request_id, event.metrics)
        return live.searcher.on_exited(event.trial.request_id, event.reason)

    def _act(self, experiment_id: int, live: LiveSearch, action: Action) -> None:
        if isinstance(action, Create):
            self._create(experiment_id, live, action)
        elif isinstance(action, Stop):
            trial = trials.of_request(self._change.connection, experiment_id, action.request_id)
            if trial is not None:
                self._change.trial(trial.id, trial_life.StopBySearch())
        elif isinstance(action, Shutdown):
            if action.failed:
                self._explain_failure(experiment_id)
            self._change.experiment(experiment_id, experiment_life.SearchOver(action.failed))

    def _create(self, experiment_id: int, live: LiveSearch, action: Create) -> None:
        experiment = self._change.experiment_of(experiment_id)
        if experiment.state not in (ExperimentState.ACTIVE, ExperimentState.PAUSED):
            return
        trial_id = self._add_trial(experiment, action)
        why = self._why_not(experiment, live, action)
        if why is not None:
            self._prune(experiment_id, live, trial_id, why)
            return
        live.pruned = 0
        if experiment.state is ExperimentState.ACTIVE:
            self._change.trial(trial_id, trial_life.StartTrial())

    def _why_not(self, experiment: Experiment, live: LiveSearch, action: Create) -> str | None:
        try:
            return pruning.reason(experiment.config, action.hparams, live.context.files)
        except Exception:  # we cannot tell, so the trial will
            log.exception("a point of experiment %d cannot be looked at before launch", experiment.id)
            return None

    def _add_trial(self, experiment: Experiment, action: Create) -> int:
        return trials.add(
            self._change.connection,
            Trial(
                id=0,
                experiment_id=experiment.id,
                request_id=action.request_id,
                task_id=f"{experiment.id}.{uuid.uuid4()}",  # /tmp knows runs by it, so it is unique beyond this master
                state=TrialState.ACTIVE if experiment.state is ExperimentState.ACTIVE else TrialState.PAUSED,
                hparams=action.hparams,
                seed=action.seed,
                created=self._change.now,
                warm_start_checkpoint=source_of(self._change.connection, experiment.config),
            ),
        )

    def _prune(self, experiment_id: int, live: LiveSearch, trial_id: int, why: str) -> None:
        """A point that cannot be trained ends before it begins; the search goes on without it."""
        trials.change(
            self._change.connection,
            trial_id,
            state=TrialState.ERROR,
            ended=self._change.now,
            pruned=1,
            reason=f"pruned before launch: {why}",
        )
        self._change.notes.append(
            (trial_id, "ERROR", f"pruned before launch, these hyperparameters cannot be trained: {why}")
        )
        live.pruned += 1
        if live.pruned >= MAX_PRUNED:
            self._change.give_up(
                experiment_id, f"{live.pruned} points in a row cannot be trained, the last one because: {why}"
            )
            return
        self.put(Ended(self._change.trial_of(trial_id), ExitReason.INVALID_HP))

    def _explain_failure(self, experiment_id: int) -> None:
        """What the experiment says about its end: the reason of the last trial that failed."""
        reasons = [
            trial.reason for trial in trials.of_experiment(self._change.connection, experiment_id) if trial.reason
        ]
        if reasons:
            experiments.change(self._change.connection, experiment_id, error=reasons[-1])
