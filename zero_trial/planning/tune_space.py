"""The ways to train that `zero-trial tune` compares, and which of them are worth a trial. Pure.

ways_to_train   every ZeRO stage, micro-batch and schedule at the same global batch, each with
                a ladder of savers: ways to save memory, the one that costs least time first
select          of each ladder the first way that fits; of the micro-batches the largest ones
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_trial.errors import ConfigError
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
# the fewest idle ranks for little memory, for more memory, and with more messages
_SCHEDULES: tuple[Mapping[str, Any], ...] = (
    {_SCHEDULE: "1f1b", _CHUNKS: 1},
    {_SCHEDULE: "interleaved", _CHUNKS: 2},
    {_SCHEDULE: "zb_h1", _CHUNKS: 1},
)


@dataclass(frozen=True)
class TuneFacts:
    """What stays as it is, and what the ds_config has now.

    Args:
        samples: of one optimizer step on one data-parallel rank.
        current: the values that the ds_config has for the keys above, by dotted key; of those in
            ``_OFF`` and of ``nvme_path`` only what saves memory now.
        accelerator: whether ranks compute on GPUs, so that the host's memory is another one.
        nvme_path: the folders for state that leaves for a disk; none where none is named.
        pipe: pipeline stages.
        keep: dotted keys and sections that stay as they are.
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
    """One way to train: the values of the keys that differ between ways. ``ladder`` names what it
    shares with the ways that differ from it in micro-batch and savers only."""

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
    """Return the keys and sections of ``--keep`` by their own names. Raises ConfigError for one
    that is the same in all ways, so that a slip is not taken for a wish."""
    found = tuple(word.removeprefix("hyperparameters.ds_config.") for word in words)
    for key in found:
        if not any(_is_kept(tuned, (key,)) for tuned in _TUNED):
            raise ConfigError(
                "no way to train changes this key",
                where="--keep",
                got=key,
                expected=", ".join(_TUNED),
                fix=did_you_mean(key, _TUNED) or "Leave it out: it stays as it is.",
            )
    return found


def _is_kept(key: str, keep: Collection[str]) -> bool:
    """Return whether a key, a section around it, or the device that its path is of is kept."""
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
    """Return the way that the ds_config names now: the one of ``ways_to_train`` where it is among
    them."""
    values = {STAGE: facts.current[STAGE], MICRO: facts.current[MICRO], ACCUMULATION: facts.current[ACCUMULATION]}
    keys = (*((_SCHEDULE, _CHUNKS) if facts.pipe > 1 else ()), *_OFF, *_PATHS)
    values |= {key: facts.current[key] for key in keys if key in facts.current and not _is_kept(key, facts.keep)}
    known = next((way for way in ways_to_train(facts) if way.mapping == values), None)
    if known is not None:
        return known
    ladder = tuple((key, value) for key, value in values.items() if key not in (MICRO, ACCUMULATION))
    return TrainingWay(tuple(values.items()), ladder)


def _schedules(facts: TuneFacts) -> list[dict[str, Any]]:
    """Return the values of each schedule that is not kept; without a pipeline, nothing once."""
    found = [{key: value for key, value in each.items() if not _is_kept(key, facts.keep)} for each in _SCHEDULES]
    return [each for place, each in enumerate(found) if each not in found[:place]] if facts.pipe > 1 else [{}]


def _savers(facts: TuneFacts, stage: int, accumulation: int) -> list[dict[str, Any]]:
    """Return the ladder of a stage: values to set, from what moves least to what holds least.
    Savers that the ds_config has switched on are off where a rung does not need them."""
    several = accumulation > 1
    found: list[dict[str, Any]] = [{}]
    if facts.pipe > 1:
        found.append({_INTERVAL: 1})
    elif stage == 2 and several:
        found.append({_REDUCE: "micro"})
    elif stage == 3:
        fast = {_RESHARD: "step", **({_REDUCE: "boundary"} if several else {})}
        least = {_RESHARD: "forward", **({_REDUCE: "micro"} if several else {})}
        # by default all of a small model always lives
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
    """What the plan says of a way: bytes of one rank, seconds of a step as an estimate that is good
    for comparing only; or why there is no plan.

    ``samples``: of a micro-batch as the trial's loader gave it; None if unknown.
    """

    bytes: int = 0
    seconds: float = 0.0
    refusal: str = ""
    samples: int | None = None


def of_other_samples(way: TrainingWay, found: Weighed, own: TrainingWay, configured: Weighed) -> Weighed:
    """Return ``found``, refused if a step of ``way`` would train on more or fewer samples than a
    step of ``own``: its loader does not follow the micro-batch.

    Args:
        configured: what is known of ``own``; without a plan of it, batches must be as large as the
            micro-batch.
    """
    if found.refusal or found.samples is None:
        return found
    step = found.samples * int(way.mapping[ACCUMULATION])
    given = configured.samples if configured.samples is not None else own.micro_batch
    expected = given * int(own.mapping[ACCUMULATION])
    if step == expected:
        return found
    why = (
        f"the loader gives batches of {found.samples} samples (the first tensor's first dimension), so a step would "
        f"train on {step} and not on {expected}. "
        f"Size its batches by context.get_train_micro_batch_size_per_gpu(), or give --keep {MICRO}."
    )
    return replace(found, refusal=why)


@dataclass(frozen=True)
class Margin:
    """What one rank needs in addition to the planned tensors: a part of them for the allocator, and
    the process (interpreter, libraries, a GPU's context)."""

    part: float
    process: int

    def needed(self, planned: int) -> int:
        """Return the bytes that a rank needs if its tensors take ``planned``."""
        return int(planned * (1 + self.part)) + self.process


@dataclass(frozen=True)
class Selection:
    """The ways that are worth a trial, the first one to try first, and why each other one is
    not."""

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
    """Return of each ladder and micro-batch the first way that fits, and of each ladder the
    ``sizes`` largest micro-batches that do; ``own`` whenever it fits, and first. The others are
    ordered by their estimated time.

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
            pruned.append((way, "not needed: the same without it fits"))
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
