"""The entrypoint: find the trial class and its file by parsing the source, without running it."""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_trial.errors import ConfigError

BASE = "ZeroTrial"
_DEEPSPEED_BASE = "DeepSpeedTrial"
AS_DETERMINED = "zero_trial.as_determined"
DEEPSPEED_LAUNCHER = "determined.launch.deepspeed"
_FORM = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Entrypoint:
    """A class by module and name, written ``module:Class``."""

    module: str
    name: str
    as_determined: bool = False
    """Whether the command says that the class is a DeepSpeedTrial of Determined."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def file(self, model_dir: Path) -> Path | None:
        """Return the module's source in the model folder, or None."""
        stem = model_dir.joinpath(*self.module.split("."))
        candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)


def parse_entrypoint(value: str | Sequence[str] | None, where: str = "entrypoint") -> Entrypoint:
    """Return the class that an experiment's ``entrypoint`` names: ``model_def:MyTrial`` alone, or
    last in a cluster's launch command (``python3 -m determined.launch.torch_distributed python3 -m
    zero_trial.run model_def:MyTrial``). With ``zero_trial.as_determined`` or Determined's launcher
    for DeepSpeed, the class is a DeepSpeedTrial."""
    words = value.split() if isinstance(value, str) else list(value or ())
    found = [match for word in words if (match := _FORM.fullmatch(word))]
    if len(found) != 1:
        raise ConfigError(
            "the entrypoint names no trial class",
            where=where,
            got=repr(" ".join(words)) if words else "nothing",
            expected="module:Class",
            fix="Write entrypoint: model_def:MyTrial.",
        )
    return Entrypoint(found[0][1], found[0][2], as_determined=starts_deepspeed_trial(words))


def starts_deepspeed_trial(words: str | Sequence[str]) -> bool:
    """Return whether the class of an ``entrypoint`` is a Determined DeepSpeedTrial, whose own code
    reads the ds_config and lays hyperparameters over it."""
    return any(
        word in (AS_DETERMINED, DEEPSPEED_LAUNCHER) for word in (words.split() if isinstance(words, str) else words)
    )


def check_entrypoint(
    entrypoint: Entrypoint, model_dir: Path, where: str | None = None, *, shown: str | None = None
) -> None:
    """Raise ConfigError if the source shows that the class does not exist. Errors that appear only
    when the code runs are not detected. ``shown``: the folder's name in messages."""
    path = entrypoint.file(model_dir)
    if path is None:
        there = sorted(p.name for p in model_dir.glob("*.py")) if model_dir.is_dir() else []
        raise ConfigError(
            f"{entrypoint}: module {entrypoint.module} does not exist in {shown or model_dir}"
            + (f"; the folder has {', '.join(there[:8])}" if there else "; the folder has no Python files"),
            where=where,
            fix=_advice(entrypoint.module, [Path(name).stem for name in there], f":{entrypoint.name}"),
        )
    source = _read_source(path, str(path.relative_to(model_dir) if shown else path))
    names = _names(source)
    if entrypoint.name in names or "*" in names:
        return
    base = _DEEPSPEED_BASE if entrypoint.as_determined else BASE
    trials = trial_classes(source, base)
    it_defines = f"it defines {', '.join(f'{name}({base})' for name in trials)}" if trials else f"it defines no {base}"
    elsewhere = []
    for other in sorted(model_dir.glob("*.py")):
        with contextlib.suppress(ConfigError):
            body = _read_source(other, str(other)).body
            elsewhere += [
                other.stem for node in body if isinstance(node, ast.ClassDef) and node.name == entrypoint.name
            ]
    raise ConfigError(
        f"{entrypoint} not found in ./{path.relative_to(model_dir)}; {it_defines}",
        where=where,
        fix=_advice(entrypoint.module, elsewhere, after=f":{entrypoint.name}")
        or _advice(entrypoint.name, trials, before=f"{entrypoint.module}:")
        or f"Write class {entrypoint.name}({base}) there.",
    )


def _read_source(path: Path, shown: str) -> ast.Module:
    """Return the syntax tree of a file. For a syntax error, raises ConfigError with the line and
    ``shown``, the file's name in messages."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}", where=shown) from None
    except SyntaxError as error:
        raise ConfigError(
            f"not Python: {error.msg}", where=f"{shown}:{error.lineno}", got=repr((error.text or "").strip()[:80])
        ) from None
    except (MemoryError, RecursionError, ValueError) as error:
        raise ConfigError(f"Python cannot parse the file: {type(error).__name__}", where=shown) from None


def trial_classes(source: ast.Module, base: str = BASE) -> list[str]:
    """Return the module's classes that derive from ``base``, as far as the file shows."""
    aliases = {base}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == base}
    found: list[str] = []
    for node in source.body:
        if isinstance(node, ast.ClassDef) and any(_name(base) in aliases for base in node.bases):
            found.append(node.name)
            aliases.add(node.name)
    return found


def _name(base: ast.expr) -> str | None:
    """Return the last part of a base class's name: ``zero_trial.ZeroTrial[int]`` is ZeroTrial."""
    if isinstance(base, ast.Subscript):
        return _name(base.value)
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else None


def _names(source: ast.Module) -> set[str]:
    """Return the names that a module defines, imports or assigns; "*" for a star import."""
    names: set[str] = set()
    for node in source.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _advice(wanted: str, names: Sequence[str], after: str = "", before: str = "") -> str | None:
    """Return ``Use entrypoint: …`` with the only name in ``names``, or the nearest."""
    near = list(names) if len(names) == 1 else difflib.get_close_matches(wanted, names, n=1)
    return f"Use entrypoint: {before}{near[0]}{after}." if near else None
