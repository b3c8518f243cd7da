"""What `zero-trial tune` does with a way to train: plan it in this process, and start it as
`zero-trial run` does, until it is measured."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from zero_trial.ds_config.keys_running import SCHEDULE_CHUNKS
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, DoesNotFit, ExitStatus, TrialError, ZeroTrialError
from zero_trial.experiment.changes import KeyPath, read_words
from zero_trial.launch.experiment import CheckedRun, RunRequest, begin_run, check_run, supervisor_of
from zero_trial.launch.supervisor import LaunchResult
from zero_trial.preflight.compare import PlannedMachine, Planner, trial_planner
from zero_trial.preflight.link_model import LinkModel, of_step
from zero_trial.runs.events import Tail, json_lines
from zero_trial.runs.layout import RunFolder, given_run_folder, lock_run
from zero_trial.tune.search import TuneSearch, TuneTrial
from zero_trial.tune.space import ACCUMULATION, MICRO, STAGE, TrainingWay, TuneFacts, Weighed
from zero_trial.util.memory import machine_memory
from zero_trial.util.text import format_bytes

_ENDLESS = 1_000_000  # batches; a trial is ended when it is measured
# GPUs: links of H100s, 400 TFLOP/s, 1 ms to launch a micro-batch, 20 GB/s to the host. CPU ranks of
# one host exchange through memory. Good for an order, not for a time.
_FLOPS, _MICRO_BATCH, _TO_HOST, _TO_DISK = 4e14, 1e-3, 2e10, 1e9
_CPU_LINKS = LinkModel(intra_gbps=80, ranks_per_node=4096, intra_latency=5e-5)
_AGAIN = 4 / 3  # the time of a step that computes its forwards twice
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "outofmemory", "bad_alloc", "sigkill")


def facts_of(checked: CheckedRun, *, keep: Sequence[str], vary: Mapping[str, Sequence[Any]]) -> TuneFacts:
    """Return what the tuner needs to know of an experiment. Raises ConfigError where the trial
    gives its ds_config itself."""
    config, batch = checked.ds_config, checked.batch
    if config is None or batch is None:
        raise ConfigError(
            "the ds_config is the trial's own, so its values cannot be changed from outside",
            where=str(checked.experiment_path),
            fix="Name it in data.ds_config, and give the trial's engine context.get_ds_config().",
        )
    section, zero, tuning = config.pipeline, config.zero_optimization, config.autotuning
    chunks = SCHEDULE_CHUNKS[section.schedule] or (
        section.chunks_per_rank if isinstance(section.chunks_per_rank, int) else 2
    )
    current: dict[str, Any] = {
        STAGE: zero.stage,
        MICRO: batch.batch.micro_batch_size,
        ACCUMULATION: batch.batch.accumulation,
        "pipeline.schedule": section.schedule,
        "pipeline.chunks_per_rank": chunks,
    }
    current |= {key: value for key in vary if (value := _reach(config, key)) is not None}
    places = (zero.offload_optimizer, zero.offload_param)
    return TuneFacts(
        samples=batch.batch.micro_batch_size * batch.batch.accumulation,
        current=current,
        accelerator=checked.devices.gpus > 0,
        nvme_path=next((place.nvme_path for place in places if place is not None and place.nvme_path), ()),
        pipe=batch.axes.pipe,
        keep=tuple(keep),
        vary=vary,
        smallest=tuning.min_train_micro_batch_size_per_gpu,
        largest=tuning.max_train_micro_batch_size_per_gpu,
    )


def _reach(config: DsConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None)
    return found


def changes_of(way: TrainingWay) -> dict[KeyPath, Any]:
    """Return the values of a way as changes of the experiment."""
    return dict(read_words(f"{key}={json.dumps(value)}" for key, value in way.values).changes)


def weigh_way(request: RunRequest, way: TrainingWay, machine: PlannedMachine, env: Mapping[str, str]) -> Weighed:
    """Plan a way; what the engine refuses becomes the refusal."""
    try:
        checked = check_run(replace(request, changes={**request.changes, **changes_of(way)}), env)
        with trial_planner(checked, machine) as planner:
            found = _weighed(planner, way, checked.own.ranks)
    except (ConfigError, TrialError, DoesNotFit) as error:
        return Weighed(refusal=" ".join(str(error).split()))
    gc.collect()  # a trial and its data, which refer to each other
    return found


def _weighed(planner: Any, way: TrainingWay, ranks: int) -> Weighed:
    if not isinstance(planner, Planner):
        plan = planner.plan()
        again = _AGAIN if way.mapping.get("pipeline.activation_checkpoint_interval") else 1.0
        return Weighed(plan.largest.figures.total, again / (1 - plan.bubble))
    own = planner.plan()
    figures = own.figures
    machine = machine_memory()
    if machine is not None and figures.host * ranks > machine:
        kept = format_bytes(figures.host * ranks)
        return Weighed(refusal=f"keeps {kept} in the host's memory, has {format_bytes(machine)}")
    links = LinkModel() if figures.flops is not None else _CPU_LINKS
    seconds = sum(links.seconds(moved, planner.mesh) for moved in of_step(figures, own.accumulation))
    seconds += own.accumulation * ((figures.flops or 0) / _FLOPS + _MICRO_BATCH)
    return Weighed(figures.total, seconds + 2 * figures.host / _TO_HOST + 2 * figures.disk / _TO_DISK)


def speed_of(times: Sequence[float], warm_up: int) -> tuple[int, float]:
    """Return how many steps have been measured, and their speed: one over the median of their
    seconds.

    Args:
        times: when each step was complete; the first one's begin is not known.
        warm_up: so many steps are left out, at least one.
    """
    spans = [after - before for before, after in pairwise(times[max(warm_up, 1) - 1 :])]
    return len(spans), 1 / max(median(spans), 1e-9) if spans else 0.0


class _Measured(Exception):
    """The trial has been measured: it is ended."""


class _StepWatch:
    """Reads a trial's steps as they come, and ends it when the search has seen enough.

    A rung of n steps is measured over the n steps after the warm-up: one over their median.
    """

    def __init__(self, events: Path, search: TuneSearch, trial: TuneTrial) -> None:
        self._tail = Tail(events)
        self._search = search
        self._trial = trial
        self._times: list[float] = []

    def tick(self) -> None:
        _offer_to_the_oom_killer()
        for event in json_lines(self._tail.lines()):
            if event.get("kind") == "train":
                self._take(float(event["time"]))

    def close(self) -> None:
        """Do nothing: what has not been read yet is not needed."""

    def _take(self, when: float) -> None:
        self._times.append(when)
        steps, speed = speed_of(self._times, self._search.warm_up)
        if steps in self._search.rungs and not self._search.measured(self._trial, steps, speed):
            raise _Measured


def _offer_to_the_oom_killer() -> None:
    """Let the kernel kill the trial's processes before this one where memory runs out (Linux)."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("500", encoding="ascii")


def run_trial(request: RunRequest, trial: TuneTrial, search: TuneSearch, folder: Path, env: Mapping[str, str]) -> None:
    """Train a way in ``folder`` until the search has measured enough of it, or it died; the folder
    stays only if it died."""
    start = time.monotonic()
    changes: dict[KeyPath, Any] = {
        ("searcher", "max_length"): {"batches": _ENDLESS},
        ("scheduling_unit",): 1,  # each step is reported
        ("perform_initial_validation",): False,
        ("min_validation_period",): {"batches": 0},
        ("min_checkpoint_period",): {"batches": 0},
        ("max_restarts",): 0,
    }
    why = ""
    try:
        checked = check_run(replace(request, changes={**request.changes, **changes_of(trial.way), **changes}), env)
        made = given_run_folder(folder).resolve()
        with lock_run(made):
            lock = begin_run(made, checked)
            watch = _StepWatch(RunFolder(made).events, search, trial)
            why = ended_because(supervisor_of(made, lock, checked, watch).run())
    except _Measured:
        shutil.rmtree(folder, ignore_errors=True)
    except ZeroTrialError as error:
        why = " ".join(str(error).split())
    trial.seconds = time.monotonic() - start
    search.ended(trial, why)


def ended_because(outcome: LaunchResult) -> str:
    """Return why a trial ended before it was measured. Raises KeyboardInterrupt if the user ended
    it."""
    said = outcome.cause.headline.splitlines()[0] if outcome.cause is not None else f"exit code {outcome.exit_code}"
    if outcome.exit_code == ExitStatus.PREEMPTED or said.startswith("stopped by SIG"):
        raise KeyboardInterrupt
    if any(word in said.lower() for word in _OUT_OF_MEMORY):
        return f"out of memory: {said}"
    return said if outcome.exit_code else "its data ended before it was measured"
