"""Read any form of ds_config into a DsConfig; all errors of a source are reported together.

The reader first reduces each key to its canonical spelling: aliases are resolved, old keys are
translated, and unknown keys are reported with the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.key_rules import contradictions, cross_faults, resolve_auto, unfilled, unused_rates
from zero_trial.ds_config.keys_training import (
    ONE_BIT,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    Param,
)
from zero_trial.ds_config.table import FIELDS, TABLE, DsConfig, lookup, nearest, walk
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.schema.config_source import Source, open_source
from zero_trial.schema.document import DEFAULT, Document, Location, Path, Provenance, ValueSource, shown
from zero_trial.schema.types import Float, Section, Type, ValidationError, as_number

_PARAMS = ("optimizer", "scheduler")
_NUMBERS = {"lr": Float(low=0), "weight_decay": Float(low=0), "momentum": Float(low=0)}


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
    ``hyperparameters`` fill "auto", set missing keys, and must not contradict given ones; in a
    ``search`` a contradiction raises InvalidHP. ``name`` replaces the file's name in messages. With
    ``allow_open`` an "auto" without a source is not an error: it remains in ``raw``, for a report,
    and the field gets its default. Raises ConfigError with all errors of the source.
    """
    document = open_source(source, name)
    spelled = Canonical(document)
    clashes = contradictions(spelled.document, hyperparameters or {})
    known = {**(hints or {}), **(hyperparameters or {})}
    ready, unresolved = resolve_auto(spelled.document, known, fill=hyperparameters is not None)
    read = _Values(ready, {fault.where for fault in unresolved})
    kinds = {ready.where(f"{section}.type") for section in _PARAMS}  # these keys have no default
    faults = [*spelled.faults, *(fault for fault in unresolved if not allow_open or fault.where in kinds), *read.faults]
    clashes += [] if faults else cross_faults(read.values, ready, unfilled(ready.value))
    for key, unused in unused_rates(ready):
        if _of_a_trial(ready.at(("optimizer", "params", key)).source()):
            clashes.append(unused)  # in a sweep over this rate all trials would use the same one
        else:
            read.warnings.append(unused.describe())
    if faults:
        raise ConfigError.many([*faults, *clashes])
    if clashes:
        raise refusal(clashes, search)
    config: DsConfig = _build(DsConfig, "", read.values)
    return dataclasses.replace(
        config,
        sources=_sources(ready),
        warnings=(*document.warnings, *spelled.notes, *read.warnings, *_idle(config, ready)),
        raw=_plain(ready.value),
    )


def replaced_rates(
    document: Document, *, hints: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a line for each learning rate of ``document`` that the scheduler overrides."""
    ready, _ = resolve_auto(Canonical(document).document, {**hints, **hyperparameters}, fill=True)
    return tuple(unused.describe() for _, unused in unused_rates(ready))


def refusal(faults: list[ConfigError], search: bool) -> ConfigError:
    """Return the faults as one error. In a ``search`` the error is InvalidHP, and the search
    continues without this combination of hyperparameters."""
    if not search:
        return ConfigError.many(faults)
    return InvalidHP.many(InvalidHP(f.what, where=f.where, got=f.got, expected=f.expected, fix=f.fix) for f in faults)


def _of_a_trial(source: ValueSource) -> bool:
    """Return whether a value was set by hyperparameters."""
    by_name = source.provenance is Provenance.AUTO and "hyperparameter" in source
    return by_name or source.provenance in (Provenance.HYPERPARAMETER, Provenance.OVERLAY)


def _idle(config: DsConfig, document: Document) -> list[str]:
    """Return warnings for an ``offload_optimizer.ratio`` without effect (DeepSpeed updates the rest
    of the state on the GPU), and for an offload section with a folder but no device: the default
    device, as in DeepSpeed, offloads nothing."""
    zero, found = config.zero_optimization, []
    optimizer, ratio = zero.offload_optimizer, "zero_optimization.offload_optimizer.ratio"
    if optimizer is not None and optimizer.device != "none" and optimizer.ratio != 1:
        limit = "" if optimizer.device == "cpu" else "; ranks on the CPU honor it"
        effect = f"{optimizer.ratio:g} has no effect on a GPU: all of the optimizer's state is offloaded{limit}"
        found.append(f"{document.where(ratio)}: {effect}")
    for name, section in (("offload_optimizer", optimizer), ("offload_param", zero.offload_param)):
        path = f"zero_optimization.{name}"
        if section is not None and section.nvme_path and document.get((*path.split("."), "device")) is None:
            what = f'nothing is offloaded, because {name} has no device; write "device": "nvme" there'
            found.append(f"{document.where(f'{path}.nvme_path')}: {what}")
    return found


# --- one spelling per key ---

Assignments = list[tuple[str, Any]]

# Sections that DeepSpeed reads as plain dicts, without detecting misspelled keys.
_LAX = ("", "aio", "activation_checkpointing", "flops_profiler", "pipeline", "checkpoint")

# Dotted names that TRL adds at the top level of a reference model's config. They only limit memory.
# Any other dotted name there ("zero_optimization.stage") is an error.
_UNREAD = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)

_IF_TRUE: Mapping[str | None, Any] = {
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param": {"device": "cpu"},
    "communication_data_type": "fp32",
}
"""Key of today -> its value where an old switch is true."""


def translate(row: Key, value: Any) -> Assignments:
    """Return the (dotted path, value) pairs that replace a mapped key."""
    if value in (None, "auto") or row.becomes is None:
        return []
    if row.becomes in _IF_TRUE:
        return [(row.becomes, _IF_TRUE[row.becomes])] if value else []
    return [(row.becomes, value)]


def translate_amp(amp: Mapping[str, Any]) -> Assignments:
    """Translate apex's levels: O1 becomes autocast with fp16; O2 and O3 become fp16 parameters."""
    level = amp.get("opt_level", "O1")
    if amp.get("enabled") is not True or level == "O0":
        return []
    if level == "O1":
        return [("torch_autocast", {"enabled": True, "dtype": "fp16"})]
    scales = {f"fp16.{name}": amp.get(name) for name in ("loss_scale", "min_loss_scale")}
    return [("fp16.enabled", True), *((path, value) for path, value in scales.items() if isinstance(value, float))]


class Canonical:
    """A document with canonical keys only, and the errors and warnings from reading it. Errors are
    collected, not raised."""

    def __init__(self, document: Document) -> None:
        self._given = document
        self.value: dict[str, Any] = {}
        self.places: dict[Path, Location] = {}
        self.faults: list[ConfigError] = []
        self.notes: list[str] = []
        self._written: dict[str, str] = {}
        self._walk(document.value, (), "")

    @property
    def document(self) -> Document:
        return Document(self.value, self.places, self._given.place)

    def _fault(self, what: str, raw: Path, **facts: Any) -> None:
        self.faults.append(ConfigError(what, where=self._given.at(raw).where(".".join(raw)), **facts))

    def _note(self, raw: Path, text: str) -> None:
        self.notes.append(f"{self._given.at(raw).where('.'.join(raw))}: {text}")

    def _walk(self, section: Mapping[str, Any], above: Path, parent: str) -> None:
        for name, value in section.items():
            raw = (*above, str(name))
            row = lookup(parent, str(name))
            if row is None and not parent and name in _UNREAD:
                self._note(raw, "ignored, as in DeepSpeed. The key inside zero_optimization applies instead.")
            elif row is None:
                self._unknown(raw, parent)
            elif value is None:
                continue
            elif row.path == "amp":
                self._amp(value, raw)
            elif row.support is Support.MAPPED:
                for path, meaning in translate(row, self._checked(row, value, raw)):
                    self._assign(path, meaning, raw, f"an old spelling. Write {path}: {shown(meaning)}.")
            elif isinstance(row.type, Section):
                self._enter(row, row.type.switch, value, raw)
            else:
                self._leaf(row, value, raw)

    def _enter(self, row: Key, switch: str | None, value: Any, raw: Path) -> None:
        place = self._given.at(raw)
        if isinstance(value, bool) and switch:
            place = place.noted(f"written as {row.path}: {shown(value)}", Provenance.REWRITTEN)
            self._put(f"{row.path}.{switch}", int(value), place, (row.path,))
            return
        if not isinstance(value, Mapping):
            enabled = isinstance(value, bool) and lookup(row.path, "enabled")
            fix = f'Write {{"enabled": {shown(value)}}}.' if enabled else None
            self._fault("not a section", raw, got=shown(value), expected="an object", fix=fix)
            return
        if raw[-1] != row.name:
            self._note(raw, f"read as {row.path}.")
        before = self._written.setdefault(row.path, ".".join(raw))
        if before != ".".join(raw):
            self._fault(f"the same section as {before}", raw, fix="Keep one of them.")
        parts = tuple(row.path.split("."))
        self._section(parts)
        self.places[parts] = place
        self._walk(value, raw, row.path)

    def _leaf(self, row: Key, value: Any, raw: Path) -> None:
        self._put(row.path, value, self._given.at(raw), raw)
        parts = tuple(row.path.split("."))
        # the sources of the values inside optimizer.params and other free-form values
        self.places.update({(*parts, *rest): place for rest, place in self._given.inside(raw)})

    def _amp(self, value: Any, raw: Path) -> None:
        if not isinstance(value, Mapping):
            self._fault("not a section", raw, got=shown(value), expected="an object")
            return
        levels: dict[str, Any] = {}
        for name, inner in value.items():
            path = (*raw, str(name))
            row = lookup("amp", str(name))
            if row is None:
                self._unknown(path, "amp")
            elif row.support is not Support.MAPPED:
                self._leaf(row, inner, path)
            elif inner not in (None, "auto"):  # apex is not supported: "auto" disables it
                levels[row.name] = self._checked(row, inner, path)
        for dotted, meaning in translate_amp(levels):
            self._assign(dotted, meaning, raw, f"removed from DeepSpeed. Read as {dotted}: {shown(meaning)}.")

    def _checked(self, row: Key, value: Any, raw: Path) -> Any:
        """Return the value in its internal form; if it has the wrong type, add an error and return
        None."""
        try:
            return row.type.read(value).value
        except ValidationError as problem:
            self.faults.append(problem.fault(self._given.at(raw).where(".".join(raw)), value))
            return None

    def _assign(self, path: str, meaning: Any, raw: Path, note: str) -> None:
        self._note(raw, note)
        place = self._given.at(raw).noted(f"written as {'.'.join(raw)}", Provenance.REWRITTEN)
        inner = {f"{path}.{key}": value for key, value in meaning.items()} if isinstance(meaning, dict) else {}
        for leaf, value in (inner or {path: meaning}).items():
            self._put(leaf, value, place, raw)

    def _put(self, path: str, value: Any, place: Location, raw: Path) -> None:
        """Set a leaf or an unread value; record an error for a second spelling of the same key."""
        *above, name = parts = tuple(path.split("."))
        if path in self._written:
            self._fault(f"the same key as {self._written[path]}", raw, fix=f"Keep {name} and remove the other.")
            return
        self._written[path] = ".".join(raw)
        self._section(above)[name] = value
        self.places[parts] = place

    def _section(self, parts: Path | list[str]) -> dict[str, Any]:
        """Return the section of a path; create missing sections."""
        section = self.value
        for part in parts:
            section = section.setdefault(part, {})
        return section

    def _unknown(self, raw: Path, parent: str) -> None:
        """Add the error for an unknown key, with the nearest known key and DeepSpeed's behavior."""
        meant = nearest(parent, raw[-1])
        hints = [f'Did you mean "{meant}"?'] if meant else []
        if parent in _LAX:
            lost = " and train without ZeRO" if parent == "" and meant == "zero_optimization" else ""
            hints.append(f"(DeepSpeed would ignore this{lost}.)")
        self._fault("unknown key", raw, fix=" ".join(hints) or None)


# --- values ---


class _Values:
    """Dotted path -> internal value of every given key, with the errors and warnings.

    Args:
        skip: places with an error that is already reported.
    """

    def __init__(self, document: Document, skip: set[str | None]) -> None:
        self.values: dict[str, Any] = {}
        self.faults: list[ConfigError] = []
        self.warnings: list[str] = []
        self._document = document
        for parts, row, value in walk(document.value):
            path = ".".join(parts)
            if row is None or value is None or document.where(path) in skip or row.is_harmless(value):
                continue
            if row.is_section:
                self.values[path] = {}
                continue
            taken = self._take(path, path, row.type, value, self.values)
            if taken and row.support is Support.REFUSED and row.asks(self.values[path]):
                self._fault(path, row.meaning, got=shown(value), fix=row.instead)
        for section in _PARAMS:
            if section in document.value:
                self._params_of(section, skip)

    def _fault(self, path: str, what: str, **facts: Any) -> None:
        self.faults.append(ConfigError(what, where=self._document.where(path), **facts))

    def _take(self, path: str, key: str, kind: Type, value: Any, target: dict[str, Any]) -> bool:
        """Store the value's internal form in ``target``; add an error if it has the wrong type."""
        where = self._document.where(path)
        try:
            reading = kind.read(value)
        except ValidationError as problem:
            self.faults.append(problem.fault(where, value))
            return False
        target[key] = reading.value
        self.warnings += [f"{where}: {reading.warning}"] if reading.warning else []
        return True

    def _params_of(self, section: str, skip: set[str | None]) -> None:
        """Read the arguments of the optimizer or scheduler."""
        path, name = f"{section}.params", self.values.get(f"{section}.type")
        if name is None and self._document.get((section, "type")) is None:
            fix = 'Add "type": "AdamW".' if section == "optimizer" else 'Add "type": "WarmupLR".'
            self._fault(section, f"the {section} has no type", expected=f"{section}.type", fix=fix)
        given = self._document.get((section, "params"), {})
        if given is None or name is None:
            return
        if not isinstance(given, Mapping):
            self._fault(path, "not a section", got=shown(given), expected="an object")
            return
        known = OPTIMIZERS if section == "optimizer" else SCHEDULERS
        named, values = known.get(name.lower()), dict[str, Any]()
        if named is None:
            self._check_name(section, name)
        elif named.name in ONE_BIT:
            where = self._document.where(f"{section}.type")
            self.warnings.append(f"{where}: gradients are not compressed; {ONE_BIT[named.name]} is used.")
        for key, value in given.items():
            inner = f"{path}.{key}"
            if self._document.where(inner) in skip or value is None:
                continue
            if key == "max_grad_norm":
                what = "gradient clipping is not a parameter of the optimizer"
                fix = f'Remove it and set "gradient_clipping": {shown(value)} at the top level.'
                self._fault(inner, what, got=shown(value), fix=fix)
            elif named is None:
                self._as_given(inner, str(key), value, values)
            elif key in named.params:
                self._checked(inner, str(key), value, named.params[key], values)
            else:
                near = difflib.get_close_matches(key, sorted(named.params), 1)
                fix = f'Did you mean "{near[0]}"?' if near else f"It takes {', '.join(sorted(named.params))}."
                self._fault(inner, f"{named.name} has no such parameter", fix=fix)
        for key, param in named.params.items() if named else ():
            if param.required and given.get(key) is None:
                what, where = f"missing: {name} requires it", self._document.at((section,)).where(f"{path}.{key}")
                self.faults.append(ConfigError(what, where=where, expected=param.type.describe(), fix="Add it."))
        self.values[f"{section}.type"] = named.name if named else name
        self.values[path] = values

    def _checked(self, path: str, key: str, value: Any, param: Param, values: dict[str, Any]) -> None:
        self._take(path, key, param.type, value, values)
        if param.only and values.get(key, param.default) != param.default:
            del values[key]
            self._fault(path, param.only, got=shown(value), expected=shown(param.default), fix="Remove it.")

    def _as_given(self, path: str, key: str, value: Any, values: dict[str, Any]) -> None:
        """Store an argument of one of torch's classes; check only numbers."""
        if key in _NUMBERS:
            self._take(path, key, _NUMBERS[key], value, values)
            return
        number, warning = value, None
        if isinstance(value, str):
            with suppress(ValidationError):
                number, warning = as_number(value, "a number")
        values[key] = tuple(number) if isinstance(number, list) else number
        self.warnings += [f"{self._document.where(path)}: {warning}"] if warning else []

    def _check_name(self, section: str, name: str) -> None:
        """Check a name that is not in the tables. Names of torch pass; a name close to a known one
        is an error; torch checks all others later."""
        path = f"{section}.type"
        if section == "optimizer":
            refused = {known.lower(): why for known, why in REFUSED_OPTIMIZERS.items()}
            exact = {*TORCH_OPTIMIZERS, *(named.name for named in OPTIMIZERS.values())}
        else:
            refused, exact = {}, {*TORCH_SCHEDULERS, *(named.name for named in SCHEDULERS.values())}
        if name.lower() in refused:
            self._fault(path, f"{name} is not supported: {refused[name.lower()]}", got=shown(name))
            return
        by_lower = {known.lower(): known for known in sorted(exact)}
        near = difflib.get_close_matches(name.lower(), by_lower, 1)
        if name in exact:
            return
        if near:
            self._fault(path, f"no such {section}", got=shown(name), fix=f'Did you mean "{by_lower[near[0]]}"?')
        else:
            what = f'"{name}" is unknown here; it is looked up in torch when the engine is built.'
            self.warnings.append(f"{self._document.where(path)}: {what}")


def _build(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """Build the frozen dataclass of a section; fields not in ``values`` get their defaults."""
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
    """Return the source of every known leaf's value; a null in the input counts as a default."""
    given = {parts: value for parts, _, value in walk(document.value)}
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
    """Return a deep copy without nulls: the given values in canonical spelling."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
