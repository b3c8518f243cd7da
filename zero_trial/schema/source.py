"""Open a ds_config in any form (dict, file, url-safe base64 of JSON, JSON text) as a Document."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document
from zero_trial.schema.json_source import read_json
from zero_trial.schema.yaml_source import read_yaml

Source: TypeAlias = Document | Mapping[str, Any] | str | os.PathLike[str]


def open_source(source: Source, name: str | None = None) -> Document:
    """Return the Document of any of the forms; ``name`` stands in messages instead of the file's
    own name. Raises ConfigError.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return Document.of(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "not a configuration",
            where="config",
            got=type(source).__name__,
            expected="a dict, a path, or base64 of JSON",
        )
    text = os.fspath(source).strip()
    if text.startswith("{"):
        return read_json(text, name or "config")
    if _is_file(text):
        return read_file(Path(text), name)
    decoded = _from_base64(text)
    if decoded is not None:
        return read_json(decoded, name or "base64")
    raise _no_such_file(text)


def read_file(path: Path, name: str | None = None) -> Document:
    """Return a JSON file, or a YAML one by its suffix."""
    text = read_text(path)
    reader = read_yaml if path.suffix in (".yaml", ".yml") else read_json
    return reader(text, name or path.name)


def read_text(path: Path) -> str:
    """Return the text of a configuration file; raises ConfigError, also where it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as problem:
        wide = problem.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        found, code = ("UTF-16", "UTF-16") if wide else ("another encoding", "ITS_ENCODING")
        fix = f"Save it as UTF-8: iconv -f {code} -t UTF-8, or Set-Content -Encoding utf8 in PowerShell."
        raise ConfigError("cannot be read", where=str(path), got=found, expected="UTF-8", fix=fix) from None
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot be read: {getattr(problem, 'strerror', None) or problem}", where=str(path)) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # base64 text is longer than a file name may be
        return False


def _from_base64(text: str) -> str | None:
    """Return the JSON text behind url-safe base64, or None if it is not that."""
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _no_such_file(text: str) -> ConfigError:
    shown = text if len(text) <= 120 else f"{text[:117]}..."
    near: list[str] = []
    if len(text) <= 255 and "\0" not in text:
        folder = Path(text).parent
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        near = difflib.get_close_matches(Path(text).name, names, 1)
    fix = f'Did you mean "{near[0]}"?' if near else "Give a path to a JSON file, a dict, or url-safe base64 of JSON."
    return ConfigError("no such file", where=shown or '""', fix=fix)
