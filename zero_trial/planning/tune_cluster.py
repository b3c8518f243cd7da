"""`zero-trial tune --master`: one experiment of a Determined master, whose grid has a point for
each way to train; each trial reports its steps per second.

It is created and followed by Determined's own client, and needs nothing that a genuine master
lacks.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError, MasterError
from zero_trial.launch.run_experiment import CheckedRun
from zero_trial.planning.tune_result import TuneOutcome, TuneTrial
from zero_trial.planning.tune_search import SearchSettings
from zero_trial.planning.tune_space import Selection, TrainingWay
from zero_trial.planning.tune_trials import MONITORS, changes_of, key_in_ds_config, with_memory_named
from zero_trial.util.speed import SPEED_METRIC

_ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETING", "DELETED", "DELETE_FAILED")
_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 300.0  # with a master that does not answer: it may be started anew
_TRY_AGAIN = (408, 429)  # answers of the client's fault that say so
_LOG_LINES = 400  # of a trial that died, among which its reason is looked for
_REASONS = ("error   ", "hyperparameters that cannot be trained: ")  # what a rank prints when it ends


def ways_to_send(selection: Selection, trials: int, own: TrainingWay | None) -> tuple[TrainingWay, ...]:
    """Return the ``trials`` ways with the best estimates, in the order in which they are tried: the
    ds_config's own first, if it fits."""
    ranked = sorted(selection.ways, key=lambda way: (way != own, selection.weighed[way].seconds))
    return tuple(ranked[:trials])


def refuse_other_keys(vary: Iterable[str]) -> None:
    """Raise ConfigError for a key that is not of the ds_config: a grid over ways changes it
    alone."""
    for key in vary:
        if key_in_ds_config(key) is None:
            raise ConfigError(
                "a master tries values of the ds_config alone", where="--vary", got=key, fix="Tune it without --master."
            )


def overlay_of(way: TrainingWay, checked: CheckedRun) -> dict[str, Any]:
    """Return ``hyperparameters.ds_config`` of a trial: the experiment's own, with the values of a
    way, and without monitors."""
    before = checked.experiment.hyperparameters.get("ds_config")
    found: dict[str, Any] = copy.deepcopy(dict(before)) if isinstance(before, Mapping) else {}
    config = checked.ds_config
    changes = changes_of(way)
    for name in MONITORS:
        if getattr(config, name).enabled:
            changes["hyperparameters", "ds_config", name, "enabled"] = False
    for path, value in changes.items():
        section = found
        for part in path[2:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    return found


def experiment_of(checked: CheckedRun, ways: Sequence[TrainingWay], settings: SearchSettings) -> dict[str, Any]:
    """Return the experiment that measures ``ways``, in their order."""
    experiment = checked.experiment
    plain = dict(experiment.raw)
    data = dict(plain.get("data") or {})
    named = data.get("ds_config")
    sent = isinstance(named, str) and not Path(named).is_absolute() and (checked.model_dir / named).is_file()
    if not isinstance(named, Mapping) and not sent:  # a cluster gets the model's folder alone
        over = ("ds_config", "trainer") if named is not None else ("trainer",)
        rest = {key: value for key, value in experiment.hyperparameters.items() if key not in over}
        data["ds_config"] = dict(experiment.ds_config(checked.model_dir, rest).value)
    at_a_time = (plain.get("searcher") or {}).get("max_concurrent_trials", 1)
    # a grid is tried from its last point to its first
    points = [overlay_of(way, checked) for way in reversed(ways)]
    return {
        **plain,
        "data": data,
        "name": f"{experiment.name} tuned",
        "resources": {**(plain.get("resources") or {}), "slots_per_trial": checked.ranks},
        "searcher": {
            "name": "grid",
            "metric": SPEED_METRIC,
            "smaller_is_better": False,
            "max_length": {"batches": max(settings.warm_up, 1) + settings.steps},
            "max_concurrent_trials": at_a_time,
        },
        "hyperparameters": {
            **(plain.get("hyperparameters") or {}),
            "ds_config": {"type": "categorical", "vals": json.loads(json.dumps(points))},
        },
        "perform_initial_validation": False,
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "checkpoint_policy": "none",
        "max_restarts": 0,
    }


def create_experiment(url: str, config: Path, model_dir: Path) -> Any:
    """Create and activate an experiment on the master at ``url``, as the user who is logged in
    there; return Determined's object for it. Raises MasterError."""
    if find_spec("determined") is None:
        raise ConfigError(
            "Determined's client is not installed", where="--master", fix="pip install 'zero_trial[determined]'"
        )
    from determined.common.api.errors import BadRequestException, BadResponseException
    from determined.experimental import Determined

    try:
        with contextlib.redirect_stdout(sys.stderr):  # it says how much it sends
            return Determined(master=url).create_experiment(str(config), str(model_dir))
    except (BadRequestException, BadResponseException, EOFError) as error:
        raise MasterError(
            "the experiment was not created",
            where=f"--master {url}",
            got=_said(error),
            fix='Log in first: det -m URL user login, or eval "$(zero-trial master up --env)".',
        ) from error


class MasterSearch:
    """Follows a tuning experiment of a master.

    Args:
        experiment: Determined's object for it.
        overlays: what ``hyperparameters.ds_config`` of each way's trial is.
    """

    def __init__(
        self,
        experiment: Any,
        selection: Selection,
        overlays: Mapping[TrainingWay, Mapping[str, Any]],
        warm_up: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._experiment = experiment
        self._selection = selection
        self._ways = {_spelled(overlay): way for way, overlay in overlays.items()}
        self._warm_up = max(warm_up, 1)
        self._sleep = sleep
        self._since: dict[int, float] = {}  # when a trial was first seen
        self.trials: list[TuneTrial] = []

    def next_ended(self) -> TuneTrial | None:
        """Wait until another trial has ended, and return what it has measured; None when the
        experiment is over. Raises MasterError if the master refuses to say, or for minutes does not
        answer."""
        from determined.common.api.bindings import APIHttpError
        from determined.common.api.errors import BadRequestException, BadResponseException

        answered = time.monotonic()
        while True:
            try:
                found, over = self._look()
            except (BadRequestException, BadResponseException, APIHttpError, OSError) as error:
                if _is_refusal(error) or time.monotonic() - answered >= _PATIENCE_SECONDS:
                    raise MasterError(
                        "the master no longer says how the experiment goes on",
                        where=f"experiment {self._experiment.id}",
                        got=_said(error),
                        fix=self._left(),
                    ) from error
            else:
                if found is not None or over:
                    return found
                answered = time.monotonic()
            self._sleep(_POLL_SECONDS)

    def stop(self) -> MasterError | None:
        """End the experiment: its trials have nothing to save. Return why it may go on."""
        try:
            self._experiment.kill()
        except Exception as error:  # any: what was measured is not lost for it
            where = f"experiment {self._experiment.id}"
            return MasterError("the experiment could not be ended", where=where, got=_said(error), fix=self._left())
        return None

    def _left(self) -> str:
        return f"If it is still there: det experiment kill {self._experiment.id}"

    def _look(self) -> tuple[TuneTrial | None, bool]:
        """Return a trial that has ended since, and whether the experiment is over."""
        self._experiment.reload()
        over = self._experiment.state.name in _ENDED  # before its trials are listed
        known = {trial.number for trial in self.trials}
        for trial in self._experiment.list_trials():
            self._since.setdefault(trial.id, time.monotonic())
            if trial.id not in known and trial.state.name in _ENDED:
                self.trials.append(self._measured(trial))
                return self.trials[-1], over
        return None, over

    def outcome(self) -> TuneOutcome:
        """Return what was measured so far."""
        return TuneOutcome("grid", self._selection, tuple(sorted(self.trials, key=lambda trial: trial.number)))

    def _measured(self, trial: Any) -> TuneTrial:
        way = self._ways.get(_spelled((trial.hparams or {}).get("ds_config")))
        if way is None:
            raise MasterError(
                "a trial of this experiment is of no way that was sent",
                where=f"trial {trial.id}",
                got=trial.hparams,
                fix="Was the experiment changed? Tune again.",
            )
        speeds = {
            report.steps_completed - self._warm_up: float(report.metrics[SPEED_METRIC])
            for report in trial.iter_metrics("validation")
            if SPEED_METRIC in report.metrics
        }
        found = TuneTrial(trial.id, way, speeds, seconds=time.monotonic() - self._since[trial.id])
        if trial.state.name != "COMPLETED" or not speeds:
            found.why = why_ended(trial)
        return found


def why_ended(trial: Any) -> str:
    """Return why a trial ended before it was measured, by its log."""
    for line in trial.iter_logs(tail=_LOG_LINES):
        for reason in _REASONS:
            _, found, said = str(line).partition(reason)
            if found and said.strip():
                return with_memory_named(said.strip())
    return f"{trial.state.name}: see det trial logs {trial.id}"


def _is_refusal(error: Exception) -> bool:
    """Tell whether the master has answered, and answers the same when it is asked again."""
    from determined.common.api.errors import APIException, ForbiddenException, UnauthenticatedException

    if isinstance(error, APIException):
        return 400 <= error.status_code < 500 and error.status_code not in _TRY_AGAIN
    return isinstance(error, (ForbiddenException, UnauthenticatedException))


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _spelled(value: Any) -> str:
    """Return one text for equal values, as which a master may return them: 1 for 1.0."""

    def plain(each: Any) -> Any:
        if isinstance(each, Mapping):
            return {str(key): plain(item) for key, item in each.items()}
        if isinstance(each, (list, tuple)):
            return [plain(item) for item in each]
        return int(each) if isinstance(each, float) and each.is_integer() else each

    return json.dumps(plain(value), sort_keys=True)
