"""The sources of the package, parsed once, as the architecture tests read them."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zero_trial"


INNER_ROOMS = (
    "trial.runs",
    "trial.runtime",
    "compat.deepspeed",
    "compat.importing",
    "compat.start",
    "cli.templates",
)
"""Folders inside of rooms that are rooms of their own: they may import other things."""


def room_of(name: str) -> str:
    """Return the room of a module: an inner room, or the folder or file right under the package."""
    _, _, inside = name.partition(".")
    for room in INNER_ROOMS:
        if inside == room or inside.startswith(f"{room}."):
            return room
    return inside.partition(".")[0] or "__init__"


@dataclass(frozen=True)
class Import:
    """One imported module, by full dotted name, with its line; ``top`` says that importing the file
    runs it."""

    module: str
    line: int
    top: bool


@dataclass(frozen=True, eq=False)
class Module:
    """One file of the package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.name)

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))

    def imports(self, *, types: bool = False) -> list[Import]:
        """List the imports that can run, with ``types`` also those under TYPE_CHECKING; those
        inside functions are not ``top``."""
        return list(_imports_of(self, types))


@cache
def _imports_of(module: Module, types: bool) -> tuple[Import, ...]:
    return tuple(_imports(module.tree, module.name, module.path.name == "__init__.py", top=True, types=types))


@cache
def modules() -> tuple[Module, ...]:
    """All files of the package."""
    return tuple(parse(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def parse(path: Path) -> Module:
    """Parse a file, once. The cycle collector leaves the trees alone, which stay: it would walk
    over them again and again, for four fifths of the time."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    collects = gc.isenabled()
    gc.disable()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    gc.freeze()
    if collects:
        gc.enable()
    return Module(name, path, tree)


@cache
def known_names() -> set[str]:
    return {module.name for module in modules()}


def tracked_files() -> list[Path]:
    """Files that git tracks; outside of a checkout (an unpacked archive), all files that are no
    build product."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not _is_product(path.relative_to(ROOT))]


def _is_product(path: Path) -> bool:
    """Whether a build or a run made this file. ``runs`` is one at the top only: a room of the
    package has that name too."""
    return path.parts[0] in {".venv", "build", "dist", "runs"} or "__pycache__" in path.parts


def _imports(tree: ast.AST, name: str, is_package: bool, *, top: bool, types: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, name, is_package)
            yield Import(base, node.lineno, top)
            # `from zero_trial.launch import records` imports the module records as well.
            yield from (
                Import(f"{base}.{alias.name}", node.lineno, top)
                for alias in node.names
                if base.startswith("zero_trial")
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in [*(node.body if types else ()), *node.orelse]:
                yield from _imports(ast.Module([branch], []), name, is_package, top=top, types=types)
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):  # no import in an expression
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(node, name, is_package, top=top and not inside, types=types)


def _base(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The absolute name of what a (possibly relative) ``from`` import names."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)
