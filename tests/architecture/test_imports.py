"""Who may import whom. The tables are the rules; an arrow that is not in them runs the wrong way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.architecture.sources import Module, known_names, modules

# Room -> what it may import of the package. "platform.protocols" allows that one module of a room. Its own room is always allowed.
ARROWS: Mapping[str, set[str]] = {
    "__init__": {"*"},  # the public names
    "run": {"*"},  # one rank as a module
    "fronts": {"*"},  # the composition roots of one rank
    "errors": set(),
    "util": set(),  # what every room may use
    "config": {"errors"},
    "mesh": {"errors"},
    "ops": {"errors"},
    "precision": {"errors"},
    "data": {"errors"},
    "templates": {"data", "trial", "__init__"},  # what a user may write
    "activation": {"config", "errors"},
    "zero": {"ops", "mesh", "precision", "errors"},
    "checkpoint": {"zero.layout", "mesh", "errors"},
    # Foreign files become a checkpoint of ours; no engine is needed for it.
    "importing": {"checkpoint", "errors"},
    "pipeline": {"mesh", "activation", "errors"},
    "engine": {"zero", "pipeline", "checkpoint", "precision", "ops", "mesh", "config", "activation", "errors"},
    # A plan imagines an engine on ranks that are not there.
    "planning": {"engine", "zero", "pipeline", "checkpoint", "precision", "ops", "mesh", "config", "errors"},
    "platform": {"errors"},
    "trial": {"platform.protocols", "config", "errors"},
    "launch": {"config", "errors"},
    "master": {"config", "errors"},
    # A report reads what runs and the master have written; it asks the search's own rules why a trial was stopped.
    "report": {"config", "master", "errors"},
    # A check rehearses the user's trial with an engine of its own, so it meets the trial half and never the engine's; it refuses by the
    # master's rules what the master would refuse.
    "checking": {"config", "launch", "master.expconf", "trial", "platform", "errors"},
    # A plan needs both halves, the user's trial and an engine, and a platform in memory for the trial: they meet in cli/plan.
    "cli": {
        "checkpoint",
        "checking",
        "launch",
        "master",
        "trial",
        "engine",
        "importing",
        "pipeline",
        "planning",
        "platform",
        "report",
        "config",
        "errors",
        "__init__",
    },
}

# Rooms whose import must not bring torch with it: they read configurations and start ranks, within a second.
WITHOUT_TORCH = ("util", "config", "launch", "master", "report")

ONLY_IMPORTERS = {"determined": ("zero_trial.platform.determined",), "deepspeed": (), "hjson": (), "pydantic": ()}


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def wrong_arrows(module: Module, names: set[str]) -> list[str]:
    """Imports of the module that its room's row of the table does not allow."""
    allowed = ARROWS.get(module.room, set())
    if "*" in allowed:
        return []
    wrong = []
    for item in module.imports():
        if item.module not in names:  # another package, or a name inside a module
            continue
        room = room_of(item.module)
        # Importing `zero_trial.x` names its parents too; only the package itself as such is an arrow.
        if room in (module.room, "util", *allowed) or item.module == "zero_trial":
            continue
        inside = ".".join(item.module.split(".")[1:])
        if any(
            inside == entry or inside.startswith(f"{entry}.") or entry.startswith(f"{inside}.")
            for entry in allowed
            if "." in entry
        ):
            continue
        wrong.append(f"{module.place}:{item.line} imports {item.module}")
    return wrong


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a ring (Tarjan 1972, the strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            ring = stack[place:]
            del stack[place:]
            if len(ring) > 1:
                found.append(sorted(ring))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_arrows_run_the_right_way():
    wrong = [line for module in modules() for line in wrong_arrows(module, known_names())]
    assert wrong == []


def test_every_room_has_a_row():
    assert {module.room for module in modules()} - set(ARROWS) == set()


def test_no_torch_where_start_up_must_be_fast():
    found = [
        f"{module.place}:{item.line}"
        for module in modules()
        if module.room in WITHOUT_TORCH
        for item in module.imports()
        if item.module.split(".")[0] == "torch"
    ]
    assert found == []


@pytest.mark.parametrize("package", sorted(ONLY_IMPORTERS))
def test_optional_packages_have_one_importer(package: str):
    importers = {m.name for m in modules() for item in m.imports() if item.module.split(".")[0] == package}
    assert importers <= set(ONLY_IMPORTERS[package])


def test_no_import_cycles():
    names = known_names()
    graph = {
        m.name: {i.module for i in m.imports() if i.top and i.module in names and i.module != m.name} for m in modules()
    }
    # A package and its own modules are one noun: `__init__` re-exports, and is not a ring.
    packages = {m.name for m in modules() if m.path.name == "__init__.py"}
    inner = {name: targets - packages for name, targets in graph.items() if name not in packages}
    assert cycles(inner) == []


@pytest.mark.parametrize("room", ["launch", "config", "cli.main"])
def test_importing_does_not_load_torch(room: str):
    """By running it: ``import zero_trial`` itself must stay lazy too."""
    listed = [m.name for m in modules() if m.name == f"zero_trial.{room}" or m.name.startswith(f"zero_trial.{room}.")]
    code = f"import sys, {', '.join(listed)}; sys.exit(3 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_rules_can_fail():
    """A ring is found, and so is an import that the table does not allow."""
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    trial = next((m for m in modules() if m.room == "launch"), None)
    assert trial is not None
    stranger = Module(
        "zero_trial.trial.x",
        trial.path,
        __import__("ast").parse("import zero_trial.zero.layout\nfrom zero_trial.platform import local"),
    )
    assert (
        len(wrong_arrows(stranger, {"zero_trial.zero.layout", "zero_trial.platform.local", "zero_trial.platform"})) >= 2
    )
