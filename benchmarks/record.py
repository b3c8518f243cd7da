"""Save a benchmark's results: a JSON file and a markdown table, with machine, versions, the
commit and the command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")
Column = tuple[str, Callable[[dict[str, Any]], str]]


def save(name: str, settings: dict[str, Any], rows: list[dict[str, Any]], columns: Sequence[Column], note: str) -> None:
    """Write ``results/<name>.json`` and ``.md``, and print the table. A row without a command
    is from this run."""
    facts: dict[str, Any] = {"command": command(), "commit": AT_START, "machine": machine(), "versions": versions()}
    facts["settings"] = settings
    table = markdown(rows, columns)
    FOLDER.mkdir(exist_ok=True)
    FOLDER.joinpath(f"{name}.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    text = [f"# {name}", "", note, "", table, ""]
    commands = dict.fromkeys(row.get("command", facts["command"]) for row in rows)
    text += [f"- command: {each}" for each in commands]
    commits = dict.fromkeys(row.get("commit", facts["commit"]) for row in rows)
    text += [f"- commit: {', '.join(each or 'unknown' for each in commits)}"]
    for key, value in list(facts.items())[2:]:
        shown = value if isinstance(value, str) else ", ".join(f"{name} {item}" for name, item in value.items())
        text.append(f"- {key}: {shown}")
    FOLDER.joinpath(f"{name}.md").write_text("\n".join(text) + "\n")
    print(table)


def earlier(name: str) -> list[dict[str, Any]]:
    """Return the rows in ``results/<name>.json``, each with the command and commit that
    measured it."""
    path = FOLDER / f"{name}.json"
    known = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    return [{"command": known["command"], "commit": known.get("commit")} | row for row in known["rows"]]


def markdown(rows: list[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Return a markdown table, one line per row."""
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def number(key: str, digits: int = 1) -> Callable[[dict[str, Any]], str]:
    """Return a cell function: ``row[key]`` with this many digits, a text that explains why there is
    no number, or nothing."""

    def cell(row: dict[str, Any]) -> str:
        value = row.get(key)
        if isinstance(value, str):
            return value.replace("|", "/")
        return f"{value:.{digits}f}" if value is not None else ""

    return cell


def command() -> str:
    """Return the command line, without any path outside of the repository."""
    script, home = Path(sys.argv[0]).resolve(), FOLDER.parent
    place = script.relative_to(home) if script.is_relative_to(home) else Path(script.name)
    # keep only the name of a folder of this machine (--before)
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{place}", *given])


def commit() -> str | None:
    """Return the short hash of the measured tree, with ``-dirty`` if it has changes other than
    results; None outside of a checkout."""
    root = Path(__file__).parents[1]
    changes = ["status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"]
    try:
        found, changed = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found + "-dirty" * bool(changed)


# the tree may change while a benchmark runs
AT_START = commit()


def machine() -> dict[str, Any]:
    """Return the processor and the memory, as far as the system reports them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    flags: list[str] = []
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        fields = {key.strip(): value.strip() for key, _, value in lines}
        model = fields.get("model name", model)
        wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
        flags = sorted(wanted & set(fields.get("flags", "").split()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory), "features": " ".join(flags)}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the measured packages."""
    found = {"python": platform.python_version()}
    for package in ("torch", "zero_trial", "deepspeed", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
