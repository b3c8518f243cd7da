"""The line that a Python runs when it starts, and what it imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from zero_trial.compat.deepspeed.deepspeed_table import started_with_stand_in


def line() -> str:
    """The line as setup.py writes it."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    found = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "START"]
    return str(ast.literal_eval(found[0]))


def python(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after site has read the line from ``folder``, as it does from site-packages."""
    (folder / "zero_trial_start.pth").write_text(line())
    environment = {k: v for k, v in os.environ.items() if k != "ZERO_TRIAL_AS_DEEPSPEED"} | env
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", f"import site, sys; site.addsitedir({str(folder)!r})\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LOADED = "print(sorted(name for name in sys.modules if name.startswith('zero_trial')))\n"


@pytest.mark.parametrize(("value", "loaded"), [("", []), ("0", []), ("1", ["zero_trial_start"])])
def test_nothing_of_the_package_is_loaded_at_the_start(tmp_path: Path, value: str, loaded: list[str]):
    done = python(tmp_path, LOADED, ZERO_TRIAL_AS_DEEPSPEED=value)
    assert done.stdout == f"{loaded}\n", done.stderr


def test_deepspeed_is_found_without_a_word_of_zero_trial(tmp_path: Path):
    code = "import importlib.metadata, importlib.util\n"
    code += "assert importlib.util.find_spec('json.tool') and 'pytest' in importlib.metadata.packages_distributions()\n"
    code += "print(importlib.metadata.version('deepspeed'), importlib.util.find_spec('deepspeed').name)\n"
    code += "import deepspeed, deepspeed.pipe\nprint(deepspeed.__version__, type(sys.meta_path[0]).__name__)"
    done = python(tmp_path, code, ZERO_TRIAL_AS_DEEPSPEED="1")
    assert done.stdout == "0.19.8 deepspeed\n0.19.8 StandInFinder\n", done.stderr


@pytest.mark.parametrize("module", ["as_deepspeed", "as_determined"])
def test_asking_for_the_stand_in_once_more_is_no_clash(tmp_path: Path, module: str):
    code = f"import zero_trial.{module}, deepspeed\nprint(deepspeed.__version__)"
    done = python(tmp_path, code, ZERO_TRIAL_AS_DEEPSPEED="1")
    assert done.stdout == "0.19.8\n", done.stderr


def test_the_real_one_is_refused_at_its_import(tmp_path: Path):
    (tmp_path / "deepspeed.py").write_text("")
    done = python(tmp_path, "print(1)\nimport deepspeed", ZERO_TRIAL_AS_DEEPSPEED="1")
    assert done.returncode != 0 and done.stdout == "1\n" and str(tmp_path / "deepspeed.py") in done.stderr


WORKERS = """
import multiprocessing, sys
import deepspeed, importlib.metadata

def version(number):
    return [deepspeed.__version__, importlib.metadata.version("deepspeed")][number]

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(1) as pool:
        print(pool.map(version, range(2)))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_script_import_deepspeed_too(tmp_path: Path, method: str):
    """With nothing installed: the tree on PYTHONPATH alone."""
    (tmp_path / "script.py").write_text(WORKERS)
    env = {k: v for k, v in os.environ.items() if k != "ZERO_TRIAL_AS_DEEPSPEED"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zero_trial.as_deepspeed", "script.py", method]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "['0.19.8', '0.19.8']\n", done.stderr


def test_pythons_of_a_run_start_with_the_stand_in():
    env = started_with_stand_in({"PYTHONPATH": os.pathsep.join(["/mine", "/too"]), "HOME": "/h"}, "replace")
    first, *others = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file() and others == ["/mine", "/too"]
    assert env["ZERO_TRIAL_AS_DEEPSPEED"] == "replace" and env["HOME"] == "/h"
    assert started_with_stand_in(env) == env
    assert started_with_stand_in({})["ZERO_TRIAL_AS_DEEPSPEED"] == "1"
