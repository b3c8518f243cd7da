"""``zero-trial resume [RUN]``: go on with a run from its newest checkpoint, with the experiment and the model that it began with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError

RUNS = Path("runs")
NAME = "config.lock.yaml"


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "resume",
        help="go on with a run where it stopped",
        description="Go on with a run from its newest checkpoint, with the experiment, the model's folder and the seed that stand in its "
        "config.lock.yaml. The same as zero-trial run --resume RUN, which takes a changed experiment as well.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="a run's folder (default: the newest in runs/)"
    )
    parser.add_argument("--slots", type=int, metavar="N", help="ranks on this host (default: as many as before)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.cli import run

    folder = given_run(options.run) if options.run is not None else newest_run(RUNS)
    words = ["run", "--resume", str(folder)]
    words += ["--slots", str(options.slots)] if options.slots is not None else []
    words += ["--json"] if options.json else []
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    ended = is_complete(folder)
    code = run.handle(parser.parse_args(words))
    if ended and code == 0 and not options.json:
        print(
            f"note    it was complete already; to train longer, raise max_length: zero-trial run CONST.yaml MODEL_DIR --resume {folder}"
        )
    return code


def given_run(folder: Path) -> Path:
    """The folder, if a run has begun in it. Raises ConfigError."""
    if not (folder / NAME).is_file():
        raise ConfigError(
            "there is no run in this folder" if folder.is_dir() else "there is no such folder",
            where="resume",
            got=str(folder),
            expected=f"a run's folder, such as runs/0001, with {NAME}",
        )
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the run has trained all that it was to train; a summary that cannot be read says nothing."""
    try:
        return bool(json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("end") == "completed")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def newest_run(root: Path) -> Path:
    """The run with the highest number. Raises ConfigError if there is none, or none has begun in it: an older one is not what was meant."""
    numbered = [path for path in root.iterdir() if path.name.isdecimal() and path.is_dir()] if root.is_dir() else []
    if not numbered:
        raise ConfigError(
            "there is no run here",
            where="resume",
            got=f"no folder {root}/NNNN in {Path.cwd().name}/",
            fix="Name the run's folder: zero-trial resume path/to/runs/0001.",
        )
    return given_run(max(numbered, key=lambda path: int(path.name)))
