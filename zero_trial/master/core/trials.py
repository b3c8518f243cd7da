"""The verbs of trials: what is known of them, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zero_trial.master import logs
from zero_trial.master.core import lifecycle
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, Validated, transaction
from zero_trial.master.errors import Conflict, Invalid, NotFound
from zero_trial.master.records import Checkpoint, Json, LogLine, LogQuery, MetricReport, Trial, Workload
from zero_trial.master.store import checkpoints, experiments, metrics, trials

_INVALID_HP = ("INVALID_HP", "INIT_INVALID_HP")


class TrialService:
    """Single trials: what is known of them, and what they report."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def get(self, trial_id: int) -> Trial:
        """NotFound if there is none."""
        with self._state.database.reading() as connection:
            found = trials.get(connection, trial_id, derived=True)
        if found is None:
            raise NotFound(f"trial {trial_id} not found")
        return found

    def workloads(self, trial_id: int, *, include_batch_metrics: bool = False) -> list[Workload]:
        """Training and validation reports and checkpoints, by steps completed; archived reports are left out."""
        self._exists(trial_id)
        with self._state.database.reading() as connection:
            reports: list[tuple[int, int, MetricReport | Checkpoint]] = [
                (report.steps_completed or 0, order, report)
                for order, group in enumerate(("training", "validation"))
                for report in metrics.of_trial(connection, trial_id, group, batch_metrics=include_batch_metrics)
            ]
            reports += [(item.steps_completed, 2, item) for item in checkpoints.of_trial(connection, trial_id)]
        entries = sorted(reports, key=lambda entry: entry[:2])
        return [_workload(item) for _, _, item in entries]

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Reports of a group (None: of all groups), archived ones left out."""
        self._exists(trial_id)
        with self._state.database.reading() as connection:
            return metrics.of_trial(connection, trial_id, group, batch_metrics=True)

    def checkpoints(self, trial_id: int) -> list[Checkpoint]:
        """Of this trial, deleted ones too."""
        self._exists(trial_id)
        with self._state.database.reading() as connection:
            return checkpoints.of_trial(connection, trial_id)

    def metadata(self, trial_id: int) -> Json:
        """What the trial said of itself with ``core_context.train.set_metadata``; empty if it said nothing."""
        self._exists(trial_id)
        with self._state.database.reading() as connection:
            found: Json = trials.metadata(connection, trial_id)
        return found

    def logs(self, trial_id: int, query: LogQuery) -> Iterator[LogLine | None]:
        """Lines of all its runs. The iterator may be dropped at any time. With ``follow`` it yields a line within half a second of its being
        written, and None after a second or two without any, so that the caller can see whether its reader is still there."""
        return read_logs(self._state, self._exists(trial_id), query)

    def _exists(self, trial_id: int) -> Trial:
        with self._state.database.reading() as connection:
            found = trials.get(connection, trial_id)
        if found is None:
            raise NotFound(f"trial {trial_id} not found")
        return found

    # -- changing

    def kill(self, trial_id: int) -> None:
        """End it now; the search goes on as if it had been canceled."""
        with transaction(self._state) as tx:
            tx.trial(trial_id, lifecycle.KillTrial())

    def set_metadata(self, trial_id: int, metadata: Json) -> None:
        """Replace it."""
        self._set(trial_id, metadata=dict(metadata))

    def set_runner_state(self, trial_id: int, state: str) -> None:
        """What the harness says that it does."""
        self._set(trial_id, runner_state=state)

    def _set(self, trial_id: int, **columns: Any) -> None:
        with transaction(self._state) as tx:
            self._in(tx, trial_id)
            trials.change(tx.connection, trial_id, **columns)

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
        """Invalid if the run id is stale. Cheap; a report is visible at once and on disk within a tenth of a second (validations: on return)."""
        with transaction(self._state) as tx:
            trial = self._in(tx, trial_id)
            if run_id != trial.run_id:
                raise Invalid(
                    "this run is not the trial's newest", where=f"trial {trial_id}", got=run_id, expected=trial.run_id
                )
            at = tx.now if reported is None else reported
            report = MetricReport(trial_id, run_id, group, steps_completed, metrics, batch_metrics, at)
            self._take(tx, trial, report)

    def _take(self, tx: Transaction, trial: Trial, report: MetricReport) -> None:
        if report.group == "validation":
            self._validated(tx, trial, report)
        else:
            metrics.add(tx.connection, report)
        if report.steps_completed is not None and report.group in ("training", "validation"):
            steps = max(trial.steps_completed, report.steps_completed)
            if steps != trial.steps_completed:
                trials.change(tx.connection, trial.id, steps_completed=steps)

    def _validated(self, tx: Transaction, trial: Trial, report: MetricReport) -> None:
        if metrics.known(tx.connection, report):
            return  # said again because the answer was lost: the search has been told
        experiment = experiments.get(tx.connection, trial.experiment_id, derived=False)
        if experiment is None:
            raise NotFound(f"experiment {trial.experiment_id} not found")
        name = str((experiment.config.get("searcher") or {}).get("metric"))
        metrics.add(tx.connection, report, metrics.number_of(report.metrics, name))
        tx.search(Validated(trial, report.metrics))

    def report_progress(self, trial_id: int, progress: float, *, is_raw: bool) -> None:
        """``is_raw``: a fraction of this trial's own work from 0 to 1."""
        del is_raw  # both ways it is the trial's own fraction
        with transaction(self._state) as tx:
            trial = self._in(tx, trial_id)
            trials.change(tx.connection, trial_id, progress=min(1.0, max(0.0, progress)))
            experiment = experiments.get(tx.connection, trial.experiment_id, derived=False)
            if experiment is None or experiment.state.final:
                return
            live = self._state.search_of(tx.connection, experiment)
            fractions = {item.request_id: item.progress or 0.0 for item in trials.live(tx.connection, experiment.id)}
            experiments.change(tx.connection, experiment.id, progress=live.searcher.progress(fractions))

    def early_exit(self, trial_id: int, reason: str) -> None:
        """The trial ends itself; ``reason`` as on the wire (EXITED_REASON_INVALID_HP ...)."""
        word = reason.removeprefix("EXITED_REASON_")
        with transaction(self._state) as tx:
            self._in(tx, trial_id)
            tx.trial(trial_id, lifecycle.EarlyExit(lifecycle.INVALID_HP if word in _INVALID_HP else word))

    def start_run(self, trial_id: int) -> None:
        """A rank has started and will report (``POST /runs/start``, whose runId is the trial's id). Conflict if the trial has ended."""
        trial = self._exists(trial_id)
        if trial.state.final:
            raise Conflict(f"trial {trial_id} is {trial.state.value}")

    def _in(self, tx: Transaction, trial_id: int) -> Trial:
        trial = trials.get(tx.connection, trial_id)
        if trial is None:
            raise NotFound(f"trial {trial_id} not found")
        return trial


def read_logs(state: MasterState, trial: Trial, query: LogQuery) -> Iterator[LogLine | None]:
    """The lines of a trial."""
    source = logs.Source(state.directory.trial_logs(trial.id), trial.id, trial.task_id)
    if query.follow:
        return logs.follow(source, query, _ended(state, trial.id))
    return logs.lines(source, query)


def _ended(state: MasterState, trial_id: int) -> Callable[[], bool]:
    def ended() -> bool:
        if state.closed.is_set():
            return True
        with state.database.reading() as connection:
            trial = trials.get(connection, trial_id)
        return trial is None or trial.state.final

    return ended


def _workload(item: MetricReport | Checkpoint) -> Workload:
    if isinstance(item, Checkpoint):
        return Workload(checkpoint=item)
    return Workload(training=item) if item.group == "training" else Workload(validation=item)
