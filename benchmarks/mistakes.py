"""Mistakes that people make, given to every command that reads a project: the error message, and
after how many seconds it appears.

    python benchmarks/mistakes.py
    python benchmarks/mistakes.py --only metric --rounds 1  # quick: one mistake

Each mistake is one edit of the project that `zero-trial init` makes. It is given to `zero-trial
check`, to `zero-trial run`, and as `det experiment create` to an embedded master of its own.
Seconds are those until the command ends, medians over the rounds; `det` imports its own libraries
first, which `nothing wrong` shows. `after starting` means that training began before the error was
reported. The exit code is 1 if a command does not name the mistake, shows a traceback of ours or
does not end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import record

BIN = Path(sys.executable).parent
LONGEST = 120.0  # seconds


class Mistake(NamedTuple):
    """One edit of a project: ``old`` becomes ``new`` in ``file``, and what a message must name.

    ``starts``: the commands that begin to train first, because only running code shows the
    mistake, or only the machine that runs it knows what is installed.
    """

    name: str
    file: str
    old: str
    new: str
    says: str
    starts: tuple[str, ...] = ()


MISTAKES = [
    Mistake("a module that is not there", "const.yaml", "model_def:TextTrial", "model_defs:TextTrial", "model_defs"),
    Mistake("a class that is not there", "const.yaml", "model_def:TextTrial", "model_def:TextTrail", "TextTrail"),
    Mistake("a class that is no ZeroTrial", "const.yaml", "model_def:TextTrial", "model_def:Block", "not a ZeroTrial"),
    Mistake("a metric that is never returned", "const.yaml", "metric: validation_loss", "metric: val_loss", "val_loss"),
    Mistake("a key of the experiment", "const.yaml", "max_restarts: 0", "max_restart: 0", "max_restart"),
    Mistake("YAML that cannot be read", "const.yaml", "  name: single", "  name: [single", "expected ','"),
    Mistake(
        "a ds_config that is not there", "const.yaml", "ds_config: ds_config.json", "ds_config: ds.json", "ds.json"
    ),
    Mistake(
        "JSON that cannot be read",
        "ds_config.json",
        '"stage": 2}',
        '"stage": 2',
        "ds_config.json",
    ),
    Mistake("a key of the ds_config", "ds_config.json", "zero_optimization", "zero_optimisation", "zero_optimization"),
    Mistake("a value of the ds_config", "ds_config.json", '"stage": 2', '"stage": 4', "stage"),
    Mistake("an optimizer that is unknown", "ds_config.json", '"AdamW"', '"AdamV"', "AdamV"),
    Mistake(
        "batch sizes that disagree",
        "ds_config.json",
        '"gradient_clipping": 1.0,',
        '"gradient_clipping": 1.0, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,',
        "train_batch_size",
    ),
    Mistake(
        "a package that is not installed",
        "model_def.py",
        "import math\n",
        "import math\nimport nonesuch\n",
        "nonesuch",
        ("det",),
    ),
    Mistake("a name that is not defined", "model_def.py", "return loss\n", "return los\n", "los", ("run", "det")),
    Mistake(
        "shapes that do not fit",
        "model_def.py",
        "self.head = nn.LayerNorm(width), nn.Linear(width,",
        "self.head = nn.LayerNorm(width), nn.Linear(width + 1,",
        "mat1 and mat2",
        ("run", "det"),
    ),
    Mistake(
        "batches of strings",
        "model_def.py",
        "return DataLoader(self.train_data,",
        "return DataLoader(['a'] * 4096,",
        "too many values",
        ("run", "det"),
    ),
]
COLUMNS: list[record.Column] = [
    ("mistake", lambda row: row["name"]),
    *[
        column
        for front in ("check", "run", "det")
        for column in (
            (f"{front} s", record.number(front)),
            ("", lambda row, front=front: row.get(f"{front}_when", "")),
        )
    ],
    ("said", lambda row: row["said"].replace("|", "\\|")),
]
NOTE = """What is said of a mistake, and how many seconds after the command began it is said: by `zero-trial check`,
by `zero-trial run`, and by an embedded master to `det experiment create`, whose first second goes into det itself.
`starts` is a front that began to train first. `said` is the message of `run`."""


class Answer(NamedTuple):
    """The output of a command for a project, its seconds, and whether it began to train."""

    text: str
    seconds: float
    started: bool


def main() -> int:
    """Measure, print and save a row for each mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="mistakes whose names contain this; nothing is saved")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    mistakes = [one for one in MISTAKES if given.only is None or given.only in one.name]
    with tempfile.TemporaryDirectory() as folder:
        environ = _up(Path(folder))
        try:
            answers = [_ask_all(one, Path(folder), environ) for _ in range(given.rounds) for one in mistakes]
        finally:
            _zero_trial("master", "down", "--root", str(Path(folder, "root")), environ=environ)
    rows, faults = [], []
    for index, mistake in enumerate(mistakes):
        rounds = answers[index :: len(mistakes)]
        row: dict[str, Any] = {"name": mistake.name, "said": _message(rounds[0]["run"].text, mistake.says)}
        for front in rounds[0]:
            row[front] = median(answer[front].seconds for answer in rounds)
            row[f"{front}_when"] = "starts" if any(answer[front].started for answer in rounds) else ""
            faults += [
                f"{mistake.name}, {front}: {fault}"
                for answer in rounds
                for fault in _faults(mistake, front, answer[front])
            ]
        rows.append(row)
    if given.only is None:
        record.save("mistakes", {"rounds": given.rounds}, rows, COLUMNS, NOTE)
    else:
        print(record.markdown(rows, COLUMNS))
    for fault in dict.fromkeys(faults):
        print(fault)
    return 1 if faults else 0


def _ask_all(mistake: Mistake, folder: Path, environ: dict[str, str]) -> dict[str, Answer]:
    """Run each command on its own copy of the project with this mistake."""
    answers = {}
    for front, words in {
        "check": [str(BIN / "zero-trial"), "check", "const.yaml", "."],
        "run": [str(BIN / "zero-trial"), "run", "const.yaml", "."],
        "det": [str(BIN / "det"), "experiment", "create", "const.yaml", ".", "--follow"],
    }.items():
        project = folder / "project"
        shutil.rmtree(project, ignore_errors=True)
        _zero_trial("init", str(project), environ=environ)
        file = project / mistake.file
        before = file.read_text()
        if mistake.old not in before:
            raise SystemExit(f"{mistake.name}: {mistake.file} has no {mistake.old!r} any more")
        file.write_text(before.replace(mistake.old, mistake.new))
        began = time.perf_counter()
        try:
            done = subprocess.run(
                words, cwd=project, env=environ, capture_output=True, text=True, timeout=LONGEST, check=False
            )
            text = (done.stdout + done.stderr).replace(f"{folder}/", "")
        except subprocess.TimeoutExpired as late:
            text = f"did not end in {LONGEST:.0f} s: {late.stdout!r}"
        started = any(project.glob("runs/*")) or ("Created experiment" in text and "before launch" not in text)
        answers[front] = Answer(text, time.perf_counter() - began, started)
    return answers


def _faults(mistake: Mistake, front: str, answer: Answer) -> list[str]:
    """Return what is wrong with an answer."""
    found = []
    if mistake.says not in answer.text:
        found.append(f"{mistake.says!r} is not named: {answer.text.strip()[-200:]!r}")
    if "Traceback" in answer.text and front not in mistake.starts:
        found.append("it shows a traceback")
    if answer.started and front not in mistake.starts:
        found.append("it was started")
    return found


def _message(text: str, says: str) -> str:
    """Return the first line that names the mistake."""
    text = re.sub(r"\S+/bin/(python\S*)", r"\1", text)
    return next((line.strip() for line in text.splitlines() if says in line), "")


def _up(folder: Path) -> dict[str, str]:
    """Start a master with two slots; return the environment with which `det` finds it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of native kernels, built once
    environ = {**kept, "HOME": str(folder), "XDG_CACHE_HOME": cache, "PYTHONUNBUFFERED": "1"}
    words = ("master", "up", "--root", str(folder / "root"), "--slots", "2", "--cpu", "--json")
    return environ | json.loads(_zero_trial(*words, environ=environ))["env"]


def _zero_trial(*words: str, environ: dict[str, str]) -> str:
    done = subprocess.run([str(BIN / "zero-trial"), *words], env=environ, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
