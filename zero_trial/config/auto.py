""" "auto": where each key's value comes from when the user leaves it to the trial's hyperparameters, the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.config.auto_rules import AUTO, RULES, AutoRule, Found, Hints, named
from zero_trial.config.document import Document
from zero_trial.config.key import Answer
from zero_trial.config.numerals import Mismatch
from zero_trial.config.table import TABLE
from zero_trial.errors import ConfigError


def resolve_auto(document: Document, hints: Hints, *, fill: bool = False) -> tuple[Document, list[ConfigError]]:
    """``document`` (canonical keys) with every "auto" replaced or left out, and the faults for those that have no source.

    ``hints`` are hyperparameters and facts of the model (``hidden_size``). With ``fill`` they also stand in for keys that are missing.
    """
    faults: list[ConfigError] = []
    for parts in _autos(document.value):
        path = ".".join(parts)
        place = document.at(parts)
        rule = RULES.get(path, AutoRule())
        found = _search(rule, hints, document)
        if found is not None:
            document = document.with_value(parts, found.value, place.noted(f"auto: {found.source}"))
        elif rule.derived or _may_default(path):
            document = document.with_value(parts, None, place.noted("auto: left to zero_trial"))
        else:
            faults.append(_no_source(place.where(path), path, rule))
    if fill:
        document = _fill(document, hints)
    return document, faults


def contradictions(document: Document, hints: Hints) -> list[ConfigError]:
    """A fault for every number in ds_config that a hyperparameter of the same meaning contradicts."""
    faults: list[ConfigError] = []
    for path, rule in RULES.items():
        parts = tuple(path.split("."))
        given, hint = document.get(parts), named(hints, rule.names)
        if not rule.fill or hint is None or given in (None, AUTO) or _same(given, hint.value, path):
            continue
        faults.append(
            ConfigError(
                f"contradicts {hint.source}",
                where=document.at(parts).where(path),
                got=given,
                expected=hint.value,
                fix='Set one of them, or write "auto" in ds_config.',
            )
        )
    return faults


def _fill(document: Document, hints: Hints) -> Document:
    for path, rule in RULES.items():
        parts = tuple(path.split("."))
        found = named(hints, rule.names)
        belongs = parts[0] not in ("optimizer", "scheduler") or document.get(parts[:1]) is not None
        if rule.fill and found is not None and belongs and document.get(parts) is None:
            document = document.with_value(parts, found.value, document.place.noted(found.source, nowhere=True))
    return document


def _autos(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of every "auto" that is not itself a value of its key; what stands in opaque sections is not looked at."""
    found: list[tuple[str, ...]] = []
    for key, value in section.items():
        path = (*above, key)
        row = TABLE.get(".".join(path))
        if value == AUTO and isinstance(value, str) and (row is None or not _takes_auto(row.path)):
            found.append(path)
        elif isinstance(value, Mapping) and (row is None or row.is_section or row.path.endswith(".params")):
            found += _autos(value, path)
    return found


def _takes_auto(path: str) -> bool:
    row = TABLE[path]
    if not row.aliases and row.kind.says == "any value":
        return True
    try:
        row.kind.read(AUTO)
    except Mismatch:
        return False
    return row.kind.says != "a string"


def _may_default(path: str) -> bool:
    """Without a source, sizes take their default (they are limits, not results), and so does what is decided here or has no effect."""
    row = TABLE.get(path)
    if row is None or row.required or path in ("fp16.enabled", "bf16.enabled", "zero_optimization.stage"):
        return False
    decided_here = row.default is None and not row.path.startswith("optimizer")
    is_size = (
        row.path.startswith("zero_optimization.") and isinstance(row.default, int) and not isinstance(row.default, bool)
    )
    return decided_here or is_size or row.answer in (Answer.NO_EFFECT, Answer.NOT_YET)


def _search(rule: AutoRule, hints: Hints, document: Document) -> Found | None:
    found = named(hints, rule.names)
    return found if found is not None or rule.compute is None else rule.compute(hints, document)


def _same(given: Any, hint: Any, path: str) -> bool:
    row = TABLE.get(path)
    try:
        if row is not None:
            return bool(row.kind.read(given).value == row.kind.read(hint).value)
        return float(given) == float(hint)
    except (Mismatch, TypeError, ValueError):
        return True  # a value that cannot be read is the reader's fault to name


def _no_source(where: str, path: str, rule: AutoRule) -> ConfigError:
    what = "a number"
    row = TABLE.get(path)
    if row is not None and row.kind.says == "true or false":
        what = "true or false"
    elif row is not None and row.kind.says.startswith(("one of", "a string", "a dtype")):
        what = row.kind.says
    elif path.endswith(".betas"):
        what = "two numbers, such as [0.9, 0.999]"
    name = rule.names[-1] if rule.names else ""
    fix = f"Set {what}" + (f", or the hyperparameter {name} in the trial, or args.{name} in a script." if name else ".")
    return ConfigError('"auto" has no source', where=where, fix=fix)
