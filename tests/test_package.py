"""The wheel, built from the sdist: what people install trains without the repository."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import yaml

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
