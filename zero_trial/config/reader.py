"""Reading a ds_config into DsConfig: every key known, every value of its type, all faults reported together."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_trial.config import sections
from zero_trial.errors import ConfigError

_ALIASES = {"bfloat16": "bf16", "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"}
_OWN = {"sources", "warnings", "raw"}


def read_ds_config(source: Mapping[str, Any] | str | Path) -> sections.DsConfig:
    """A checked DsConfig from a dict or a JSON file. Raises ConfigError with all faults of the source."""
    if isinstance(source, Mapping):
        name, data = "ds_config", copy.deepcopy(dict(source))
    else:
        name = Path(source).name
        try:
            data = json.loads(Path(source).read_text("utf-8"))
        except (OSError, ValueError) as problem:
            raise ConfigError(f"cannot be read: {problem}", where=str(source)) from None
    reader = _Reader(name)
    values = reader.section(sections.DsConfig, data, "")
    if reader.faults:
        raise ConfigError.many(reader.faults)
    return dataclasses.replace(values, sources=reader.sources, raw=data)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: list[ConfigError] = []
        self.sources: dict[str, str] = {}

    def section(self, cls: Any, data: Any, path: str) -> Any:
        if not isinstance(data, Mapping):
            self.faults.append(ConfigError("not a section", where=path, got=repr(data), expected="an object"))
            return None
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)} - (_OWN if cls is sections.DsConfig else set())
        found = {}
        for key, value in data.items():
            name = _ALIASES.get(key, key)
            if cls is sections.ZeroSection:
                name = name.removeprefix("stage3_")
            dotted = f"{path}.{name}" if path else name
            if name not in known:
                near = difflib.get_close_matches(str(name), sorted(known), 1)
                fix = f'Did you mean "{near[0]}"?' if near else None
                self.faults.append(ConfigError("unknown key", where=f"{self.name} {dotted}", fix=fix))
                continue
            found[name] = self.value(hints[name], value, dotted)
            self.sources[dotted] = self.name
        if self.faults:
            return None
        return cls(**found)

    def value(self, hint: Any, value: Any, path: str) -> Any:
        options = list(typing.get_args(hint)) if typing.get_origin(hint) in (types.UnionType, typing.Union) else [hint]
        if value is None and type(None) in options:
            return None
        for option in options:
            if dataclasses.is_dataclass(option):
                return self.section(option, value, path)
            if option is bool and isinstance(value, bool):
                return value
            if option is int and not isinstance(value, bool) and isinstance(value, int | float) and value == int(value):
                return int(value)
            if option is float and not isinstance(value, bool) and isinstance(value, int | float):
                return float(value)
            if option is str and isinstance(value, str):
                return value
            if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
                return tuple(value)
            if typing.get_origin(option) in (Mapping, dict) and isinstance(value, Mapping):
                return dict(value)
        self.faults.append(ConfigError("wrong type", where=f"{self.name} {path}", got=repr(value), expected=str(hint)))
        return None
