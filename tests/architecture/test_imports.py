"""Who may import whom. The tables are the rules; an arrow that is not in them runs the wrong
way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter

import pytest

from tests.architecture.sources import Module, known_names, modules, room_of

# Room -> what it may import of the package. "trial.runtime.protocols" allows that one module of a
# room. Its own room, and util, are always allowed.
ARROWS: Mapping[str, set[str]] = {
    "__init__": {"*"},  # the public names
    "run": {"*"},  # one rank as a module
    "trial.runtime": {"*"},  # the composition roots of one rank
    "as_deepspeed": {"compat.deepspeed"},
    "as_determined": {"compat", "compat.deepspeed", "run"},
    "lightning": {"compat.lightning_strategy"},
    "errors": set(),
    "device": set(),  # knows torch's devices, and nothing of the package
    "util": {"errors"},
    # Configuration
    "schema": {"errors"},
    "ds_config": {"schema", "sharding.plan", "errors"},
    "experiment": {"ds_config", "schema", "errors"},
    # The engine half: knows nothing of experiments.
    "comm": {"device", "errors"},
    "ops": {"device", "errors"},
    "long_sequences": {"errors"},  # a user's model calls it
    "activation_checkpointing": {"ds_config", "comm", "sharding.offload.copies", "device", "errors"},
    # zero.Init reads the ds_config that it is given; an average reads its section
    "sharding": {"ops", "comm", "device", "ds_config.keys_training", "ds_config.reader", "ds_config.table", "errors"},
    "zero": {"sharding"},  # the public names of sharding
    "checkpoint": {"comm", "device", "errors"},
    # never sharding: unshard and reduce are actions
    "pipeline": {"comm", "activation_checkpointing", "errors"},
    "engine": {
        *("sharding", "zero", "pipeline", "checkpoint", "ops", "comm", "activation_checkpointing"),
        *("ds_config", "device", "errors"),
    },
    # The trial half: knows nothing of sharding.
    "data": {"errors"},
    "cli.templates": {"data", "trial", "__init__"},  # what a user may write
    "trial": {"trial.runtime.protocols", "ds_config", "schema", "errors"},
    "trial.runs": {"experiment", "schema", "errors"},
    "launch": {"experiment", "ds_config", "trial.runs", "compat.deepspeed.deepspeed_table", "errors"},
    "master": {"experiment", "ds_config", "schema", "errors"},
    # asks the search's own rules why a trial was stopped
    "report": {"experiment", "schema", "master", "trial.runs", "errors"},
    # Both halves together: the user's trial and the engine on ranks that are not there, and short
    # trials that the master's searcher stops.
    "planning": {
        *("compat", "compat.deepspeed", "engine", "sharding", "pipeline", "comm", "ops", "checkpoint", "device"),
        "activation_checkpointing",
        *("trial", "trial.runtime.protocols", "trial.runtime.local", "trial.runs", "launch", "master"),
        *("experiment", "ds_config", "schema", "errors"),
    },
    # Other projects
    # a finder for tables of names, the table of Determined's names, and Lightning's strategy
    "compat": {"engine", "zero", "ds_config", "schema", "errors"},
    "compat.deepspeed": {"*"},  # DeepSpeed's names, which come from every room
    "compat.importing": {"checkpoint", "errors"},  # foreign files become a checkpoint without an engine
    "compat.start": {"launch"},  # runs before anything else is imported; but for words about ranks that failed
    "cli": {
        *("checkpoint", "planning", "launch", "master", "trial", "engine", "compat", "pipeline", "trial.runtime"),
        *("trial.runs", "report", "experiment", "ds_config", "schema", "errors", "__init__"),
        "sharding.plan",  # the plan of a stage, which is pure: a schedule is drawn without torch
        *("compat.deepspeed", "compat.importing"),  # their tables for `launch` and `ckpt`
        "ops.dispatch",  # what each op runs as, for `env`
    },
}
# Rooms whose import must not bring torch with it: they read configurations and start ranks, within
# a second.
WITHOUT_TORCH = (
    "util",
    "schema",
    "ds_config",
    "experiment",
    "trial.runs",
    "launch",
    "master",
    "report",
)

ONLY_IMPORTERS = {
    # its harness, its storage managers
    "determined": ("zero_trial.trial.runtime.determined",),
    "lightning": ("zero_trial.compat.lightning_strategy",),
    "deepspeed": (),
    "hjson": (),
    "pydantic": (),
}


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
        # Importing `zero_trial.x` names its parents too; only the package itself as such is an
        # arrow.
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


def test_arrows_run_the_right_way():
    names = known_names()
    wrong = [line for module in modules() for line in wrong_arrows(module, names)]
    assert wrong == []


def test_every_room_has_a_row():
    assert {module.room for module in modules()} - set(ARROWS) == set()


def test_no_torch_where_start_up_must_be_fast():
    found = [
        f"{module.place}:{item.line}"
        for module in modules()
        if module.room in WITHOUT_TORCH and module.name != "zero_trial.launch.meeting"  # for several hosts alone
        for item in module.imports()
        if item.module.split(".")[0] == "torch"
    ]
    assert found == []


@pytest.mark.parametrize("package", sorted(ONLY_IMPORTERS))
def test_optional_packages_have_one_importer(package: str):
    importers = {m.name for m in modules() for item in m.imports() if item.module.split(".")[0] == package}
    assert importers <= set(ONLY_IMPORTERS[package])


def test_no_import_cycles():
    """Imports under TYPE_CHECKING count: who has to know whom is the same question for a reader as
    for Python."""
    names = known_names()
    graph = {
        m.name: {i.module for i in m.imports(types=True) if i.top and i.module in names and i.module != m.name}
        for m in modules()
    }
    # A package and its own modules are one noun: `__init__` re-exports, and is not a ring.
    packages = {m.name for m in modules() if m.path.name == "__init__.py"}
    inner = {name: targets - packages for name, targets in graph.items() if name not in packages}
    TopologicalSorter(inner).prepare()  # raises CycleError, which names a ring


@pytest.mark.parametrize("room", ["launch", "ds_config", "experiment", "trial.runs", "cli.main"])
def test_importing_does_not_load_torch(room: str):
    """By running it: ``import zero_trial`` itself must stay lazy too."""
    listed = [m.name for m in modules() if m.name == f"zero_trial.{room}" or m.name.startswith(f"zero_trial.{room}.")]
    code = f"import sys, {', '.join(listed)}; sys.exit(3 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_rules_can_fail():
    """An import that the table does not allow is found."""
    trial = next((m for m in modules() if m.room == "launch"), None)
    assert trial is not None
    stranger = Module(
        "zero_trial.trial.x",
        trial.path,
        __import__("ast").parse("import zero_trial.sharding.layout\nfrom zero_trial.trial.runtime import local"),
    )
    assert (
        len(
            wrong_arrows(
                stranger, {"zero_trial.sharding.layout", "zero_trial.trial.runtime.local", "zero_trial.trial.runtime"}
            )
        )
        >= 2
    )
