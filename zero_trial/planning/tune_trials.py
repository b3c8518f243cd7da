"""What `zero-trial tune` does with a way to train: plan it in this process, and measure it in a
short run."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_trial.ds_config.keys_running import SCHEDULE_CHUNKS, AutotuningSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, ExitStatus, ZeroTrialError
from zero_trial.experiment.experiment import KeyPath, read_words
from zero_trial.launch.run_experiment import CheckedRun, RunRequest, check_run, read_summary, run_experiment
from zero_trial.launch.screen import Screen
from zero_trial.planning.compare import PlannedMachine, Planner, trial_planner
from zero_trial.planning.lone_task import DryRunRequest
from zero_trial.planning.tune_space import ACCUMULATION, MICRO, STAGE, TrainingWay, TuneFacts, Weighed, kept_keys
from zero_trial.sharding.plan import Reshard, plan_for_stage
from zero_trial.trial.runs.run_layout import new_run_folder
from zero_trial.util.memory import machine_memory
from zero_trial.util.speed import SPEED_METRIC
from zero_trial.util.text import format_bytes

# Elements per second between GPUs and between CPU ranks of one host, seconds to launch a
# micro-batch, bytes per second to the host and to a disk. Good for an order, not for a time.
_GPU_LINK, _CPU_LINK, _MICRO_BATCH, _TO_HOST, _TO_DISK = 1e11, 2.5e9, 1e-3, 2e10, 1e9
_AGAIN = 4 / 3  # the time of a step that computes its forwards twice
_MONITORS = ("wandb", "comet", "tensorboard", "csv_monitor")
_FEWEST = 3  # trials


def facts_of(checked: CheckedRun, *, keep: Sequence[str], accelerator: bool) -> TuneFacts:
    """Return what the tuner needs to know of an experiment whose ranks compute on GPUs
    (``accelerator``) or not. Raises ConfigError if the trial gives its ds_config itself."""
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
    current |= _savers_now(config, accelerator)
    places = (zero.offload_optimizer, zero.offload_param)
    return TuneFacts(
        samples=batch.batch.micro_batch_size * batch.batch.accumulation,
        current=current,
        accelerator=accelerator,
        nvme_path=next((place.nvme_path for place in places if place is not None and place.nvme_path), ()),
        pipe=batch.axes.pipe,
        keep=kept_keys(keep),
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


def changes_of(way: TrainingWay) -> dict[KeyPath, Any]:
    """Return the values of a way as changes of the experiment."""
    return dict(read_words(f"{key}={json.dumps(value)}" for key, value in way.values).changes)


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
    zero, link = planner.settings.zero_optimization, _CPU_LINK if planner.device.type == "cpu" else _GPU_LINK
    lives = plan_for_stage(zero.stage, reduce_every=zero.reduce_every, reshard_after=zero.reshard_after)
    # the volumes of zero_trial/sharding/plan.py
    reductions = own.accumulation if lives.reduces_every_micro_batch else 1
    freed = lives.gathers_parameters and lives.reshard is Reshard.AFTER_FORWARD
    sent = (reductions + (2 * own.accumulation if freed else 1)) * own.parameter_count
    seconds = sent / link + own.accumulation * _MICRO_BATCH
    return Weighed(figures.total, seconds + 2 * figures.host / _TO_HOST + 2 * figures.disk / _TO_DISK)


def search_budget(
    tuning: AutotuningSection, fitting: int, trials: int | None = None, steps: int | None = None
) -> tuple[int, int]:
    """Return the most trials among ``fitting`` ways, and the optimizer steps of each, by
    ds_config's autotuning section and what the command line asks for. Raises ConfigError."""
    for option, value in ("--trials", trials), ("--steps", steps):
        if value is not None and value < 1:
            raise ConfigError("there is nothing to measure", where=option, got=value, expected="at least 1")
    whole = tuning.tuner_type == "gridsearch" or not tuning.fast
    wanted = trials or tuning.tuner_num_trials or (fitting if whole else max(_FEWEST, fitting // 4))
    measured = steps or tuning.end_profile_step - tuning.start_profile_step + 1
    # the first step is never measured: nothing says when it began
    return min(wanted, fitting), max(tuning.start_profile_step - 1, 1) + measured


def refuse_autotuning(tuning: AutotuningSection, batch: int) -> None:
    """Raise ConfigError for what the autotuning section asks for and this tuner does not do, with
    a global batch of ``batch`` samples."""
    if tuning.tuner_type == "random":
        raise ConfigError(
            "ways are not tried in random order",
            where="autotuning.tuner_type",
            got="random",
            expected="model_based or gridsearch",
        )
    most = tuning.max_train_batch_size
    if batch < tuning.min_train_batch_size or (most is not None and batch > most):
        raise ConfigError(
            "the global batch stays as it is, because another one trains something else",
            where=f"autotuning.{'min' if batch < tuning.min_train_batch_size else 'max'}_train_batch_size",
            got=f"train_batch_size {batch}",
            fix="Set train_batch_size, or remove the limit.",
        )
    if tuning.end_profile_step < tuning.start_profile_step:
        raise ConfigError(
            "there are no steps to measure",
            where="autotuning.end_profile_step",
            got=tuning.end_profile_step,
            expected=f"at least start_profile_step {tuning.start_profile_step}",
        )


@dataclass(frozen=True)
class TuneTrial:
    """What was measured of a way: steps per second, or None and ``why``; the ``seconds`` that it
    took."""

    way: TrainingWay
    speed: float | None
    why: str
    seconds: float


def changes_of_trial(way: TrainingWay, steps: int) -> dict[KeyPath, Any]:
    """Return what a trial changes in the experiment: the values of its way, and what makes the
    trial report its speed after ``steps``, save nothing and write to no monitor."""
    return {
        **changes_of(way),
        ("searcher", "metric"): SPEED_METRIC,
        ("searcher", "smaller_is_better"): False,
        ("searcher", "max_length"): {"batches": steps},
        ("perform_initial_validation",): False,
        ("min_validation_period",): {"batches": 0},
        ("min_checkpoint_period",): {"batches": 0},
        ("max_restarts",): 0,
        **{("hyperparameters", "ds_config", monitor, "enabled"): False for monitor in _MONITORS},
    }


def run_trial(request: RunRequest, way: TrainingWay, steps: int, screen: Screen, env: Mapping[str, str]) -> TuneTrial:
    """Train a way for ``steps`` as ``zero-trial run`` does; the folder stays only if the trial
    failed.

    Raises KeyboardInterrupt if the user ended it.
    """
    start, folder = time.monotonic(), new_run_folder(Path("tunes"))
    speed, why = None, ""
    asked = replace(request, changes={**request.changes, **changes_of_trial(way, steps)}, run_dir=folder)
    try:
        outcome, _ = run_experiment(check_run(asked, env), asked, screen)
        ended = outcome.cause.headline.splitlines()[0] if outcome.cause is not None else ""
        if outcome.exit_code == ExitStatus.PREEMPTED or ended.startswith("stopped by SIG"):
            shutil.rmtree(folder)
            raise KeyboardInterrupt
        summary = read_summary(folder) or {}
        speed = summary.get("final_validation", {}).get(SPEED_METRIC) if not outcome.exit_code else None
        why = "" if speed is not None else f"{ended or f'exit code {outcome.exit_code}'}; see {folder}"
    except ZeroTrialError as error:
        why = " ".join(str(error).split())
    if not why:
        shutil.rmtree(folder)
    return TuneTrial(way, speed, why, time.monotonic() - start)
