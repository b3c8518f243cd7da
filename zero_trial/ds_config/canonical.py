"""One spelling per key: aliases are resolved, old keys translated, unknown keys reported with the
nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.ds_config.key import Key, Support
from zero_trial.ds_config.table import lookup, nearest
from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, Path, Provenance, shown
from zero_trial.schema.types import Section, ValidationError

Assignments = list[tuple[str, Any]]

# Sections that DeepSpeed reads as plain dicts, so that it does not see a misspelled key in them.
_LAX = ("", "aio", "activation_checkpointing", "flops_profiler", "pipeline", "checkpoint")

# Dotted names that TRL adds at the top of a reference model's config. No other dotted name is
# taken: "zero_optimization.stage" there is an error, while these only limit memory.
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
    """Return the (dotted path, value) pairs that stand for a mapped key with a checked value; none
    where it asks for nothing.
    """
    if value in (None, "auto") or row.becomes is None:
        return []
    if row.becomes in _IF_TRUE:
        return [(row.becomes, _IF_TRUE[row.becomes])] if value else []
    return [(row.becomes, value)]


def translate_amp(amp: Mapping[str, Any]) -> Assignments:
    """Translate apex's levels: O1 is autocast with fp16, O2 and O3 are fp16 parameters."""
    level = amp.get("opt_level", "O1")
    if amp.get("enabled") is not True or level == "O0":
        return []
    if level == "O1":
        return [("torch_autocast", {"enabled": True, "dtype": "fp16"})]
    scales = {f"fp16.{name}": amp.get(name) for name in ("loss_scale", "min_loss_scale")}
    return [("fp16.enabled", True), *((path, value) for path, value in scales.items() if isinstance(value, float))]


class Canonical:
    """A document with canonical keys only, and everything that was wrong or worth saying on the
    way. Faults are collected, not raised.
    """

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
                self._note(raw, "not read, as in DeepSpeed. What counts is the key inside zero_optimization.")
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
        # the lines inside optimizer.params and other open values
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
            elif inner not in (None, "auto"):  # there is no apex: an "auto" switch is off
                levels[row.name] = self._checked(row, inner, path)
        for dotted, meaning in translate_amp(levels):
            self._assign(dotted, meaning, raw, f"DeepSpeed has removed it. Read as {dotted}: {shown(meaning)}.")

    def _checked(self, row: Key, value: Any, raw: Path) -> Any:
        """Return the value in its inside form; None, and a fault, if it is not of its kind."""
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
        """Set a leaf or an untouched value; a second spelling of the same key is a fault."""
        *above, name = parts = tuple(path.split("."))
        if path in self._written:
            self._fault(f"the same key as {self._written[path]}", raw, fix=f"Keep {name} and remove the other.")
            return
        self._written[path] = ".".join(raw)
        self._section(above)[name] = value
        self.places[parts] = place

    def _section(self, parts: Path | list[str]) -> dict[str, Any]:
        """Return the section of a path; those on the way are created."""
        section = self.value
        for part in parts:
            section = section.setdefault(part, {})
        return section

    def _unknown(self, raw: Path, parent: str) -> None:
        """Add the fault for a key that is in no row, with the nearest known key and what DeepSpeed
        would have done with it.
        """
        meant = nearest(parent, raw[-1])
        hints = [f'Did you mean "{meant}"?'] if meant else []
        if parent in _LAX:
            lost = " and train without ZeRO" if parent == "" and meant == "zero_optimization" else ""
            hints.append(f"(DeepSpeed would ignore this{lost}.)")
        self._fault("unknown key", raw, fix=" ".join(hints) or None)
