"""The guide from zero to a sweep: its files are taken out of it, checked, played through and
trained. And each name of this package in the guides to clusters and to moving over."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.cli import main as cli
from zero_trial.planning.check import CheckRequest, check_experiment
from zero_trial.run import main

GUIDES = Path(__file__).parents[3] / "docs" / "guide"
GUIDE = (GUIDES / "first_sweep.md").read_text(encoding="utf-8")


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The guide's folder, as someone would make it who copies each block into the file that stands
    before it."""
    for kind, name in (("python", "model_def.py"), ("json", "ds_config.json"), ("yaml", "const.yaml")):
        found = re.search(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1])
    (tmp_path / "sweep.yaml").write_text(re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    sys.modules.pop("model_def", None)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("model_def", None)


def test_its_folder_is_right(folder: Path) -> None:
    for name in ("const.yaml", "sweep.yaml"):
        report = check_experiment(CheckRequest(folder / name, folder, slots=2), {})
        assert report.exit_code == 0, report.issues


def test_its_search_is_the_one_that_it_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "sweep.yaml"]) == 0
    said = capsys.readouterr().out.splitlines()
    shown = [line.strip() for line in GUIDE.splitlines()]
    assert said[0] in shown and all(line in shown for line in said if line.startswith(("spent", "pruned")))


def test_its_trial_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_rank = (folder / "const.yaml").read_text().replace("global_batch_size: 32", "global_batch_size: 16")
    (folder / "const.yaml").write_text(one_rank)
    assert main(["--run-dir", "run", "--experiment", "const.yaml"]) == 0
    summary = (folder / "run" / "summary.json").read_text()
    before, after = (float(x) for x in re.findall(r'"validation_loss": ([\d.]+)', summary)[:2])
    assert after < before


@pytest.mark.parametrize("name", ["determined.md", "moving_from_deepspeedtrial.md"])
def test_the_names_exist(name: str) -> None:
    text = (GUIDES / name).read_text()
    # the last imports Lightning; tests/exactness/test_lightning.py uses it
    apart = {"zero_trial.run", "zero_trial.as_determined", "zero_trial.lightning"}
    dotted = set(re.findall(r"zero_trial(?:\.\w+)+", text)) - apart
    dotted |= {f"zero_trial.{imported}" for imported in re.findall(r"from zero_trial import (\w+)", text)}
    dotted |= {f"zero_trial.ZeroTrialContext.{method}" for method in re.findall(r"context\.(\w+)\(", text) if method}
    assert len(dotted) > 3
    for path in sorted(dotted - {"zero_trial.ZeroTrialContext.get_hparams"}):
        pkgutil.resolve_name(path)
