"""The tree: tests mirror modules, files say what they are, experiments can be read, and nothing tells of one person's machine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.architecture.sources import ROOT, Module, modules, parse, tracked_files

# Tests that have no module of their name, and why.
TESTS_WITHOUT_A_MODULE = {
    "tests/architecture/": "they test the tree",
    "tests/model_defs/": "they mirror model_defs/",
    "tests/experiments/": "they mirror experiments/",
    "tests/benchmarks/": "they mirror benchmarks/",
    "tests/trial/test_with_": "the controller around the real engines",
    "tests/engine/test_oracle.py": "every stage against dense training: no one module's business",
    "tests/zero/test_volume.py": "what each stage moves per step, by the formulas: every piece has its part in it",
    "tests/engine/test_behaviour_": "what users do with an engine, across its modules",
    "tests/engine/test_keys.py": "each ds_config key from the file to its effect",
    "tests/config/test_exercised.py": "every honoured key and the test that fails without it",
    "tests/config/test_fuzz.py": "the whole room, with configurations changed at random",
    "tests/master/test_behaviour_": "what users live through with a master, across its modules",
    "tests/mesh/test_device_waits.py": "every verb over a strict backend",
    "tests/master/test_det_cli": "the genuine det command against a master, across its modules",
    "tests/checking/test_ten_mistakes.py": "mistakes of users and what is said about each, by whichever part finds it",
    "tests/launch/test_end_to_end.py": "whole runs from the command line",
    "tests/fronts/test_genuine_harness.py": "whole trials, through every front",
    "tests/fronts/test_embedded_master.py": "whole trials, from det to the last step",
    "tests/fronts/test_guides.py": "the names in the guides",
    "tests/fronts/test_first_sweep.py": "the guide from zero to a sweep",
    "tests/importing/test_mutated.py": "every reader, with files changed at random",
    "tests/launch/test_two_hosts.py": "whole runs between two network namespaces",
}

# Modules with code but no test file of their own, and where they are tested instead.
MODULES_WITHOUT_A_TEST: dict[str, str] = {}

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/[\w.]")
WORDS = re.compile(r"\b(?:this|last|next|your|my) sess" + r"ion\b", re.IGNORECASE)
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|download\.pytorch\.org|pypi\.org/simple|file:/" + "//")

EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))


def is_trivial(module: Module) -> bool:
    """Whether the module only declares: no function of it has a body beyond a docstring, ``...`` or pass."""
    functions = [node for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return not any(_does_something(node) for node in functions)


def _does_something(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        not isinstance(s, ast.Pass) and not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in function.body
    )


def mirror_of(module: Module) -> Path:
    """Where the test of a module lies."""
    relative = module.path.relative_to(ROOT / "zero_trial")
    return ROOT / "tests" / relative.parent / f"test_{relative.name}"


def module_of(test: Path) -> Path:
    """Which module a test file is about."""
    relative = test.relative_to(ROOT / "tests")
    return ROOT / "zero_trial" / relative.parent / relative.name.removeprefix("test_")


def text_files() -> list[tuple[str, str]]:
    """Tracked files that are text, by name."""
    found = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw[:4096]:
            found.append((str(path.relative_to(ROOT)), raw.decode("utf-8", errors="replace")))
    return found


def test_every_module_has_a_test():
    missing = [
        str(mirror_of(module).relative_to(ROOT))
        for module in modules()
        if module.path.name != "__init__.py" and not is_trivial(module) and not mirror_of(module).exists()
    ]
    assert [name for name in missing if name not in MODULES_WITHOUT_A_TEST] == []


def test_every_test_has_a_module():
    strangers = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not module_of(path).exists()
        and not any((name := str(path.relative_to(ROOT))).startswith(start) for start in TESTS_WITHOUT_A_MODULE)
    ]
    assert strangers == []


def test_exceptions_are_not_stale():
    """An exception whose file exists, or whose module is gone, is removed from the table."""
    stale = [name for name in MODULES_WITHOUT_A_TEST if (ROOT / name).exists() or not module_of(ROOT / name).exists()]
    assert stale == []


@pytest.mark.parametrize("folder", ["zero_trial", "tests", "model_defs", "benchmarks"])
def test_files_say_what_they_are(folder: str):
    """The first line of the docstring is about the one thing that the file is."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    silent = [str(path.relative_to(ROOT)) for path in paths if not ast.get_docstring(parse(path).tree)]
    assert silent == []


def test_no_path_or_word_of_one_machine():
    """Nothing in the project depends on, or tells of, the machine on which it was written."""
    found = [
        f"{name}: {match[0]}"
        for name, text in text_files()
        for rule in (MACHINE_PATHS, WORDS)
        for match in [rule.search(text)]
        if match
    ]
    assert found == []


def test_no_package_index_is_named():
    """Where packages come from is the user's setting, not ours."""
    found = [
        f"{name}: {match[0]}"
        for name, text in text_files()
        if name != "tests/architecture/test_tree.py" and (match := PACKAGE_INDEX.search(text))
    ]
    assert found == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(ROOT / "experiments")))
def test_every_experiment_can_be_read(path: Path):
    experiment = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "entrypoint", "searcher", "hyperparameters"} <= set(experiment)
    source = (experiment.get("data") or {}).get("ds_config")
    if isinstance(source, str):
        beside, model = path.parent / source, ROOT / "model_defs" / "gpt" / source  # what det sends lies with the model
        json.loads((beside if beside.exists() else model).read_text(encoding="utf-8"))


def test_the_rules_can_fail():
    assert (
        MACHINE_PATHS.search("see /ho" + "me/ann/x")
        and not MACHINE_PATHS.search("a/work/x")
        and not MACHINE_PATHS.search("/job/hostfile")
    )
    assert is_trivial(Module("a", ROOT, ast.parse('class P:\n  def f(self):\n    """Doc."""\n    ...\n')))
    assert not is_trivial(Module("a", ROOT, ast.parse("def f():\n  return 1\n")))
