"""The wheel, built from the sdist: what people install trains without the repository."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import zero_trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# what the sdist is built from
SOURCES = ("zero_trial", "zero_trial_start.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=lambda path, names: [name for name in names if Path(path) == ROOT and name not in SOURCES]
    )
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], check=True)
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and otherwise the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Files that end in .pth are read in site folders alone, so the checkout is not on the path.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    return folder


def test_the_sdist_has_the_sources_that_the_wheel_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "zero_trial").rglob("*") if _is_source(path)}
    assert wanted - names == set()


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


@pytest.fixture(scope="module")
def metadata(dist: Path) -> Message:
    """The wheel's metadata, as pip reads it and an index shows it."""
    (wheel,) = dist.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert path.replace("METADATA", "licenses/LICENSE") in archive.namelist()
        scripts = archive.read(path.replace("METADATA", "entry_points.txt")).decode()
        assert re.findall(r"^(\w\S*) =", scripts, re.MULTILINE) == ["zero-trial", "zt"]
        return email.message_from_bytes(archive.read(path))


def test_the_wheel_states_what_it_needs(metadata: Message) -> None:
    """Extras are those that pages and errors name; what modules import at once is installed."""
    keys = ("Name", "Version", "Requires-Python", "License-Expression", "Description-Content-Type")
    values = ["zero_trial", zero_trial.__version__, ">=3.10", "Apache-2.0", "text/markdown"]
    assert [metadata[key] for key in keys] == values
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    core = {need.name.lower(): str(need.specifier) for need in needs if need.marker is None}
    assert {name: version for name, version in core.items() if version} == {"torch": ">=2.11", "safetensors": ">=0.6.2"}
    assert {str(need.specifier) for need in needs if need.name == "determined"} == {"==0.38.1"}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "zero_trial").rglob("*.[mp][dy]")]
    extras = {word for page in pages for word in re.findall(r"zero_trial\[([a-z-]+)\]", page.read_text())}
    assert len(extras) > 4 and extras <= set(metadata.get_all("Provides-Extra", []))
    providers, known = importlib.metadata.packages_distributions(), {"zero_trial", *sys.stdlib_module_names}
    others = ("templates", "lightning_strategy.py")  # a user's; imported by those who have Lightning
    for module in (ROOT / "zero_trial").rglob("*.py"):
        for node in ast.parse(module.read_text()).body if not {*others} & {*module.parts} else ():
            imports = isinstance(node, ast.Import | ast.ImportFrom)
            names = [getattr(node, "module", None) or alias.name for alias in node.names] if imports else []
            for name in {name.partition(".")[0] for name in names} - known:
                assert {each.lower() for each in providers[name]} & {*core}, f"{module}: {name}"


def test_the_page_of_an_index_has_no_link_into_the_repository(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str) and text.strip().startswith("# zero_trial") and "zero-trial launch" in text
    assert "](" not in text.replace("](https://", "") and "<!--" not in text and "![" not in text


def test_the_wheel_trains_without_the_repository(environment: Path, tmp_path: Path) -> None:
    def type_in(*command: str) -> str:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"PATH": f"{environment / 'bin'}:{env['PATH']}", "HOME": str(tmp_path)}
        found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, f"{command}: {found.stdout}{found.stderr}"
        return found.stdout

    where = type_in("python", "-c", "import importlib.util as i; print(i.find_spec('zero_trial').origin)")
    assert Path(where.strip()).is_relative_to(environment)
    type_in("zero-trial", "init", "trial")
    const = tmp_path / "trial" / "const.yaml"
    settings = yaml.safe_load(const.read_text())
    settings["searcher"]["max_length"] = {"batches": 2}
    const.write_text(yaml.safe_dump(settings))
    type_in("zero-trial", "run", "trial/const.yaml", "trial")
    type_in("zero-trial", "report", "runs/0001")
    settings["resources"] = {"slots_per_trial": 1}
    const.write_text(yaml.safe_dump(settings))
    try:
        det = "python -m determined.cli experiment"
        up = 'eval "$(zero-trial master up --env)"'
        # `wait` fails unless the experiment completes.
        type_in("bash", "-ec", f"{up}; {det} create trial/const.yaml trial; {det} wait 1")
    finally:
        type_in("zero-trial", "master", "down")
