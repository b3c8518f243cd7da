"""Read any form of ds_config into a DsConfig; all faults of a source are reported together."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.auto import contradictions, resolve_auto, unfilled
from zero_trial.ds_config.canonical import Canonical
from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.key_rules import cross_faults, unused_rates
from zero_trial.ds_config.params import (
    ONE_BIT,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    KnownParams,
    Param,
)
from zero_trial.ds_config.table import FIELDS, TABLE, DsConfig
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.config_source import Source, open_source
from zero_trial.schema.document import DEFAULT, Document, Provenance, ValueSource, shown
from zero_trial.schema.types import Float, Type, ValidationError, as_number

_PARAMS = ("optimizer", "scheduler")
_NUMBERS = {"lr": Float(low=0), "weight_decay": Float(low=0), "momentum": Float(low=0)}


@dataclass
class Params:
    """The canonical name, the arguments in their inside form, and what was wrong or worth
    saying."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_params(section: str, name: str, given: Mapping[str, Any], document: Document, skip: set[str | None]) -> Params:
    """Return the arguments of the optimizer or scheduler ``name``; ``skip`` holds places that
    already have a fault.
    """
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
            _checked(str(key), value, where, named.params[key], found)
        else:
            found.faults.append(_unknown(str(key), where, named))
    for key, param in named.params.items() if named else ():
        if param.required and given.get(key) is None:
            where = document.at((section,)).where(f"{section}.params.{key}")
            what = f"missing: {found.name} requires it"
            found.faults.append(ConfigError(what, where=where, expected=param.type.describe(), fix="Add it."))
    return found


def _take(key: str, kind: Type, value: Any, where: str, found: Params) -> None:
    """Put the argument's inside form into ``found``, or its fault."""
    try:
        reading = kind.read(value)
    except ValidationError as problem:
        found.faults.append(problem.fault(where, value))
        return
    found.values[key] = reading.value
    found.warnings += [f"{where}: {reading.warning}"] if reading.warning else []


def _checked(key: str, value: Any, where: str, param: Param, found: Params) -> None:
    _take(key, param.type, value, where, found)
    if param.only and found.values.get(key, param.default) != param.default:
        del found.values[key]
        fault = ConfigError(
            param.only, where=where, got=shown(value), expected=shown(param.default), fix="Leave it out."
        )
        found.faults.append(fault)


def _as_given(key: str, value: Any, where: str, found: Params) -> None:
    """Keep an argument of one of torch's classes; only numbers are checked."""
    if key in _NUMBERS:
        _take(key, _NUMBERS[key], value, where, found)
        return
    try:
        number, warning = as_number(value, "a number") if isinstance(value, str) else (value, None)
    except ValidationError:
        number, warning = value, None
    found.values[key] = tuple(number) if isinstance(number, list) else number
    found.warnings += [f"{where}: {warning}"] if warning else []


def _unknown(key: str, where: str, named: KnownParams) -> ConfigError:
    near = difflib.get_close_matches(key, sorted(named.params), 1)
    fix = f'Did you mean "{near[0]}"?' if near else f"It takes {', '.join(sorted(named.params))}."
    return ConfigError(f"{named.name} has no such parameter", where=where, fix=fix)


def _check_name(section: str, name: str, document: Document, found: Params) -> None:
    """Check a name that is not in the tables: torch may have it, a name close to a known one is a
    fault, and any other is left to torch.
    """
    where = document.at((section, "type")).where(f"{section}.type")
    refused = {known.lower(): why for known, why in REFUSED_OPTIMIZERS.items()} if section == "optimizer" else {}
    if name.lower() in refused:
        found.faults.append(
            ConfigError(f"{name} is not supported: {refused[name.lower()]}", where=where, got=shown(name))
        )
        return
    if section == "optimizer":
        exact = {*TORCH_OPTIMIZERS, *(named.name for named in OPTIMIZERS.values())}
    else:
        exact = {*TORCH_SCHEDULERS, *(named.name for named in SCHEDULERS.values())}
    if name in exact:
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


def read_ds_config(
    source: Source,
    *,
    hints: Mapping[str, Any] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    search: bool = False,
    name: str | None = None,
    allow_open: bool = False,
) -> DsConfig:
    """Return a checked DsConfig from a dict, a path, base64 of JSON, or a Document.

    ``hints`` fill "auto" (``hidden_size`` of the model, ``total_num_steps`` ...).
    ``hyperparameters`` do that too, stand in for keys that are missing, and must not contradict
    those that are there; in a ``search`` such a contradiction is InvalidHP. ``name`` stands in
    messages instead of the file's name. With ``allow_open`` an "auto" without a source is no fault:
    it stays in ``raw``, for a report, and the field has its default. Raises ConfigError with all
    faults of the source together.
    """
    document = open_source(source, name)
    spelled = Canonical(document)
    ready = spelled.document
    known = {**(hints or {}), **(hyperparameters or {})}
    faults = list(spelled.faults)
    clashes = contradictions(ready, hyperparameters or {})
    ready, unresolved = resolve_auto(ready, known, fill=hyperparameters is not None)
    values, more, warnings = _read_values(ready, {fault.where for fault in unresolved})
    kinds = {ready.at((section, "type")).where(f"{section}.type") for section in _PARAMS}  # without a default
    faults += [*(fault for fault in unresolved if not allow_open or fault.where in kinds), *more]
    clashes += [] if faults else cross_faults(values, ready, unfilled(ready.value))
    for key, unused in unused_rates(ready):
        if _of_a_trial(ready.at(("optimizer", "params", key)).source()):
            clashes.append(unused)  # every trial of a sweep over it would train at the same rate
        else:
            warnings.append(unused.describe())
    if faults:
        raise ConfigError.many([*faults, *clashes])
    if clashes:
        raise refusal(clashes, search)
    config: DsConfig = _build(DsConfig, "", values)
    warnings += [*_idle_ratio(config, ready), *_idle_paths(config, ready)]
    return dataclasses.replace(
        config,
        sources=_sources(ready),
        warnings=(*document.warnings, *spelled.notes, *warnings),
        raw=_plain(ready.value),
    )


def _idle_ratio(config: DsConfig, document: Document) -> list[str]:
    """Return a warning where ``offload_optimizer.ratio`` keeps nothing in its place: on a GPU, and
    with "cpu" anywhere. DeepSpeed updates the rest of the state on the GPU."""
    section, parts = config.zero_optimization.offload_optimizer, ("zero_optimization", "offload_optimizer", "ratio")
    if section is None or section.device == "none" or section.ratio == 1:
        return []
    where = document.at(parts).where(".".join(parts))
    limit = "" if section.device == "cpu" else "; where ranks compute on the CPU it is honored"
    return [f"{where}: {section.ratio:g} has no effect on a GPU: all of the optimizer's state leaves it{limit}"]


def _idle_paths(config: DsConfig, document: Document) -> list[str]:
    """Return a warning for each section that names a folder and no device: the default, DeepSpeed's
    too, offloads nothing."""
    zero, given, found = config.zero_optimization, _sources(document), []
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        path = f"zero_optimization.{name}"
        if section is not None and section.nvme_path and given[f"{path}.device"].is_default:
            where = document.at((*path.split("."), "nvme_path")).where(f"{path}.nvme_path")
            found.append(f'{where}: nothing is offloaded, because {name} has no device; write "device": "nvme" there')
    return found


def replaced_rates(
    document: Document, *, hints: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a line for each learning rate of ``document``, filled as :func:`read_ds_config` fills
    it, that its scheduler replaces."""
    ready, _ = resolve_auto(Canonical(document).document, {**hints, **hyperparameters}, fill=True)
    return tuple(unused.describe() for _, unused in unused_rates(ready))


def _of_a_trial(source: ValueSource) -> bool:
    """Return whether a value comes from the hyperparameters."""
    by_name = source.provenance is Provenance.AUTO and "hyperparameter" in source
    return by_name or source.provenance in (Provenance.HYPERPARAMETER, Provenance.OVERLAY)


def refusal(faults: list[ConfigError], search: bool) -> ConfigError:
    """Return the faults as one error. In a ``search`` they are an invalid combination of
    hyperparameters, and it goes on without them.
    """
    if not search:
        return ConfigError.many(faults)
    return InvalidHP.many(InvalidHP(f.what, where=f.where, got=f.got, expected=f.expected, fix=f.fix) for f in faults)


def _read_values(document: Document, skip: set[str | None]) -> tuple[dict[str, Any], list[ConfigError], list[str]]:
    """Return dotted path -> inside value for everything given, with the faults and the warnings."""
    values: dict[str, Any] = {}
    faults: list[ConfigError] = []
    warnings: list[str] = []
    for parts, value in _leaves(document.value, ()):
        path = ".".join(parts)
        row = TABLE[path]
        where = document.at(parts).where(path)
        if value is None or where in skip or row.is_harmless(value):
            continue
        if row.is_section:
            values[path] = {}
            continue
        try:
            reading = row.type.read(value)
        except ValidationError as problem:
            faults.append(problem.fault(where, value))
            continue
        if row.support is Support.REFUSED and row.asks(reading.value):
            faults.append(ConfigError(row.meaning, where=where, got=shown(value), fix=row.instead))
            continue
        warnings += [f"{where}: {reading.warning}"] if reading.warning else []
        values[path] = reading.value
    for section in _PARAMS:
        if section in document.value:
            _require_type(section, values, document, faults)
            _params_of(section, values, document, skip, faults, warnings)
    return values, faults, warnings


def _require_type(section: str, values: dict[str, Any], document: Document, faults: list[ConfigError]) -> None:
    if f"{section}.type" not in values and document.get((section, "type")) is None:
        where = document.at((section,)).where(section)
        fix = 'Add "type": "AdamW".' if section == "optimizer" else 'Add "type": "WarmupLR".'
        faults.append(ConfigError(f"the {section} has no type", where=where, expected=f"{section}.type", fix=fix))


def _params_of(
    section: str,
    values: dict[str, Any],
    document: Document,
    skip: set[str | None],
    faults: list[ConfigError],
    warnings: list[str],
) -> None:
    kind, given = values.get(f"{section}.type"), document.get((section, "params"), {})
    if given is None or kind is None:
        return
    if not isinstance(given, Mapping):
        where = document.at((section, "params")).where(f"{section}.params")
        faults.append(ConfigError("not a section", where=where, got=shown(given), expected="an object"))
        return
    found = read_params(section, kind, given, document, skip)
    faults += found.faults
    warnings += found.warnings
    values[f"{section}.type"] = found.name
    values[f"{section}.params"] = found.values


def _leaves(section: Mapping[str, Any], above: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Return every key below ``section`` in order, sections before what stands in them."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in section.items():
        path = (*above, key)
        found.append((path, value))
        row: Key = TABLE[".".join(path)]
        if row.is_section and isinstance(value, Mapping):
            found += _leaves(value, path)
    return found


def _build(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """Build the frozen dataclass of a section; what is not in ``values`` takes its default."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        path = f"{prefix}{item.name}"
        inner = TABLE[path].section if path in FIELDS else None
        if inner is not None:
            if path in values or any(key.startswith(f"{path}.") for key in values):
                found[item.name] = _build(inner, f"{path}.", values)
        elif path in values:
            found[item.name] = values[path]
    return cls(**found)


def _sources(document: Document) -> dict[str, ValueSource]:
    """Return where the value of every known leaf came from; a null in the source is a default, and
    says so.
    """
    given = dict(_leaves(document.value, ()))
    found: dict[str, ValueSource] = {}
    for path, row in TABLE.items():
        parts = tuple(path.split("."))
        if row.is_section or (row.support is Support.MAPPED and parts not in given):
            continue
        place = document.at(parts)
        if parts not in given:
            found[path] = DEFAULT
        elif given[parts] is None and not place.note:
            found[path] = ValueSource(f"default (null in {place.source()})", Provenance.DEFAULT)
        else:
            found[path] = place.source()
        if path in ("optimizer.params", "scheduler.params") and isinstance(given.get(parts), Mapping):
            found.update({f"{path}.{key}": document.at((*parts, key)).source() for key in given[parts]})
    return found


def _plain(value: Any) -> Any:
    """Return a deep copy without nulls: what was given, in canonical spelling."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
