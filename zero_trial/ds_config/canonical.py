"""One spelling per key: aliases are resolved, old keys translated, unknown keys reported with the
nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.table import lookup, nearest
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, Path, Provenance, shown
from zero_trial.schema.types import Section, ValidationError

Assignments = list[tuple[str, Any]]

_CPU = {"device": "cpu"}

# Sections that DeepSpeed reads as plain dicts, so that it does not see a misspelled key in them.
_LAX = ("", "aio", "activation_checkpointing", "flops_profiler", "pipeline", "checkpoint")

# Dotted names that TRL adds at the top of a reference model's config. No other dotted name is
# taken: "zero_optimization.stage" there is an error, while these only limit memory.
_UNREAD = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)


def translate(path: str, value: Any) -> Assignments:
    """Return the (dotted path, value) pairs that stand for a mapped key with a checked value; none
    where it asks for nothing.
    """
    if path == "zero_optimization.stage3_gather_fp16_weights_on_model_save":
        return [("zero_optimization.gather_16bit_weights_on_model_save", value)]
    if path == "pipeline.stages":
        return [("mesh.pipe", value)] if isinstance(value, int) else []
    if value is not True:
        return []
    if path == "zero_optimization.cpu_offload":
        return [("zero_optimization.offload_optimizer", dict(_CPU))]
    if path in ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"):
        return [("zero_optimization.offload_param", dict(_CPU))]
    if path == "fp32_allreduce":
        return [("communication_data_type", "fp32")]
    return []


def translate_amp(amp: Mapping[str, Any]) -> Assignments:
    """Translate apex's levels: O1 is autocast with fp16, O2 and O3 are fp16 parameters, O0 is fp32.

    An "auto" switch is off, as there is no apex.
    """
    if amp.get("enabled") is not True or amp.get("opt_level", "O1") == "O0":
        return []
    if amp.get("opt_level", "O1") in ("O1", "auto"):
        return [("torch_autocast", {"enabled": True, "dtype": "fp16"})]
    found: Assignments = [("fp16.enabled", True)]
    if isinstance(amp.get("loss_scale"), int | float):
        found.append(("fp16.loss_scale", amp["loss_scale"]))
    if "min_loss_scale" in amp:
        found.append(("fp16.min_loss_scale", amp["min_loss_scale"]))
    return found


@dataclass
class Canonical:
    """A document with canonical keys only, and everything that was wrong or worth saying on the
    way.
    """

    value: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Location] = field(default_factory=dict)
    faults: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    def document(self, place: Location) -> Document:
        return Document(self.value, self.places, place)

    def put(self, path: str, value: Any, place: Location, written: str) -> None:
        """Set a leaf or an untouched value; a second spelling of the same key is a fault."""
        if path in self.written:
            self.faults.append(
                ConfigError(
                    f"the same key as {self.written[path]}",
                    where=place.where(written),
                    fix=f"Keep {path.rpartition('.')[2]} and remove the other.",
                )
            )
            return
        self.written[path] = written
        parts = tuple(path.split("."))
        section = self.value
        for part in parts[:-1]:
            inner = section.setdefault(part, {})
            if not isinstance(inner, dict):
                return
            section = inner
        section[parts[-1]] = value
        self.places[parts] = place


def canonical(document: Document) -> Canonical:
    """Return every key of ``document`` under its canonical path.

    Pure: faults are collected, not raised.
    """
    result = Canonical()
    _walk(document, document.value, (), "", result)
    return result


def _walk(document: Document, section: Mapping[str, Any], raw: Path, parent: str, result: Canonical) -> None:
    for name, value in section.items():
        raw_path = (*raw, str(name))
        place = document.at(raw_path)
        row = lookup(parent, str(name))
        if row is None and not parent and name in _UNREAD:
            written = f"{place.where(str(name))}: not read, as in DeepSpeed"
            result.notes.append(f"{written}. What counts is the key inside zero_optimization.")
        elif row is None:
            result.faults.append(_unknown_key(place, raw_path, parent, str(name)))
        elif value is None:
            continue
        elif row.path == "amp":
            _amp(document, value, raw_path, result)
        elif row.support is Support.MAPPED:
            _map(row, value, place, raw_path, result)
        elif isinstance(row.type, Section):
            _enter(document, row, value, raw_path, result)
        else:
            _leaf(document, row, value, raw_path, result)


def _enter(document: Document, row: Key, value: Any, raw_path: Path, result: Canonical) -> None:
    place = document.at(raw_path)
    kind = row.type
    if isinstance(value, bool) and isinstance(kind, Section) and kind.switch:
        result.put(
            f"{row.path}.{kind.switch}",
            int(value),
            place.noted(f"written as {row.path}: {str(value).lower()}", Provenance.REWRITTEN),
            row.path,
        )
        return
    if not isinstance(value, Mapping):
        switch = lookup(row.path, "enabled")
        fix = f'Write {{"enabled": {str(value).lower()}}}.' if switch and isinstance(value, bool) else None
        result.faults.append(
            ConfigError(
                "not a section", where=place.where(".".join(raw_path)), got=shown(value), expected="an object", fix=fix
            )
        )
        return
    if raw_path[-1] != row.name:
        result.notes.append(f"{place.where('.'.join(raw_path))}: read as {row.path}.")
    _declare(row, place, raw_path, result)
    _walk(document, value, raw_path, row.path, result)


def _declare(row: Key, place: Location, raw_path: Path, result: Canonical) -> None:
    """Create the section, even if it is empty; two spellings of it at once are a fault."""
    parts = tuple(row.path.split("."))
    before = result.written.get(row.path)
    if before is not None and before != ".".join(raw_path):
        result.faults.append(
            ConfigError(f"the same section as {before}", where=place.where(".".join(raw_path)), fix="Keep one of them.")
        )
    result.written[row.path] = ".".join(raw_path)
    section = result.value
    for part in parts:
        section = section.setdefault(part, {})
    result.places[parts] = place


def _leaf(document: Document, row: Key, value: Any, raw_path: Path, result: Canonical) -> None:
    place = document.at(raw_path)
    result.put(row.path, value, place, ".".join(raw_path))
    parts = tuple(row.path.split("."))
    # the lines inside optimizer.params and other open values
    for inner, inner_place in document.places.items():
        if len(inner) > len(raw_path) and inner[: len(raw_path)] == raw_path:
            result.places[(*parts, *inner[len(raw_path) :])] = inner_place


def _map(row: Key, value: Any, place: Location, raw_path: Path, result: Canonical) -> None:
    dotted = ".".join(raw_path)
    for path, meaning in translate(row.path, _checked(row, value, place, dotted, result)):
        note = f"{place.where(dotted)}: an old spelling. Write {path}: {shown(meaning)}."
        _assign(path, meaning, place, dotted, note, result)


def _amp(document: Document, value: Any, raw_path: Path, result: Canonical) -> None:
    place = document.at(raw_path)
    if not isinstance(value, Mapping):
        result.faults.append(
            ConfigError("not a section", where=place.where("amp"), got=shown(value), expected="an object")
        )
        return
    levels: dict[str, Any] = {}
    for name, inner in value.items():
        path = (*raw_path, str(name))
        row = lookup("amp", str(name))
        if row is None:
            result.faults.append(_unknown_key(document.at(path), path, "amp", str(name)))
        elif row.support is not Support.MAPPED:
            _leaf(document, row, inner, path, result)
        elif inner is not None and inner != "auto":
            levels[row.name] = _checked(row, inner, document.at(path), row.path, result)
    for path_of, meaning in translate_amp(levels):
        note = f"{place.where('amp')}: DeepSpeed has removed it. Read as {path_of}: {shown(meaning)}."
        _assign(path_of, meaning, place, "amp", note, result)


def _checked(row: Key, value: Any, place: Location, dotted: str, result: Canonical) -> Any:
    """Return the value in its inside form; None, and a fault, if it is not of its kind."""
    try:
        return row.type.read(value).value
    except ValidationError as problem:
        result.faults.append(problem.fault(place.where(dotted), value))
        return None


def _assign(path: str, meaning: Any, place: Location, dotted: str, note: str, result: Canonical) -> None:
    result.notes.append(note)
    for leaf, inner in _leaves(path, meaning):
        result.put(leaf, inner, place.noted(f"written as {dotted}", Provenance.REWRITTEN), dotted)


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _leaves(f"{path}.{key}", inner)]
    return [(path, value)]


def _unknown_key(place: Location, raw_path: Path, parent: str, name: str) -> ConfigError:
    """Return the fault for a key that is in no row, with the nearest known key and what DeepSpeed
    would have done with it.
    """
    meant = nearest(parent, name)
    hints = [f'Did you mean "{meant}"?'] if meant else []
    if parent in _LAX:
        lost = " and train without ZeRO" if parent == "" and meant == "zero_optimization" else ""
        hints.append(f"(DeepSpeed would ignore this{lost}.)")
    return ConfigError("unknown key", where=place.where(".".join(raw_path)), fix=" ".join(hints) or None)
