"""The verbs of trials: what is known of them, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zero_trial.master import logs
from zero_trial.master.core import trial_lifecycle as life
from zero_trial.master.core.searching import Validated
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction
from zero_trial.master.errors import Conflict, Invalid, NotFound
from zero_trial.master.records import Checkpoint, Json, LogLine, LogQuery, MetricReport, Trial, Workload
from zero_trial.master.store import checkpoints, experiments, metrics, trials

_INVALID_HP = ("INVALID_HP", "INIT_INVALID_HP")


class TrialService:
    """See verbs.TrialVerbs."""

    def __init__(self, hub: MasterState) -> None:
        self._hub = hub

    # -- reading

    def get(self, trial_id: int) -> Trial:
        """See verbs."""
        with self._hub.database.reading() as connection:
            found = trials.get(connection, trial_id, derived=True)
        if found is None:
            raise NotFound(f"trial {trial_id} not found")
        return found

    def workloads(self, trial_id: int, *, include_batch_metrics: bool = False) -> list[Workload]:
        """See verbs."""
        self._exists(trial_id)
        with self._hub.database.reading() as connection:
            reports: list[tuple[int, int, MetricReport | Checkpoint]] = [
                (report.steps_completed or 0, order, report)
                for order, group in enumerate(("training", "validation"))
                for report in metrics.of_trial(connection, trial_id, group, batch_metrics=include_batch_metrics)
            ]
            reports += [(item.steps_completed, 2, item) for item in checkpoints.of_trial(connection, trial_id)]
        entries = sorted(reports, key=lambda entry: entry[:2])
        return [_workload(item) for _, _, item in entries]

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """See verbs."""
        self._exists(trial_id)
        with self._hub.database.reading() as connection:
            return metrics.of_trial(connection, trial_id, group, batch_metrics=True)

    def checkpoints(self, trial_id: int) -> list[Checkpoint]:
        """See verbs."""
        self._exists(trial_id)
        with self._hub.database.reading() as connection:
            return checkpoints.of_trial(connection, trial_id)

    def metadata(self, trial_id: int) -> Json:
        """See verbs."""
        self._exists(trial_id)
        with self._hub.database.reading() as connection:
            found: Json = trials.metadata(connection, trial_id)
        return found

    def logs(self, trial_id: int, query: LogQuery) -> Iterator[LogLine | None]:
        """See verbs."""
        return read_logs(self._hub, self._exists(trial_id), query)

    def _exists(self, trial_id: int) -> Trial:
        with self._hub.database.reading() as connection:
            found = trials.get(connection, trial_id)
        if found is None:
            raise NotFound(f"trial {trial_id} not found")
        return found

    # -- changing

    def kill(self, trial_id: int) -> None:
        """See verbs."""
        with self._hub.change() as change:
            change.trial(trial_id, life.KillTrial())

    def set_metadata(self, trial_id: int, metadata: Json) -> None:
        """See verbs."""
        self._set(trial_id, metadata=dict(metadata))

    def set_runner_state(self, trial_id: int, state: str) -> None:
        """See verbs."""
        self._set(trial_id, runner_state=state)

    def _set(self, trial_id: int, **columns: Any) -> None:
        with self._hub.change() as change:
            self._in(change, trial_id)
            trials.change(change.connection, trial_id, **columns)

    # -- reports

    def report_metrics(
        self,
        trial_id: int,
        *,
        run_id: int,
        group: str,
        steps_completed: int | None,
        metrics: Json,
        batch_metrics: Any = None,
        reported: float | None = None,
    ) -> None:
        """See verbs."""
        with self._hub.change() as change:
            trial = self._in(change, trial_id)
            if run_id != trial.run_id:
                raise Invalid(
                    "this run is not the trial's newest", where=f"trial {trial_id}", got=run_id, expected=trial.run_id
                )
            at = change.now if reported is None else reported
            report = MetricReport(trial_id, run_id, group, steps_completed, metrics, batch_metrics, at)
            self._take(change, trial, report)

    def _take(self, change: Transaction, trial: Trial, report: MetricReport) -> None:
        if report.group == "validation":
            self._validated(change, trial, report)
        else:
            metrics.add(change.connection, report)
        if report.steps_completed is not None and report.group in ("training", "validation"):
            steps = max(trial.steps_completed, report.steps_completed)
            if steps != trial.steps_completed:
                trials.change(change.connection, trial.id, steps_completed=steps)

    def _validated(self, change: Transaction, trial: Trial, report: MetricReport) -> None:
        if metrics.known(change.connection, report):
            return  # said again because the answer was lost: the search has been told
        experiment = experiments.get(change.connection, trial.experiment_id, derived=False)
        if experiment is None:
            raise NotFound(f"experiment {trial.experiment_id} not found")
        name = str((experiment.config.get("searcher") or {}).get("metric"))
        metrics.add(change.connection, report, metrics.number_of(report.metrics, name))
        change.search(Validated(trial, report.metrics))

    def report_progress(self, trial_id: int, progress: float, *, is_raw: bool) -> None:
        """See verbs."""
        del is_raw  # both ways it is the trial's own fraction
        with self._hub.change() as change:
            trial = self._in(change, trial_id)
            trials.change(change.connection, trial_id, progress=min(1.0, max(0.0, progress)))
            experiment = experiments.get(change.connection, trial.experiment_id, derived=False)
            if experiment is None or experiment.state.final:
                return
            live = self._hub.search_of(change.connection, experiment)
            fractions = {
                item.request_id: item.progress or 0.0 for item in trials.live(change.connection, experiment.id)
            }
            experiments.change(change.connection, experiment.id, progress=live.searcher.progress(fractions))

    def early_exit(self, trial_id: int, reason: str) -> None:
        """See verbs."""
        word = reason.removeprefix("EXITED_REASON_")
        with self._hub.change() as change:
            self._in(change, trial_id)
            change.trial(trial_id, life.EarlyExit(life.INVALID_HP if word in _INVALID_HP else word))

    def start_run(self, trial_id: int) -> None:
        """See verbs."""
        trial = self._exists(trial_id)
        if trial.state.final:
            raise Conflict(f"trial {trial_id} is {trial.state.value}")

    def _in(self, change: Transaction, trial_id: int) -> Trial:
        trial = trials.get(change.connection, trial_id)
        if trial is None:
            raise NotFound(f"trial {trial_id} not found")
        return trial


def read_logs(hub: MasterState, trial: Trial, query: LogQuery) -> Iterator[LogLine | None]:
    """The lines of a trial."""
    source = logs.Source(hub.home.trial_logs(trial.id), trial.id, trial.task_id)
    if query.follow:
        return logs.follow(source, query, _ended(hub, trial.id))
    return logs.lines(source, query)


def _ended(hub: MasterState, trial_id: int) -> Callable[[], bool]:
    def ended() -> bool:
        if hub.closed:
            return True
        with hub.database.reading() as connection:
            trial = trials.get(connection, trial_id)
        return trial is None or trial.state.final

    return ended


def _workload(item: MetricReport | Checkpoint) -> Workload:
    if isinstance(item, Checkpoint):
        return Workload(checkpoint=item)
    return Workload(training=item) if item.group == "training" else Workload(validation=item)
