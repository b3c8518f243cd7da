"""Rules between keys: pairs that exclude each other, and keys that need another one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zero_trial.ds_config.keys_running import LIFETIMES, REDUCTIONS, RESHARDS, SCHEDULE_CHUNKS
from zero_trial.ds_config.table import TABLE
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, shown
from zero_trial.sharding.plan import Home, Lifetime, ZeroPlan, plan_for_stage

Values = Mapping[str, Any]
Where = Callable[[str], str]
Rule = Callable[[Values, Where], ConfigError | None]

_OPEN = object()  # the value of a key whose "auto" is still to be filled in


class _Undecided(Exception):
    """A rule asked for a key whose "auto" is still to be filled in."""


def cross_faults(values: Values, document: Document, still_auto: Collection[str] = ()) -> list[ConfigError]:
    """Return all faults between keys; ``values`` maps dotted paths to what was given, the rest are
    defaults. A rule that asks for one of ``still_auto`` finds nothing.
    """
    known = {**values, **dict.fromkeys(still_auto, _OPEN)}
    found = []
    for rule in _RULES:
        with suppress(_Undecided):
            found.append(rule(known, lambda path: document.at(tuple(path.split("."))).where(path)))
    return [fault for fault in found if fault is not None]


_PEAK_RATES: Mapping[str, tuple[str, float | None]] = {
    "warmuplr": ("warmup_max_lr", None),
    "warmupdecaylr": ("warmup_max_lr", 0.001),
    "onecycle": ("cycle_max_lr", None),
    "lrrangetest": ("lr_range_test_min_lr", 0.001),
    "onecyclelr": ("max_lr", None),
    "cycliclr": ("max_lr", None),
}
"""Scheduler -> its parameter that sets the learning rate, and that parameter's default."""


def peak_rate(kind: str, params: Values) -> tuple[str, Any]:
    """Return the parameter with which the scheduler ``kind`` sets the learning rate, and its value;
    ("", None) where each group keeps its own."""
    name, default = _PEAK_RATES.get(kind.lower(), ("", None))
    given = params.get(name)
    return (name, given) if given is not None else (name, default) if default is not None else ("", None)


def unused_rates(document: Document) -> list[tuple[str, ConfigError]]:
    """Return each learning rate of ``optimizer.params`` that no step uses, because the scheduler
    sets another, by its name, with its fault. Muon has two more, ``muon_lr`` and ``adam_lr``."""
    kind = str(document.get(("scheduler", "type"))).lower()
    given: Any = document.get(("scheduler", "params"))
    name, peak = peak_rate(kind, given if isinstance(given, Mapping) else {})
    if peak in (None, "auto"):
        return []
    used = list(peak) if _is_list(peak) else [peak]  # a list has a rate for each group
    rates = {key: document.get(("optimizer", "params", key)) for key in ("lr", "muon_lr", "adam_lr")}
    several = _is_number(rates["muon_lr"]) or _is_number(rates["adam_lr"])
    fix = f"Change scheduler.params.{name} instead."
    if several and "cycle" not in kind:
        fix = "Use WarmupLR without warmup_max_lr, or WarmupCosineLR: each group then rises to its own rate."
    elif name == "warmup_max_lr":
        fix = f'Write "auto" for scheduler.params.{name}: one key then sets both.'
    return [
        (
            key,
            ConfigError(
                f"the learning rate is not used: the scheduler {document.get(('scheduler', 'type'))} sets it",
                where=document.at(("optimizer", "params", key)).where(f"optimizer.params.{key}"),
                got=rate,
                expected=f"scheduler.params.{name}, which is {shown(peak)}",
                fix=fix,
            ),
        )
        for key, rate in rates.items()
        if _is_number(rate) and rate not in used
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _get(values: Values, path: str) -> Any:
    value = values.get(path, TABLE[path].default)
    if value is _OPEN:
        raise _Undecided
    return value


def _plan(values: Values) -> tuple[int, ZeroPlan]:
    """Return the ZeRO stage, for messages, and what it means, on a device that ``offload_param``
    moves parameters away from."""
    stage: int = _get(values, "zero_optimization.stage")
    away = _get(values, "zero_optimization.offload_param.device")
    return stage, plan_for_stage(stage, home=Home.DEVICE if away == "none" else Home(away))


def _one_precision(values: Values, where: Where) -> ConfigError | None:
    if not (_get(values, "fp16.enabled") and _get(values, "bf16.enabled")):
        return None
    return ConfigError(
        "fp16 and bf16 are both enabled", where=where("fp16.enabled"), fix="Keep bf16: set fp16.enabled to false."
    )


def _autocast_alone(values: Values, where: Where) -> ConfigError | None:
    half = [name for name in ("fp16", "bf16") if _get(values, f"{name}.enabled")]
    if not half or not _get(values, "torch_autocast.enabled"):
        return None
    return ConfigError(
        f"torch_autocast and {half[0]} are both enabled",
        where=where("torch_autocast.enabled"),
        fix=f"Keep one: autocast over fp32 parameters, or {half[0]} parameters.",
    )


def _param_dtype_is_the_mode(values: Values, where: Where) -> ConfigError | None:
    asked = _get(values, "data_types.param_dtype")
    mode = next((name for name in ("fp16", "bf16") if _get(values, f"{name}.enabled")), "fp32")
    if asked is None or asked == mode:
        return None
    fix = "Remove it." if asked == "fp32" else f"Remove it, or set {asked}.enabled to true."
    return ConfigError(
        "not the dtype of the precision mode",
        where=where("data_types.param_dtype"),
        got=f'"{asked}"',
        expected=f'"{mode}"',
        fix=fix,
    )


def _mics_is_the_shard_axis(values: Values, where: Where) -> ConfigError | None:
    path = "zero_optimization.mics_shard_size"
    if (mics := _get(values, path)) == 0:
        return ConfigError("not a size", where=where(path), got=0, expected="a positive integer, or -1 for no limit")
    shard = _get(values, "mesh.shard")
    if mics is None or shard is None or mics == shard:
        return None
    return ConfigError("differs from mesh.shard", where=where(path), got=mics, expected=shard, fix="Keep mesh.shard.")


def _one_format_of_states(values: Values, where: Where) -> ConfigError | None:
    path = "data_types.optimizer_states"
    asked = _get(values, path)
    if asked == "8bit":
        return ConfigError(
            "zero_trial's own optimizers store no 8-bit states",
            where=where(path),
            got='"8bit"',
            expected='"fp32" or "bf16"',
            fix="Remove the key and pass optimizer=bitsandbytes.optim.AdamW8bit(...) or torchao's to initialize().",
        )
    if not _get(values, "bf16.bf16_optimizer_states") or asked in (None, "bf16"):
        return None
    return ConfigError(
        "contradicts data_types.optimizer_states",
        where=where("bf16.bf16_optimizer_states"),
        got="true",
        expected=f'"{asked}"',
        fix="Keep one of the two.",
    )


def _nvme_needs_a_path(path: str, values: Values, where: Where) -> ConfigError | None:
    if _get(values, f"{path}.device") != "nvme" or _get(values, f"{path}.nvme_path"):
        return None
    return ConfigError("nvme needs a folder", where=where(f"{path}.device"), fix=f"Set {path}.nvme_path.")


def _reshard_is_for_stage_3(values: Values, where: Where) -> ConfigError | None:
    path = "zero_optimization.reshard_after"
    stage, plan = _plan(values)
    if _get(values, path) == "auto" or plan.frees_parameters:
        return None
    return ConfigError(
        f"parameters are never freed at ZeRO stage {stage}",
        where=where(path),
        got=f'"{values[path]}"',
        fix="Remove it, or set zero_optimization.stage to 3 or offload_param.",
    )


def _chunks_fit_the_schedule(values: Values, where: Where) -> ConfigError | None:
    path, schedule = "pipeline.chunks_per_rank", _get(values, "pipeline.schedule")
    asked, fixed = _get(values, path), SCHEDULE_CHUNKS[schedule]
    if asked == "auto" or fixed is None or asked == fixed:
        return None
    several = " or ".join(name for name, chunks in SCHEDULE_CHUNKS.items() if chunks is None)
    return ConfigError(
        f"the schedule {schedule} has a fixed number of chunks per rank",
        where=where(path),
        got=asked,
        expected=fixed,
        fix=f"Remove it, or set pipeline.schedule to {several}.",
    )


def _policy_is_for_the_stage(values: Values, where: Where) -> ConfigError | None:
    path, (stage, plan) = "pipeline.zero_policy", _plan(values)
    policy = _get(values, path)
    if policy in ("chunk", "free") and not plan.frees_parameters:
        what, fix = (
            f"parameters are never freed at ZeRO stage {stage}",
            "Remove it, or set zero_optimization.stage to 3.",
        )
    elif policy == "micro" and plan.grads is Lifetime.ALWAYS:
        what = f"full gradients live at ZeRO stage {stage}, so reducing them more often saves nothing"
        fix = "Remove it, or set zero_optimization.stage to 2 or 3."
    else:
        return None
    return ConfigError(what, where=where(path), got=f'"{policy}"', fix=fix)


def _policies_agree(values: Values, where: Where) -> ConfigError | None:
    """Return the fault where zero_policy and the keys for a model without a pipeline contradict."""
    path = "pipeline.zero_policy"
    policy = _get(values, path)
    reduce_every = _get(values, "zero_optimization.reduce_every")
    reshard = RESHARDS.get(_get(values, "zero_optimization.reshard_after"))
    for other, value, words in (("reduce_every", reduce_every, REDUCTIONS), ("reshard_after", reshard, LIFETIMES)):
        if policy in words and value in words and policy != value:
            full = f"zero_optimization.{other}"
            return ConfigError(
                f"contradicts {full}",
                where=where(path),
                got=f'"{policy}"',
                expected=f'"{value}"',
                fix=f"Keep one of them: {full} is {shown(_get(values, full))}.",
            )
    return None


_RULES: tuple[Rule, ...] = (
    _one_precision,
    _autocast_alone,
    _param_dtype_is_the_mode,
    _mics_is_the_shard_axis,
    _one_format_of_states,
    partial(_nvme_needs_a_path, "zero_optimization.offload_optimizer"),
    partial(_nvme_needs_a_path, "zero_optimization.offload_param"),
    _reshard_is_for_stage_3,
    _chunks_fit_the_schedule,
    _policy_is_for_the_stage,
    _policies_agree,
)
