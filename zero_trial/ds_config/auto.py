"""Fill "auto": from hyperparameters by name, and by formulas of the model's size.

The names are those of Hugging Face's TrainingArguments and the short ones that trials use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.table import TABLE, walk
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, Provenance
from zero_trial.schema.types import Float, Int, Text, ValidationError

AUTO = "auto"

Hints = Mapping[str, Any]


class AutoValue(NamedTuple):
    """A value for a key, and what it was made from."""

    value: Any
    source: str


@dataclass(frozen=True)
class AutoRule:
    """Where the value for "auto" comes from.

    Args:
        names: hyperparameters; the first that exists is taken.
        compute: otherwise, from the hints and the document.
        derived: without a source the key is left out, because another part derives it.
        fill: the hyperparameter is also taken where ds_config says nothing, and a different number
            in ds_config is a contradiction.
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
        ("zero3_save_16bit_model",), lambda hints, document: AutoValue(False, "not asked for")
    ),
}


def hint_names() -> tuple[str, ...]:
    """Return every name under which a value for "auto" is looked for."""
    listed = [name for rule in RULES.values() for name in rule.names]
    return tuple(dict.fromkeys([*listed, "adam_beta1", "adam_beta2", "warmup_ratio", *_HIDDEN]))


def named(hints: Hints, names: tuple[str, ...]) -> AutoValue | None:
    """Return the first of ``names`` that the hints hold with a value."""
    for name in names:
        if hints.get(name) is not None and hints[name] != AUTO:
            return AutoValue(hints[name], f"hyperparameter {name}")
    return None


# "auto": where each key's value comes from when the user leaves it to the trial's hyperparameters,
# the model and the mesh.


def resolve_auto(document: Document, hints: Hints, *, fill: bool = False) -> tuple[Document, list[ConfigError]]:
    """Return ``document`` (canonical keys) with every "auto" replaced or left out, and the faults
    for those that have no source.

    ``hints`` are hyperparameters and facts of the model (``hidden_size``). With ``fill`` they also
    stand in for keys that are missing.
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
    """Return each "auto" that has no value yet, in what a DsConfig keeps of its source, and where a
    run takes it from."""
    found: dict[str, str] = {}
    for path in map(".".join, _autos(given)):
        *_, name = ("", *RULES.get(path, AutoRule()).names)
        source = f"args.{name} of a script, or the trial's hyperparameter {name}" if name else "nothing: set it"
        found[path] = f"filled in from {source}"
    return found


def contradictions(document: Document, hints: Hints) -> list[ConfigError]:
    """Return a fault for every number in ds_config that a hyperparameter of the same meaning
    contradicts.
    """
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
    """Return whether "auto" is a value of the key itself, which no free text has."""
    try:
        row.type.read(AUTO)
    except ValidationError:
        return False
    return not isinstance(row.type, Text) or bool(row.type.choices)


def _may_default(path: str) -> bool:
    """Return whether "auto" without a source means the default: for sizes (limits, not results),
    and for what is decided here or has no effect.
    """
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
        return True  # a value that cannot be read is the reader's fault to name


def _no_source(where: str, path: str, rule: AutoRule) -> ConfigError:
    row = TABLE.get(path)
    what = "two numbers, such as [0.9, 0.999]" if path.endswith(".betas") else "a number"
    if row is not None and not isinstance(row.type, Int | Float):
        what = row.type.describe()
    name = rule.names[-1] if rule.names else ""
    fix = f"Set {what}" + (f", or the hyperparameter {name} in the trial, or args.{name} in a script." if name else ".")
    return ConfigError('"auto" has no source', where=where, fix=fix)
