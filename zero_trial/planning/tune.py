"""The ways to train that `zero-trial tune` compares, and how it plans and measures one.

ways_to_train   every ZeRO stage, micro-batch and schedule at the same global batch, each with
                a ladder of savers: ways to save memory, the one that costs the least time first
select          the first way of each ladder that fits, for the largest micro-batches
weigh_way       plans a way in this process
run_trial       measures a way in a short run
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_trial.ds_config.keys_running import MONITORS, SCHEDULE_CHUNKS, AutotuningSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, ExitStatus, ZeroTrialError
from zero_trial.experiment.experiment import KeyPath, read_words
from zero_trial.launch.run_experiment import CheckedRun, RunRequest, check_run, run_experiment
from zero_trial.launch.screen import Screen
from zero_trial.planning.lone_task import DryRunRequest, PlannedMachine, trial_planner
from zero_trial.planning.planner import PipelinePlanner, Planner
from zero_trial.sharding.plan import Reshard, plan_for_stage
from zero_trial.trial.metrics import SPEED_METRIC
from zero_trial.trial.runs.events import read_json
from zero_trial.trial.runs.run_layout import RunFolder, new_run_folder
from zero_trial.util.memory import machine_memory
from zero_trial.util.text import did_you_mean, format_bytes

STAGE = "zero_optimization.stage"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
_REDUCE = "zero_optimization.reduce_every"
_RESHARD = "zero_optimization.reshard_after"
_PREFETCH = "zero_optimization.prefetch_bucket_size"
_PERSISTENCE = "zero_optimization.param_persistence_threshold"
_SCHEDULE = "pipeline.schedule"
_CHUNKS = "pipeline.chunks_per_rank"
_INTERVAL = "pipeline.activation_checkpoint_interval"
_OPTIMIZER_AWAY = "zero_optimization.offload_optimizer"
_PARAMETERS_AWAY = "zero_optimization.offload_param"

_STAGES = (0, 1, 2, 3)
_OFF: Mapping[str, Any] = {
    f"{_OPTIMIZER_AWAY}.device": "none",
    f"{_PARAMETERS_AWAY}.device": "none",
    _REDUCE: "auto",
    _INTERVAL: 0,
}
"""The savers that a ds_config may have switched on, and what switches them off."""
_PATHS = (f"{_OPTIMIZER_AWAY}.nvme_path", f"{_PARAMETERS_AWAY}.nvme_path")
_TUNED = (
    *(STAGE, MICRO, ACCUMULATION, _RESHARD, _PREFETCH, _PERSISTENCE, _SCHEDULE, _CHUNKS),
    *_OFF,
    *_PATHS,
)
# fewest idle ranks: for little memory, for more memory, and with more messages
_SCHEDULES: tuple[Mapping[str, Any], ...] = (
    {_SCHEDULE: "1f1b", _CHUNKS: 1},
    {_SCHEDULE: "interleaved", _CHUNKS: 2},
    {_SCHEDULE: "zb_h1", _CHUNKS: 1},
)


@dataclass(frozen=True)
class TuneFacts:
    """The settings shared by all ways, and the current values in ds_config.

    Args:
        samples: samples of one optimizer step on one data-parallel rank.
        current: the ds_config's values for the keys above, by dotted key; for those in ``_OFF`` and
            for ``nvme_path``, only values that save memory now.
        accelerator: whether ranks compute on GPUs, so that the host's memory is separate.
        nvme_path: the folders for state that moves to a disk; empty if none is configured.
        pipe: pipeline stages.
        keep: dotted keys and sections that must not change.
        smallest, largest: limits of the micro-batch.
    """

    samples: int
    current: Mapping[str, Any]
    accelerator: bool = False
    nvme_path: tuple[str, ...] = ()
    pipe: int = 1
    keep: Collection[str] = ()
    smallest: int = 1
    largest: int = 1024


@dataclass(frozen=True)
class TrainingWay:
    """One way to train: the values of the keys that differ between ways. ``ladder`` is equal for
    ways that differ only in micro-batch and savers."""

    values: tuple[tuple[str, Any], ...]
    ladder: tuple[tuple[str, Any], ...]

    @property
    def mapping(self) -> dict[str, Any]:
        return dict(self.values)

    @property
    def micro_batch(self) -> int:
        return int(self.mapping[MICRO])

    @property
    def name(self) -> str:
        """Return ``ZeRO-2, micro batch 8 x 2, reduce_every micro``."""
        found = self.mapping
        parts = [f"ZeRO-{found.pop(STAGE)}", f"micro batch {found.pop(MICRO)} x {found.pop(ACCUMULATION)}"]
        for key, value in found.items():
            section, _, last = key.rpartition(".")
            if last != "nvme_path":
                parts.append(f"{section.rpartition('.')[2] if last == 'device' else last} {value}")
        return ", ".join(parts)


def kept_keys(words: Iterable[str]) -> tuple[str, ...]:
    """Return the keys and sections of ``--keep`` by their canonical names. Raises ConfigError for a
    key that no way changes, to catch mistyped keys."""
    found = tuple(word.removeprefix("hyperparameters.ds_config.") for word in words)
    for key in found:
        if not any(_is_kept(tuned, (key,)) for tuned in _TUNED):
            raise ConfigError(
                "zero-trial tune never changes this key",
                where="--keep",
                got=key,
                expected=", ".join(_TUNED),
                fix=did_you_mean(key, _TUNED) or "Omit it: its value is kept.",
            )
    return found


def _is_kept(key: str, keep: Collection[str]) -> bool:
    """Return whether a key, a section around it, or the device that its path belongs to is kept."""
    same = {key, key.replace(".nvme_path", ".device")}
    return any(each == kept or each.startswith(f"{kept}.") for each in same for kept in keep)


def ways_to_train(facts: TuneFacts) -> list[TrainingWay]:
    """Return every way, ladder by ladder, the largest micro-batch of each first."""
    current = facts.current
    stages = (current[STAGE],) if _is_kept(STAGE, facts.keep) else _STAGES
    sizes = [size for size in range(facts.samples, 0, -1) if facts.samples % size == 0]
    sizes = [size for size in sizes if facts.smallest <= size <= facts.largest]
    sizes = [size for size in sizes if facts.samples // size >= facts.pipe]  # fewer leave ranks idle
    if _is_kept(MICRO, facts.keep) or _is_kept(ACCUMULATION, facts.keep):
        sizes = [current[MICRO]]
    found: dict[tuple[tuple[str, Any], ...], TrainingWay] = {}
    for stage in stages:
        for more in _schedules(facts):
            for size in sizes:
                base = {STAGE: stage, MICRO: size, ACCUMULATION: facts.samples // size, **more}
                ladder = tuple((key, value) for key, value in base.items() if key not in (MICRO, ACCUMULATION))
                for savers in _savers(facts, stage, facts.samples // size):
                    changes = {key: value for key, value in savers.items() if not _is_kept(key, facts.keep)}
                    values = tuple({**base, **changes}.items())
                    found.setdefault(values, TrainingWay(values, ladder))
    return list(found.values())


def own_way(facts: TuneFacts) -> TrainingWay:
    """Return the ds_config's current way, from ``ways_to_train`` if that contains it."""
    values = {STAGE: facts.current[STAGE], MICRO: facts.current[MICRO], ACCUMULATION: facts.current[ACCUMULATION]}
    keys = (*((_SCHEDULE, _CHUNKS) if facts.pipe > 1 else ()), *_OFF, *_PATHS)
    values |= {key: facts.current[key] for key in keys if key in facts.current and not _is_kept(key, facts.keep)}
    known = next((way for way in ways_to_train(facts) if way.mapping == values), None)
    if known is not None:
        return known
    ladder = tuple((key, value) for key, value in values.items() if key not in (MICRO, ACCUMULATION))
    return TrainingWay(tuple(values.items()), ladder)


def _schedules(facts: TuneFacts) -> list[dict[str, Any]]:
    """Return the values of each schedule that is not kept; without a pipeline, one empty dict."""
    found = [{key: value for key, value in each.items() if not _is_kept(key, facts.keep)} for each in _SCHEDULES]
    return [each for place, each in enumerate(found) if each not in found[:place]] if facts.pipe > 1 else [{}]


def _savers(facts: TuneFacts, stage: int, accumulation: int) -> list[dict[str, Any]]:
    """Return the ladder of a stage: values to set, from the least traffic to the least memory.
    Rungs disable savers of the ds_config that they do not need."""
    several = accumulation > 1
    found: list[dict[str, Any]] = [{}]
    if facts.pipe > 1:
        found.append({_INTERVAL: 1})
    elif stage == 2 and several:
        found.append({_REDUCE: "micro"})
    elif stage == 3:
        fast = {_RESHARD: "step", **({_REDUCE: "boundary"} if several else {})}
        least = {_RESHARD: "forward", **({_REDUCE: "micro"} if several else {})}
        # with the defaults a small model is never freed
        found = [fast, {}, least, {**least, _PERSISTENCE: 0, _PREFETCH: 0}]
    places: list[dict[str, Any]] = [{"device": "cpu"}] if facts.accelerator else []
    places += [{"device": "nvme", "nvme_path": facts.nvme_path}] if facts.nvme_path else []
    for place in places:
        for section in (_OPTIMIZER_AWAY, _PARAMETERS_AWAY)[: 2 if facts.pipe == 1 else 1]:
            found.append({**found[-1], **{f"{section}.{key}": value for key, value in place.items()}})
    off = {key: value for key, value in _OFF.items() if key in facts.current}
    return [{**off, **savers} for savers in found]


@dataclass(frozen=True)
class Weighed:
    """The plan of a way: bytes of one rank, and a step's estimated seconds (only for comparing
    ways); or the reason why there is no plan.

    ``samples``: in a micro-batch, as the trial's loader returned it; None if unknown.
    """

    bytes: int = 0
    seconds: float = 0.0
    refusal: str = ""
    samples: int | None = None


def of_other_samples(way: TrainingWay, found: Weighed, own: TrainingWay, configured: Weighed) -> Weighed:
    """Return ``found``; reject it if a step of ``way`` would train on more or fewer samples than a
    step of ``own``, because its loader does not follow the micro-batch.

    Args:
        configured: the plan of ``own``; without one, batches must be as large as the micro-batch.
    """
    if found.refusal or found.samples is None:
        return found
    step = found.samples * int(way.mapping[ACCUMULATION])
    given = configured.samples if configured.samples is not None else own.micro_batch
    expected = given * int(own.mapping[ACCUMULATION])
    if step == expected:
        return found
    why = (
        f"the loader's batches have {found.samples} samples (the first tensor's first dimension), so a step would train on {step} instead of "
        f"{expected}. Set the batch size to context.get_train_micro_batch_size_per_gpu(), or pass --keep {MICRO}."
    )
    return replace(found, refusal=why)


@dataclass(frozen=True)
class Margin:
    """The memory of one rank in addition to the planned tensors: a share of them for the allocator,
    and the process (interpreter, libraries, a GPU's context)."""

    part: float
    process: int

    def needed(self, planned: int) -> int:
        """Return the bytes that a rank needs if its tensors need ``planned`` bytes."""
        return int(planned * (1 + self.part)) + self.process


@dataclass(frozen=True)
class Selection:
    """The ways worth a trial, best first, and the reason why each other way is not."""

    ways: tuple[TrainingWay, ...]
    pruned: tuple[tuple[TrainingWay, str], ...]
    weighed: Mapping[TrainingWay, Weighed]


def select(
    ways: Iterable[TrainingWay],
    weigh: Callable[[TrainingWay], Weighed],
    margin: Margin,
    limit: int | None,
    *,
    sizes: int,
    own: TrainingWay,
) -> Selection:
    """Return the first way of each ladder and micro-batch that fits, for the ``sizes`` largest
    micro-batches of each ladder that do. ``own`` is first if it fits; the others are ordered by
    estimated time.

    Args:
        weigh: plans a way; called only for the ways that are needed.
        limit: bytes of one rank; None if unknown.
    """
    chosen: list[TrainingWay] = []
    pruned: list[tuple[TrainingWay, str]] = []
    weighed = {own: weigh(own)}
    fitting: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for way in ways:
        have = fitting.setdefault(way.ladder, [])
        if way.micro_batch in have and way != own:
            pruned.append((way, "not needed: it already fits without this setting"))
            continue
        if len(have) >= sizes and way != own:
            pruned.append((way, f"not needed: {sizes} larger micro-batches fit"))
            continue
        if way != own:
            weighed[way] = of_other_samples(way, weigh(way), own, weighed[own])
        found = weighed[way]
        needed = margin.needed(found.bytes)
        if found.refusal:
            pruned.append((way, found.refusal))
        elif limit is not None and needed > limit:
            why = f"planned {format_bytes(found.bytes)}, needs {format_bytes(needed)} with the margin"
            pruned.append((way, f"{why}, has {format_bytes(limit)}"))
        else:
            chosen.append(way)
            have += [way.micro_batch] * (way.micro_batch not in have)
    chosen.sort(key=lambda way: (way != own, weighed[way].seconds))
    return Selection(tuple(chosen), tuple(pruned), weighed)


# --- one way: planned, and measured ---

# Elements per second between GPUs and between CPU ranks of one host, seconds to launch a
# micro-batch, bytes per second to the host and to a disk. Only for ranking, not for actual times.
_GPU_LINK, _CPU_LINK, _MICRO_BATCH, _TO_HOST, _TO_DISK = 1e11, 2.5e9, 1e-3, 2e10, 1e9
_AGAIN = 4 / 3  # relative time of a step that computes its forwards twice
_FEWEST = 3  # trials


def facts_of(checked: CheckedRun, *, keep: Sequence[str], accelerator: bool) -> TuneFacts:
    """Return the tuner's facts about an experiment. ``accelerator``: whether ranks compute on GPUs.
    Raises ConfigError if the trial passes its own ds_config."""
    config, batch = checked.ds_config, checked.batch
    if config is None or batch is None:
        raise ConfigError(
            "the trial passes its own ds_config, so zero-trial cannot change its values",
            where=str(checked.experiment_path),
            fix="Name it in data.ds_config, and pass context.get_ds_config() to the trial's engine.",
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
    """Return the savers that the ds_config enables, by dotted key."""
    zero, interval = config.zero_optimization, config.pipeline.activation_checkpoint_interval
    found: dict[str, Any] = {}
    for name, place in ("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param):
        # everything on CPU ranks is in host memory anyway
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
    """Plan a way; an error of the trial or the engine becomes the reason for having no plan."""
    try:
        checked = check_run(replace(request, changes={**request.changes, **changes_of(way)}), env)
        with trial_planner(DryRunRequest.of(checked), machine) as planner:
            memory = None if machine.elsewhere else machine_memory()
            return replace(_weighed(planner, way, checked.own.ranks, memory), samples=planner.samples)
    except ZeroTrialError as error:
        return Weighed(refusal=" ".join(str(error).split()))
    finally:
        gc.collect()  # frees a trial and its data, which reference each other


def _weighed(planner: Planner | PipelinePlanner, way: TrainingWay, ranks: int, memory: int | None) -> Weighed:
    """Return the plan of a way; ``memory`` is the host's, None if unknown."""
    if isinstance(planner, PipelinePlanner):
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
    """Return the maximum number of trials among ``fitting`` ways, and the optimizer steps of each,
    from ds_config's autotuning section and the command line. Raises ConfigError."""
    for option, value in ("--trials", trials), ("--steps", steps):
        if value is not None and value < 1:
            raise ConfigError("there is nothing to measure", where=option, got=value, expected="at least 1")
    whole = tuning.tuner_type == "gridsearch" or not tuning.fast
    wanted = trials or tuning.tuner_num_trials or (fitting if whole else max(_FEWEST, fitting // 4))
    measured = steps or tuning.end_profile_step - tuning.start_profile_step + 1
    # the first step is never measured: its start time is unknown
    return min(wanted, fitting), max(tuning.start_profile_step - 1, 1) + measured


def refuse_autotuning(tuning: AutotuningSection, batch: int) -> None:
    """Raise ConfigError for settings of the autotuning section that this tuner does not support,
    with a global batch of ``batch`` samples."""
    if tuning.tuner_type == "random":
        raise ConfigError(
            "random order is not supported",
            where="autotuning.tuner_type",
            got="random",
            expected="model_based or gridsearch",
        )
    most = tuning.max_train_batch_size
    if batch < tuning.min_train_batch_size or (most is not None and batch > most):
        raise ConfigError(
            "the tuner keeps the global batch, because another size would change training",
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
    """The result of a way: steps per second, or None and ``why``; and the trial's ``seconds``."""

    way: TrainingWay
    speed: float | None
    why: str
    seconds: float


def changes_of_trial(way: TrainingWay, steps: int) -> dict[KeyPath, Any]:
    """Return a trial's changes of the experiment: the values of its way, and settings that make it
    report its speed after ``steps``, save nothing and write to no monitor."""
    return {
        **changes_of(way),
        ("searcher", "metric"): SPEED_METRIC,
        ("searcher", "smaller_is_better"): False,
        ("searcher", "max_length"): {"batches": steps},
        ("perform_initial_validation",): False,
        ("min_validation_period",): {"batches": 0},
        ("min_checkpoint_period",): {"batches": 0},
        ("max_restarts",): 0,
        **{("hyperparameters", "ds_config", monitor, "enabled"): False for monitor in MONITORS},
    }


def run_trial(request: RunRequest, way: TrainingWay, steps: int, screen: Screen, env: Mapping[str, str]) -> TuneTrial:
    """Train a way for ``steps`` as ``zero-trial run`` does; the run's folder is kept only if the
    trial failed.

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
        summary = read_json(RunFolder(folder).summary)
        speed = summary.get("final_validation", {}).get(SPEED_METRIC) if not outcome.exit_code else None
        why = "" if speed is not None else f"{ended or f'exit code {outcome.exit_code}'}; see {folder}"
    except ZeroTrialError as error:
        why = " ".join(str(error).split())
    if not why:
        shutil.rmtree(folder)
    return TuneTrial(way, speed, why, time.monotonic() - start)
