"""The resolved configuration: every value with its source, as table, JSON and ds_config."""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zero_trial.ds_config.key import Support
from zero_trial.ds_config.key_rules import AUTO, unfilled
from zero_trial.ds_config.table import FIELDS, TABLE, DsConfig
from zero_trial.schema.document import Document, Provenance, ValueSource, shown
from zero_trial.util.text import table


@dataclass(frozen=True)
class Row:
    """One value: its name, the value, its source, and an optional remark."""

    name: str
    value: Any
    source: str
    remark: str = ""


def render_rows(rows: Iterable[Row]) -> str:
    """Return the rows in aligned columns, one line each."""
    return table([(row.name, shown(row.value), row.source, row.remark) for row in rows])


@dataclass(frozen=True)
class ReportEntry:
    """One key of the report."""

    key: str
    value: Any
    source: ValueSource
    answer: str
    remark: str


def config_report(config: DsConfig) -> tuple[ReportEntry, ...]:
    """Return every value of ``config``, including defaults, and every given key that has no field
    of its own."""
    found: list[ReportEntry] = []
    left, given_raw = unfilled(config.raw), Document(dict(config.raw))
    for path, row in TABLE.items():
        source = config.source(path)
        given = not source.is_default
        if row.is_section or row.support is Support.MAPPED or (path not in FIELDS and not given):
            continue
        exists, value = _value(config, path) if path in FIELDS else (True, given_raw.get(tuple(path.split("."))))
        if not exists:
            continue
        remark = left.get(path, "")
        if not remark and row.was is not None and not given:
            remark = f"{row.was} before DeepSpeed 0.19.8"
        elif not remark and given and row.asks(value) and row.support in (Support.NO_EFFECT, Support.NOT_YET):
            remark = f"{row.support.value}: {row.meaning}"
        found.append(ReportEntry(path, AUTO if path in left else value, source, row.support.value, remark))
        inner = [key for key in left if row.name == "params" and key.rpartition(".")[0] == path]
        found += [ReportEntry(key, AUTO, config.source(key), row.support.value, left[key]) for key in inner]
    return tuple(found)


def render_report(config: DsConfig, *, everything: bool = False) -> str:
    """Return the report as text: the given values and those with a remark, then the warnings; with
    ``everything`` also the defaults."""
    entries = config_report(config)
    rows = [
        Row(entry.key, entry.value, entry.source, entry.remark)
        for entry in entries
        if everything or not entry.source.is_default or "before" in entry.remark
    ]
    notes = "".join(f"\nwarning: {warning}" for warning in config.warnings)
    return render_rows(rows) + notes


def short_report(entries: Iterable[ReportEntry], width: int = 120) -> str:
    """Return one paragraph for values that are in effect although the user did not write them, and
    one for written values without effect. Empty paragraphs are omitted.

    Skips keys of disabled sections and defaults that enable nothing.
    """
    listed = list(entries)
    off = {entry.key.rpartition(".")[0] for entry in listed if entry.key.endswith(".enabled") and entry.value is False}
    own = [entry for entry in listed if not entry.source.is_given and entry.answer == Support.SUPPORTED.value]
    counts = [e for e in own if e.value not in (None, False, (), []) and e.key.rpartition(".")[0] not in off]
    defaults = [f"{e.key} {shown(e.value)}" for e in counts if e.source.is_default]
    filled = [f"{e.key} {shown(e.value)} ({e.source})" for e in counts if not e.source.is_default]
    idle = [f"{e.key} ({e.source}; {e.remark})" for e in listed if e.remark.startswith("no effect")]
    parts = {"defaults": defaults, "filled in": filled, "without effect": idle}
    lines = [
        textwrap.fill(", ".join(words), width, initial_indent=f"ds_config, {title}: ", subsequent_indent="    ")
        for title, words in parts.items()
        if words
    ]
    return "\n".join(lines)


def filled_line(config: DsConfig) -> str:
    """Return the value of every "auto" and its source; "" if there was no "auto"."""
    filled = [
        f"{path} {shown(_value(config, path)[1])} ({source.removeprefix('auto: ').partition(' (')[0]})"
        for path, source in config.sources.items()
        if source.provenance is Provenance.AUTO
    ]
    return f"ds_config, filled in: {', '.join(filled)}" if filled else ""


def clipping_line(config: DsConfig) -> str:
    """Return a line if gradients are clipped although ds_config does not set it; else ""."""
    if not config.source("gradient_clipping").is_default or not config.gradient_clipping:
        return ""
    return f"gradient_clipping {config.gradient_clipping} by default: ds_config does not set it; 0 disables it"


def report_json(config: DsConfig, batch: Iterable[Row] = ()) -> str:
    """Return the report as JSON: ``values`` (one object per key), ``batch`` (rows of a
    Reconciliation), ``warnings``, and ``ds_config``, which reproduces the run."""
    body = {
        "values": [asdict(entry) for entry in config_report(config)],
        "batch": [asdict(row) for row in batch],
        "warnings": list(config.warnings),
        "ds_config": resolved_ds_config(config),
    }
    return json.dumps(body, indent=2, ensure_ascii=False)


def entries_of(body: Mapping[str, Any]) -> tuple[ReportEntry, ...]:
    """Return the entries of a JSON report."""
    return tuple(ReportEntry(**{**value, "source": ValueSource(value["source"])}) for value in body["values"])


def resolved_ds_config(config: DsConfig) -> dict[str, Any]:
    """Return a plain ds_config with every value written out, including defaults. Reading it returns
    the same configuration on any release."""
    found = copy.deepcopy(dict(config.raw))
    left = unfilled(config.raw)
    for path in sorted(FIELDS):
        row = TABLE[path]
        exists, value = _value(config, path)
        if row.is_section or not exists or value is None or path in left:
            continue
        if row.name == "params":
            value = {**value, **{key.rpartition(".")[2]: AUTO for key in left if key.rpartition(".")[0] == path}}
        section = found
        for part in path.split(".")[:-1]:
            section = section.setdefault(part, {})
        section[row.name] = _as_json(value)
    # drop sections that held only nulls
    return {key: value for key, value in found.items() if value != {}}


def _value(config: DsConfig, path: str) -> tuple[bool, Any]:
    """Return whether the section of ``path`` exists, and the value."""
    value: Any = config
    for part in path.split("."):
        if value is None:
            return False, None
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return True, value


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    return value
