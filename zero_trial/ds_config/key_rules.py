"""Rules of keys. Pure.

between keys   pairs that exclude each other, and keys that need another one
"auto"         what fills it: hyperparameters by name, and formulas of the model's size. The
               names are those of Hugging Face's TrainingArguments and the short ones that
               trials use
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.keys_running import LIFETIMES, REDUCTIONS, RESHARDS, SCHEDULE_CHUNKS
from zero_trial.ds_config.table import TABLE, walk
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, Provenance, shown
from zero_trial.schema.types import Float, Int, Text, ValidationError
from zero_trial.sharding.plan import Home, Lifetime, ZeroPlan, plan_for_stage

Values = Mapping[str, Any]
Where = Callable[[str], str]
Get = Callable[[str], Any]
Rule = Callable[[Get, Where], Iterator[ConfigError]]


class _Undecided(Exception):
    """A rule needs a key whose "auto" is not filled in yet."""


def cross_faults(values: Values, document: Document, still_auto: Collection[str] = ()) -> list[ConfigError]:
    """Return all conflicts between keys. ``values`` maps dotted paths to given values; all others
    are defaults. Skips rules that need a key in ``still_auto``."""

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
    ("", None) if each group keeps its own rate."""
    name, default = _PEAK_RATES.get(kind.lower(), ("", None))
    given = params.get(name)
    return (name, given) if given is not None else (name, default) if default is not None else ("", None)


def unused_rates(document: Document) -> list[tuple[str, ConfigError]]:
    """Return name and error of each learning rate in ``optimizer.params`` that no step uses because
    the scheduler overrides the rate. Muon has two more rates, ``muon_lr`` and ``adam_lr``."""
    kind, given = str(document.get(("scheduler", "type"))), document.get(("scheduler", "params"))
    name, peak = peak_rate(kind, given if isinstance(given, Mapping) else {})
    if peak in (None, "auto"):
        return []
    used = peak if isinstance(peak, list | tuple) else [peak]  # a list has a rate for each group
    rates = {key: document.get(("optimizer", "params", key)) for key in ("lr", "muon_lr", "adam_lr")}
    rates = {key: rate for key, rate in rates.items() if isinstance(rate, int | float) and not isinstance(rate, bool)}
    fix = f"Change scheduler.params.{name} instead."
    if rates.keys() & {"muon_lr", "adam_lr"} and "cycle" not in kind.lower():
        fix = "Use WarmupLR without warmup_max_lr, or WarmupCosineLR: each group then warms up to its own rate."
    elif name == "warmup_max_lr":
        fix = f'Write "auto" for scheduler.params.{name}: one key then sets both.'
    what = f"the learning rate has no effect: the scheduler {kind} sets it"
    expected = f"scheduler.params.{name}, which is {shown(peak)}"

    def fault(key: str, rate: float) -> ConfigError:
        where = document.where(f"optimizer.params.{key}")
        return ConfigError(what, where=where, got=rate, expected=expected, fix=fix)

    return [(key, fault(key, rate)) for key, rate in rates.items() if rate not in used]


def _plan(get: Get) -> tuple[int, ZeroPlan]:
    """Return the ZeRO stage and its plan; ``offload_param.device`` is the parameters' home."""
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
            "zero_trial's own optimizers do not support 8-bit states",
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
    """Yield an error if zero_policy contradicts the keys for a model without a pipeline."""
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


# --- "auto" ---

AUTO = "auto"

Hints = Mapping[str, Any]


class AutoValue(NamedTuple):
    """A value for a key, and its source."""

    value: Any
    source: str


@dataclass(frozen=True)
class AutoRule:
    """The source of the value for "auto".

    Args:
        names: hyperparameters; the first existing one is used.
        compute: if none exists, computes the value from the hints and the document.
        derived: without a source the key is omitted, because another component derives it.
        fill: the hyperparameter also sets a key that ds_config does not contain; a different number
            in ds_config is an error.
    """

    names: tuple[str, ...] = ()
    compute: Callable[[Hints, Document], AutoValue | None] | None = None
    derived: bool = False
    fill: bool = False


def _betas(hints: Hints, _: Document) -> AutoValue | None:
    if "adam_beta1" in hints and "adam_beta2" in hints:
        return AutoValue([hints["adam_beta1"], hints["adam_beta2"]], "hyperparameters adam_beta1, adam_beta2")
    return None


def _peak_lr(hints: Hints, document: Document) -> AutoValue | None:
    found = named(hints, _LR)
    lr = document.get(("optimizer", "params", "lr"))
    return found or (None if lr in (None, AUTO) else AutoValue(lr, "optimizer.params.lr"))


def _warmup_steps(hints: Hints, _: Document) -> AutoValue | None:
    total = named(hints, _TOTAL)
    if total is not None and "warmup_ratio" in hints:
        steps = math.ceil(total.value * hints["warmup_ratio"])
        return AutoValue(steps, f"hyperparameter warmup_ratio of {total.value} steps")
    return None


def _by_hidden(describe: str, formula: Callable[[int], int]) -> Callable[[Hints, Document], AutoValue | None]:
    def compute(hints: Hints, _: Document) -> AutoValue | None:
        hidden = named(hints, _HIDDEN)
        if hidden is None:
            return None
        size = max(hidden.value) if isinstance(hidden.value, list | tuple) else hidden.value
        return AutoValue(formula(int(size)), f"{describe}, hidden size {size}")

    return compute


_LR = ("lr", "learning_rate")
_TOTAL = ("total_num_steps", "num_training_steps", "max_steps")
_HIDDEN = ("hidden_size", "hidden_sizes", "d_model", "n_embd")

_Z = "zero_optimization"

RULES: Mapping[str, AutoRule] = {
    "train_batch_size": AutoRule(("global_batch_size", "train_batch_size"), derived=True, fill=True),
    "train_micro_batch_size_per_gpu": AutoRule(
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "micro_batch_size"), derived=True, fill=True
    ),
    "gradient_accumulation_steps": AutoRule(("gradient_accumulation_steps",), derived=True, fill=True),
    "gradient_clipping": AutoRule(("gradient_clipping", "max_grad_norm"), fill=True),
    "optimizer.params.lr": AutoRule(_LR, fill=True),
    "optimizer.params.weight_decay": AutoRule(("weight_decay",), fill=True),
    "optimizer.params.betas": AutoRule(("betas",), _betas),
    "optimizer.params.eps": AutoRule(("eps", "adam_epsilon")),
    "optimizer.params.momentum": AutoRule(("momentum",)),
    "scheduler.params.warmup_min_lr": AutoRule(("warmup_min_lr",), lambda hints, document: AutoValue(0.0, "always 0")),
    "scheduler.params.warmup_max_lr": AutoRule(("warmup_max_lr",), _peak_lr),
    "scheduler.params.warmup_num_steps": AutoRule(("warmup_num_steps", "warmup_steps"), _warmup_steps),
    "scheduler.params.total_num_steps": AutoRule(_TOTAL),
    "fp16.enabled": AutoRule(("fp16",), fill=True),
    "bf16.enabled": AutoRule(("bf16",), fill=True),
    f"{_Z}.stage": AutoRule(("zero_stage",), fill=True),
    f"{_Z}.reduce_bucket_size": AutoRule((), _by_hidden("hidden²", lambda hidden: hidden * hidden)),
    f"{_Z}.prefetch_bucket_size": AutoRule((), _by_hidden("0.9 × hidden²", lambda hidden: int(0.9 * hidden * hidden))),
    f"{_Z}.param_persistence_threshold": AutoRule((), _by_hidden("10 × hidden", lambda hidden: 10 * hidden)),
    f"{_Z}.gather_16bit_weights_on_model_save": AutoRule(
        ("zero3_save_16bit_model",), lambda hints, document: AutoValue(False, "not requested")
    ),
}


def hint_names() -> tuple[str, ...]:
    """Return every hyperparameter name that can fill an "auto"."""
    listed = [name for rule in RULES.values() for name in rule.names]
    return tuple(dict.fromkeys([*listed, "adam_beta1", "adam_beta2", "warmup_ratio", *_HIDDEN]))


def named(hints: Hints, names: tuple[str, ...]) -> AutoValue | None:
    """Return the value of the first of ``names`` that has one in ``hints``; else None."""
    for name in names:
        if hints.get(name) is not None and hints[name] != AUTO:
            return AutoValue(hints[name], f"hyperparameter {name}")
    return None


# The source of each key's "auto": the trial's hyperparameters, the model, or the mesh.


def resolve_auto(document: Document, hints: Hints, *, fill: bool = False) -> tuple[Document, list[ConfigError]]:
    """Return ``document`` (canonical keys) with every "auto" replaced or omitted, and an error for
    each "auto" without a source.

    ``hints`` are hyperparameters and facts of the model (``hidden_size``). With ``fill`` they also
    set missing keys.
    """
    faults: list[ConfigError] = []
    for parts in _autos(document.value):
        path, place = ".".join(parts), document.at(parts)
        rule = RULES.get(path, AutoRule())
        found = named(hints, rule.names) or (rule.compute(hints, document) if rule.compute else None)
        if found is not None:
            place = place.noted(f"auto: {found.source}", Provenance.AUTO)
        elif rule.derived or _may_default(path):
            place = place.noted("auto: left to zero_trial", Provenance.OPEN)
        else:
            faults.append(_no_source(place.where(path), path, rule))
            continue
        document = document.with_value(parts, found and found.value, place)
    for path, rule in RULES.items() if fill else ():
        parts, found = tuple(path.split(".")), named(hints, rule.names)
        belongs = parts[0] not in ("optimizer", "scheduler") or document.get(parts[:1]) is not None
        if rule.fill and found is not None and belongs and document.get(parts) is None:
            place = Location(note=found.source, provenance=Provenance.HYPERPARAMETER)
            document = document.with_value(parts, found.value, place)
    return document, faults


def unfilled(given: Mapping[str, Any]) -> dict[str, str]:
    """Map each "auto" without a value to the source that a run would use."""
    found: dict[str, str] = {}
    for path in map(".".join, _autos(given)):
        *_, name = ("", *RULES.get(path, AutoRule()).names)
        source = f"args.{name} of a script, or the trial's hyperparameter {name}" if name else "nothing: set it"
        found[path] = f"filled in from {source}"
    return found


def contradictions(document: Document, hints: Hints) -> list[ConfigError]:
    """Return an error for each number that contradicts a hyperparameter of the same meaning."""
    faults: list[ConfigError] = []
    for path, rule in RULES.items():
        parts = tuple(path.split("."))
        given, hint = document.get(parts), named(hints, rule.names)
        if not rule.fill or hint is None or given in (None, AUTO) or _same(given, hint.value, path):
            continue
        faults.append(
            ConfigError(
                f"contradicts {hint.source}",
                where=document.where(path),
                got=given,
                expected=hint.value,
                fix='Set one of them, or write "auto" in ds_config.',
            )
        )
    return faults


def _autos(section: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the path of every "auto" that is not itself a value of its key."""
    found = [(path, row) for path, row, value in walk(section) if isinstance(value, str) and value == AUTO]
    return [path for path, row in found if row is None or not _takes_auto(row)]


def _takes_auto(row: Key) -> bool:
    """Return whether "auto" is one of the key's own values. Free text does not count."""
    try:
        row.type.read(AUTO)
    except ValidationError:
        return False
    return not isinstance(row.type, Text) or bool(row.type.choices)


def _may_default(path: str) -> bool:
    """Return whether "auto" without a source means the default. True for sizes (limits that do not
    change results), and for keys that zero_trial decides or that have no effect."""
    row = TABLE.get(path)
    if row is None or row.required or path in ("fp16.enabled", "bf16.enabled", "zero_optimization.stage"):
        return False
    if row.support in (Support.NO_EFFECT, Support.NOT_YET):
        return True
    return (row.default is None and not path.startswith("optimizer")) or (
        path.startswith("zero_optimization.") and type(row.default) is int
    )


def _same(given: Any, hint: Any, path: str) -> bool:
    row = TABLE.get(path)
    try:
        if row is not None:
            return bool(row.type.read(given).value == row.type.read(hint).value)
        return float(given) == float(hint)
    except (ValidationError, TypeError, ValueError):
        return True  # the reader reports a value that is not of the key's type


def _no_source(where: str, path: str, rule: AutoRule) -> ConfigError:
    row = TABLE.get(path)
    what = "two numbers, such as [0.9, 0.999]" if path.endswith(".betas") else "a number"
    if row is not None and not isinstance(row.type, Int | Float):
        what = row.type.describe()
    name = rule.names[-1] if rule.names else ""
    fix = f"Set {what}" + (f", or the hyperparameter {name} in the trial, or args.{name} in a script." if name else ".")
    return ConfigError('"auto" has no source', where=where, fix=fix)
