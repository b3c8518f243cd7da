"""What `zero-trial tune` does with a way to train: plan it in this process, and start it as
`zero-trial run` does, until it is measured."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_trial.ds_config.keys_running import SCHEDULE_CHUNKS
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, ExitStatus, ZeroTrialError
from zero_trial.experiment.changes import KeyPath, read_words
from zero_trial.launch.run_experiment import CheckedRun, RunRequest, begin_run, check_run, supervisor_of
from zero_trial.launch.supervisor import LaunchResult
from zero_trial.planning.compare import PlannedMachine, Planner, trial_planner
from zero_trial.planning.link_model import LinkModel, of_step
from zero_trial.planning.lone_task import DryRunRequest
from zero_trial.planning.tune_result import TuneTrial
from zero_trial.planning.tune_search import TuneSearch
from zero_trial.planning.tune_space import (
    ACCUMULATION,
    MICRO,
    STAGE,
    TrainingWay,
    TuneFacts,
    Weighed,
    canonical_key,
    kept_keys,
)
from zero_trial.trial.runs.events import Tail, json_lines
from zero_trial.trial.runs.rank_records import read_ranks
from zero_trial.trial.runs.run_layout import RunFolder, given_run_folder, lock_run
from zero_trial.util.memory import machine_memory
from zero_trial.util.speed import speed_of
from zero_trial.util.text import format_bytes

_ENDLESS = 1_000_000  # batches; a trial is ended when it is measured
# GPUs: links of H100s, 400 TFLOP/s, 1 ms to launch a micro-batch, 20 GB/s to the host. CPU ranks of
# one host exchange through memory. Good for an order, not for a time.
_FLOPS, _MICRO_BATCH, _TO_HOST, _TO_DISK = 4e14, 1e-3, 2e10, 1e9
_CPU_LINKS = LinkModel(intra_gbps=80, ranks_per_node=4096, intra_latency=5e-5)
_AGAIN = 4 / 3  # the time of a step that computes its forwards twice
MONITORS = ("wandb", "comet", "tensorboard", "csv_monitor")
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "outofmemory", "bad_alloc", "sigkill")


def facts_of(
    checked: CheckedRun, *, keep: Sequence[str], vary: Mapping[str, Sequence[Any]], accelerator: bool | None = None
) -> TuneFacts:
    """Return what the tuner needs to know of an experiment. Raises ConfigError where the trial
    gives its ds_config itself.

    Args:
        accelerator: whether ranks compute on GPUs; None: as they do here.
    """
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
    accelerator = checked.devices.gpus > 0 if accelerator is None else accelerator
    current |= _savers_now(config, accelerator)
    current |= {key: value for key in vary if (value := _value_now(checked, config, key)) is not None}
    places = (zero.offload_optimizer, zero.offload_param)
    return TuneFacts(
        samples=batch.batch.micro_batch_size * batch.batch.accumulation,
        current=current,
        accelerator=accelerator,
        nvme_path=next((place.nvme_path for place in places if place is not None and place.nvme_path), ()),
        pipe=batch.axes.pipe,
        keep=kept_keys(keep),
        vary=vary,
        smallest=tuning.min_train_micro_batch_size_per_gpu,
        largest=tuning.max_train_micro_batch_size_per_gpu,
    )


def _savers_now(config: DsConfig, accelerator: bool) -> dict[str, Any]:
    """Return the savers that the ds_config has switched on, by dotted key."""
    zero, interval = config.zero_optimization, config.pipeline.activation_checkpoint_interval
    found: dict[str, Any] = {}
    for name, place in ("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param):
        # CPU ranks have everything in the host's memory anyway
        if place is not None and place.device in (("cpu", "nvme") if accelerator else ("nvme",)):
            found[f"zero_optimization.{name}.device"] = place.device
            if place.device == "nvme":
                found[f"zero_optimization.{name}.nvme_path"] = place.nvme_path
    found |= {"zero_optimization.reduce_every": "micro"} if zero.reduce_every == "micro" else {}
    return found | ({"pipeline.activation_checkpoint_interval": interval} if interval else {})


def _value_now(checked: CheckedRun, config: DsConfig, key: str) -> Any:
    """Return the value that a key of the ds_config or of the experiment has, or None."""
    if key_in_ds_config(key) is not None:
        return _reach(config, canonical_key(key).split("."))
    known = {**checked.experiment.raw, "hyperparameters": checked.experiment.hyperparameters}
    return _reach(known, _place(key))


def _reach(found: Any, path: Iterable[str]) -> Any:
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def key_in_ds_config(key: str) -> str | None:
    """Return the dotted key in the ds_config's file; None for one of the experiment."""
    path = _place(key)
    return ".".join(path[2:]) if path[:2] == ("hyperparameters", "ds_config") else None


def _place(key: str) -> KeyPath:
    """Return the place of a key in the experiment. Raises ConfigError for an unknown one, and for a
    word that is not a key."""
    path = next(iter(read_words([f"{key}=null"]).changes), None)
    if path is None:
        raise ConfigError("this is not a key of an experiment or a ds_config", where="--vary", got=key)
    return path


def changes_of(way: TrainingWay) -> dict[KeyPath, Any]:
    """Return the values of a way as changes of the experiment."""
    return dict(read_words(f"{key}={json.dumps(value)}" for key, value in way.values).changes)


def changes_of_trial(way: TrainingWay) -> dict[KeyPath, Any]:
    """Return what a trial changes in the experiment: the values of its way, and what makes it a
    measurement, which goes on until it is ended, reports each step, and neither saves nor writes
    to monitors."""
    return {
        **changes_of(way),
        ("searcher", "max_length"): {"batches": _ENDLESS},
        ("scheduling_unit",): 1,
        ("perform_initial_validation",): False,
        ("min_validation_period",): {"batches": 0},
        ("min_checkpoint_period",): {"batches": 0},
        ("max_restarts",): 0,
        **{("hyperparameters", "ds_config", monitor, "enabled"): False for monitor in MONITORS},
    }


def weigh_way(request: RunRequest, way: TrainingWay, machine: PlannedMachine, env: Mapping[str, str]) -> Weighed:
    """Plan a way; what the trial or the engine refuses becomes the refusal."""
    try:
        checked = check_run(replace(request, changes={**request.changes, **changes_of(way)}), env)
        with trial_planner(DryRunRequest.of(checked), machine) as planner:
            memory = None if machine.elsewhere else machine_memory()
            return replace(_weighed(planner, way, checked.own.ranks, memory), samples=planner.samples)
    except ZeroTrialError as error:
        return Weighed(refusal=" ".join(str(error).split()))
    finally:
        gc.collect()  # a trial and its data, which refer to each other


def _weighed(planner: Any, way: TrainingWay, ranks: int, memory: int | None) -> Weighed:
    """Return what is known of a way; ``memory`` is that of the host, None if unknown."""
    if not isinstance(planner, Planner):
        plan = planner.plan()
        again = _AGAIN if way.mapping.get("pipeline.activation_checkpoint_interval") else 1.0
        return Weighed(plan.largest.figures.total, again / (1 - plan.bubble))
    own = planner.plan()
    figures = own.figures
    if memory is not None and figures.host * ranks > memory:
        kept = format_bytes(figures.host * ranks)
        return Weighed(refusal=f"keeps {kept} in the host's memory, has {format_bytes(memory)}")
    links = LinkModel() if figures.flops is not None else _CPU_LINKS
    seconds = sum(links.seconds(moved, planner.mesh) for moved in of_step(figures, own.accumulation))
    seconds += own.accumulation * ((figures.flops or 0) / _FLOPS + _MICRO_BATCH)
    return Weighed(figures.total, seconds + 2 * figures.host / _TO_HOST + 2 * figures.disk / _TO_DISK)


class _Measured(Exception):
    """The trial has been measured: it is ended."""


class _StepWatch:
    """Reads a trial's steps as they come, and ends it when the search has seen enough.

    A rung of n steps is measured over the n steps after the warm-up, or more where they take little
    time: one over their median.
    """

    def __init__(self, run: RunFolder, ranks: int, search: TuneSearch, trial: TuneTrial) -> None:
        self._run = run
        self._ranks = ranks
        self._offered = False
        self._tail = Tail(run.events)
        self._search = search
        self._trial = trial
        self._times: list[float] = []

    def tick(self) -> None:
        if not self._offered:
            self._offered = _offer_to_the_oom_killer(self._run.path, self._ranks)
        for event in json_lines(self._tail.lines()):
            if event.get("kind") == "train":
                self._take(float(event["time"]))

    def close(self) -> None:
        """Do nothing: what has not been read yet is not needed."""

    def _take(self, when: float) -> None:
        self._times.append(when)
        warm_up = self._search.warm_up
        steps, speed = speed_of(self._times, warm_up)
        seconds = when - self._times[max(warm_up, 1) - 1] if steps else 0.0
        rung = self._search.rung_reached(self._trial, steps, seconds)
        if rung is None:
            return
        self._trial.steps = steps
        if not self._search.measured(self._trial, rung, speed):
            raise _Measured


def _offer_to_the_oom_killer(folder: Path, ranks: int) -> bool:
    """Let the kernel kill the ranks of a run, and what they start later, before this process where
    memory runs out (Linux). Return whether all of them were there."""
    found = read_ranks(folder)
    if len(found) < ranks:
        return False
    for record in found:
        with contextlib.suppress(OSError):  # it has ended, or there is no such file
            Path(f"/proc/{record.pid}/oom_score_adj").write_text("500", encoding="ascii")
    return True


def _interrupt() -> None:
    """End a trial at once at the first Ctrl-C: it has nothing to save."""
    raise KeyboardInterrupt


def run_trial(request: RunRequest, trial: TuneTrial, search: TuneSearch, folder: Path, env: Mapping[str, str]) -> None:
    """Train a way in ``folder`` until the search has measured enough of it, or it died; the folder
    stays only if it died.

    Raises KeyboardInterrupt if the user ends it: without a process or a folder that stays, and what
    was measured of it counts.
    """
    start = time.monotonic()
    why = ""
    try:
        checked = check_run(replace(request, changes={**request.changes, **changes_of_trial(trial.way)}), env)
        made = given_run_folder(folder).resolve()
        with lock_run(made):
            lock = begin_run(made, checked)
            watch = _StepWatch(RunFolder(made), checked.own.ranks, search, trial)
            why = ended_because(supervisor_of(made, lock, checked, watch, _interrupt).run())
    except _Measured:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        trial.seconds = time.monotonic() - start
        search.ended(trial, "" if trial.speeds else "interrupted before it was measured")
        raise
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
    return with_memory_named(said) if outcome.exit_code else "its data ended before it was measured"


def with_memory_named(said: str) -> str:
    """Return why a trial died, marked if it was for lack of memory."""
    return f"out of memory: {said}" if any(word in said.lower() for word in _OUT_OF_MEMORY) else said
