"""Rules between keys: pairs that exclude each other, and keys that need another one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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
Get = Callable[[str], Any]
Rule = Callable[[Get, Where], Iterator[ConfigError]]


class _Undecided(Exception):
    """A rule asked for a key whose "auto" is still to be filled in."""


def cross_faults(values: Values, document: Document, still_auto: Collection[str] = ()) -> list[ConfigError]:
    """Return all faults between keys; ``values`` maps dotted paths to what was given, the rest are
    defaults. A rule that asks for one of ``still_auto`` finds nothing.
    """

    def get(path: str) -> Any:
        if path in still_auto:
            raise _Undecided
        return values.get(path, TABLE[path].default)

    found: list[ConfigError] = []
    for rule in _RULES:
        with suppress(_Undecided):
            found += rule(get, document.where)
    return found


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
    kind, given = str(document.get(("scheduler", "type"))), document.get(("scheduler", "params"))
    name, peak = peak_rate(kind, given if isinstance(given, Mapping) else {})
    if peak in (None, "auto"):
        return []
    used = peak if isinstance(peak, list | tuple) else [peak]  # a list has a rate for each group
    rates = {key: document.get(("optimizer", "params", key)) for key in ("lr", "muon_lr", "adam_lr")}
    rates = {key: rate for key, rate in rates.items() if isinstance(rate, int | float) and not isinstance(rate, bool)}
    fix = f"Change scheduler.params.{name} instead."
    if rates.keys() & {"muon_lr", "adam_lr"} and "cycle" not in kind.lower():
        fix = "Use WarmupLR without warmup_max_lr, or WarmupCosineLR: each group then rises to its own rate."
    elif name == "warmup_max_lr":
        fix = f'Write "auto" for scheduler.params.{name}: one key then sets both.'
    what = f"the learning rate is not used: the scheduler {kind} sets it"
    expected = f"scheduler.params.{name}, which is {shown(peak)}"

    def fault(key: str, rate: float) -> ConfigError:
        where = document.where(f"optimizer.params.{key}")
        return ConfigError(what, where=where, got=rate, expected=expected, fix=fix)

    return [(key, fault(key, rate)) for key, rate in rates.items() if rate not in used]


def _plan(get: Get) -> tuple[int, ZeroPlan]:
    """Return the ZeRO stage, for messages, and what it means, on a device that ``offload_param``
    moves parameters away from."""
    stage, away = get("zero_optimization.stage"), get("zero_optimization.offload_param.device")
    return stage, plan_for_stage(stage, home=Home.DEVICE if away == "none" else Home(away))


def _one_precision(get: Get, where: Where) -> Iterator[ConfigError]:
    if get("fp16.enabled") and get("bf16.enabled"):
        fix = "Keep bf16: set fp16.enabled to false."
        yield ConfigError("fp16 and bf16 are both enabled", where=where("fp16.enabled"), fix=fix)


def _autocast_alone(get: Get, where: Where) -> Iterator[ConfigError]:
    half = [name for name in ("fp16", "bf16") if get(f"{name}.enabled")]
    if half and get("torch_autocast.enabled"):
        yield ConfigError(
            f"torch_autocast and {half[0]} are both enabled",
            where=where("torch_autocast.enabled"),
            fix=f"Keep one: autocast over fp32 parameters, or {half[0]} parameters.",
        )


def _param_dtype_is_the_mode(get: Get, where: Where) -> Iterator[ConfigError]:
    asked = get("data_types.param_dtype")
    mode = next((name for name in ("fp16", "bf16") if get(f"{name}.enabled")), "fp32")
    if asked not in (None, mode):
        yield ConfigError(
            "not the dtype of the precision mode",
            where=where("data_types.param_dtype"),
            got=f'"{asked}"',
            expected=f'"{mode}"',
            fix="Remove it." if asked == "fp32" else f"Remove it, or set {asked}.enabled to true.",
        )


def _mics_is_the_shard_axis(get: Get, where: Where) -> Iterator[ConfigError]:
    path = "zero_optimization.mics_shard_size"
    mics = get(path)
    if mics == 0:
        yield ConfigError("not a size", where=where(path), got=0, expected="a positive integer, or -1 for no limit")
    elif mics is not None and get("mesh.shard") not in (None, mics):
        shard = get("mesh.shard")
        yield ConfigError(
            "differs from mesh.shard", where=where(path), got=mics, expected=shard, fix="Keep mesh.shard."
        )


def _one_format_of_states(get: Get, where: Where) -> Iterator[ConfigError]:
    path = "data_types.optimizer_states"
    asked = get(path)
    if asked == "8bit":
        yield ConfigError(
            "zero_trial's own optimizers store no 8-bit states",
            where=where(path),
            got='"8bit"',
            expected='"fp32" or "bf16"',
            fix="Remove the key and pass optimizer=bitsandbytes.optim.AdamW8bit(...) or torchao's to initialize().",
        )
    elif get("bf16.bf16_optimizer_states") and asked not in (None, "bf16"):
        yield ConfigError(
            "contradicts data_types.optimizer_states",
            where=where("bf16.bf16_optimizer_states"),
            got="true",
            expected=f'"{asked}"',
            fix="Keep one of the two.",
        )


def _nvme_needs_a_path(path: str, get: Get, where: Where) -> Iterator[ConfigError]:
    if get(f"{path}.device") == "nvme" and not get(f"{path}.nvme_path"):
        yield ConfigError("nvme needs a folder", where=where(f"{path}.device"), fix=f"Set {path}.nvme_path.")


def _reshard_is_for_stage_3(get: Get, where: Where) -> Iterator[ConfigError]:
    path = "zero_optimization.reshard_after"
    stage, plan = _plan(get)
    if get(path) != "auto" and not plan.frees_parameters:
        yield ConfigError(
            f"parameters are never freed at ZeRO stage {stage}",
            where=where(path),
            got=f'"{get(path)}"',
            fix="Remove it, or set zero_optimization.stage to 3 or offload_param.",
        )


def _chunks_fit_the_schedule(get: Get, where: Where) -> Iterator[ConfigError]:
    path, schedule = "pipeline.chunks_per_rank", get("pipeline.schedule")
    asked, fixed = get(path), SCHEDULE_CHUNKS[schedule]
    if asked != "auto" and fixed not in (None, asked):
        several = " or ".join(name for name, chunks in SCHEDULE_CHUNKS.items() if chunks is None)
        yield ConfigError(
            f"the schedule {schedule} has a fixed number of chunks per rank",
            where=where(path),
            got=asked,
            expected=fixed,
            fix=f"Remove it, or set pipeline.schedule to {several}.",
        )


def _policy_is_for_the_stage(get: Get, where: Where) -> Iterator[ConfigError]:
    path, (stage, plan) = "pipeline.zero_policy", _plan(get)
    policy = get(path)
    if policy in ("chunk", "free") and not plan.frees_parameters:
        what = f"parameters are never freed at ZeRO stage {stage}"
        fix = "Remove it, or set zero_optimization.stage to 3."
        yield ConfigError(what, where=where(path), got=f'"{policy}"', fix=fix)
    elif policy == "micro" and plan.grads is Lifetime.ALWAYS:
        what = f"full gradients live at ZeRO stage {stage}, so reducing them more often saves nothing"
        fix = "Remove it, or set zero_optimization.stage to 2 or 3."
        yield ConfigError(what, where=where(path), got=f'"{policy}"', fix=fix)


def _policies_agree(get: Get, where: Where) -> Iterator[ConfigError]:
    """Yield the fault where zero_policy and the keys for a model without a pipeline contradict."""
    path, zero = "pipeline.zero_policy", "zero_optimization"
    policy, reduce_every = get(path), get(f"{zero}.reduce_every")
    reshard = RESHARDS.get(get(f"{zero}.reshard_after"))
    for other, value, words in (("reduce_every", reduce_every, REDUCTIONS), ("reshard_after", reshard, LIFETIMES)):
        if policy in words and value in words and policy != value:
            yield ConfigError(
                f"contradicts {zero}.{other}",
                where=where(path),
                got=f'"{policy}"',
                expected=f'"{value}"',
                fix=f"Keep one of them: {zero}.{other} is {shown(get(f'{zero}.{other}'))}.",
            )


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
