"""Reading ``optimizer.params`` and ``scheduler.params``: strict where the name is known here, as given where torch will check."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.config.canonical import shown
from zero_trial.config.document import Document
from zero_trial.config.kinds import Float
from zero_trial.config.named_params import (
    ANY_CASE,
    ONE_BIT,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    Named,
)
from zero_trial.config.numerals import Mismatch, as_number
from zero_trial.errors import ConfigError

_NUMBERS = {"lr": Float(low=0), "weight_decay": Float(low=0), "momentum": Float(low=0)}


@dataclass
class Params:
    """The canonical name, the arguments in their inside form, and what was wrong or worth saying."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_params(section: str, name: str, given: Mapping[str, Any], document: Document, skip: set[str | None]) -> Params:
    """The arguments of the optimizer or scheduler ``name``; ``skip`` holds places that already have a fault."""
    table = OPTIMIZERS if section == "optimizer" else SCHEDULERS
    named = table.get(name.lower()) if section == "optimizer" or name.lower() in table else None
    found = Params(named.name if named else name)
    if named is None:
        _check_name(section, name, document, found)
    elif named.name in ONE_BIT:
        where = document.at((section, "type")).where(f"{section}.type")
        found.warnings.append(f"{where}: gradients are not compressed; trained as {ONE_BIT[named.name]}.")
    for key, value in given.items():
        path = f"{section}.params.{key}"
        where = document.at((section, "params", str(key))).where(path)
        if where in skip or value is None:
            continue
        if key == "max_grad_norm":
            fix = f'Remove it and set "gradient_clipping": {shown(value)} at the top level.'
            found.faults.append(
                ConfigError(
                    "gradient clipping is not a parameter of the optimizer", where=where, got=shown(value), fix=fix
                )
            )
        elif named is None:
            _as_given(str(key), value, where, found)
        elif key in named.params:
            _checked(str(key), value, where, named, found)
        else:
            found.faults.append(_unknown(str(key), where, named))
    for key in named.params if named else ():
        if named is not None and named.params[key].required and given.get(key) is None:
            where = document.at((section,)).where(f"{section}.params.{key}")
            found.faults.append(
                ConfigError(f"{named.name} needs it", where=where, expected=named.params[key].kind.says, fix="Add it.")
            )
    return found


def _checked(key: str, value: Any, where: str, named: Named, found: Params) -> None:
    try:
        reading = named.params[key].kind.read(value)
    except Mismatch as problem:
        found.faults.append(
            ConfigError("wrong value", where=where, got=shown(value), expected=problem.expected, fix=problem.fix)
        )
        return
    param = named.params[key]
    if param.only and reading.value != param.default:
        found.faults.append(
            ConfigError(param.only, where=where, got=shown(value), expected=shown(param.default), fix="Leave it out.")
        )
        return
    found.values[key] = reading.value
    found.warnings += [f"{where}: {reading.warning}"] if reading.warning else []


def _as_given(key: str, value: Any, where: str, found: Params) -> None:
    """An argument of one of torch's classes: only its numbers are looked at."""
    if key in _NUMBERS:
        try:
            reading = _NUMBERS[key].read(value)
        except Mismatch as problem:
            found.faults.append(
                ConfigError("wrong value", where=where, got=shown(value), expected=problem.expected, fix=problem.fix)
            )
            return
        found.values[key] = reading.value
        found.warnings += [f"{where}: {reading.warning}"] if reading.warning else []
        return
    try:
        number, warning = as_number(value, "a number") if isinstance(value, str) else (value, None)
    except Mismatch:
        number, warning = value, None
    found.values[key] = tuple(number) if isinstance(number, list) else number
    found.warnings += [f"{where}: {warning}"] if warning else []


def _unknown(key: str, where: str, named: Named) -> ConfigError:
    near = difflib.get_close_matches(key, sorted(named.params), 1)
    fix = f'Did you mean "{near[0]}"?' if near else f"It takes {', '.join(sorted(named.params))}."
    return ConfigError(f"{named.name} has no such parameter", where=where, fix=fix)


def _check_name(section: str, name: str, document: Document, found: Params) -> None:
    """A name that is not in the tables: fine if torch has it, a fault if it is close to a known one, else torch's to say."""
    where = document.at((section, "type")).where(f"{section}.type")
    refused = {known.lower(): why for known, why in REFUSED_OPTIMIZERS.items()} if section == "optimizer" else {}
    if name.lower() in refused:
        found.faults.append(ConfigError(f"it cannot be used: {refused[name.lower()]}", where=where, got=shown(name)))
        return
    if section == "optimizer":
        exact = {*TORCH_OPTIMIZERS, *(named.name for named in OPTIMIZERS.values()), *ANY_CASE}
        any_case = {known.lower() for known in ANY_CASE}
    else:
        exact, any_case = {*TORCH_SCHEDULERS, *(named.name for named in SCHEDULERS.values())}, set()
    if name in exact or name.lower() in any_case:
        return
    by_lower = {known.lower(): known for known in sorted(exact)}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    if near:
        found.faults.append(
            ConfigError(f"no such {section}", where=where, got=shown(name), fix=f'Did you mean "{by_lower[near[0]]}"?')
        )
    else:
        found.warnings.append(
            f'{where}: "{name}" is not known here; it is looked up in torch when the engine is built.'
        )
