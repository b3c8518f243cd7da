"""``zero-trial init [FOLDER]``: a folder that trains as it is and is meant to be
changed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError

TEMPLATES = ("text", "image")
FILES = ("model_def.py", "const.yaml", "ds_config.json", "README.md")
IGNORED = {".detignore": "runs/\n__pycache__/\n"}
"""What ``det`` must not send: the runs of this folder."""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "init",
        help="create a new trial: a model, an experiment, a ds_config",
        description="Write a complete example trial into a folder: model_def.py, const.yaml, ds_config.json and a README. Existing files are "
        "never changed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="where to write (default: the current folder)",
    )
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default=TEMPLATES[0],
        help="text: a byte-level language model; image: a network that reads letters (default: text)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    files = template(options.template, experiment_name(folder, options.template))
    plant(folder, files)
    commands = _next_commands(folder)
    if options.json:
        print(json.dumps({"folder": str(folder.resolve()), "files": sorted(files), "next": commands}))
        return 0
    print(f"made    {' · '.join(str(folder / name) for name in FILES)}")
    print("\n".join(f"{label:<8}{command}" for label, command in zip(("next", *[""] * 9), commands, strict=False)))
    return 0


def template(name: str, experiment: str) -> dict[str, str]:
    """Return the files of a template, by name; the experiment is called ``experiment``."""
    source = resources.files("zero_trial.cli.templates") / name
    files = {file: (source / file).read_text(encoding="utf-8") for file in FILES}
    files["const.yaml"] = re.sub(r"^name: .*$", f"name: {experiment}", files["const.yaml"], count=1, flags=re.MULTILINE)
    return {**files, **IGNORED}


def experiment_name(folder: Path, otherwise: str) -> str:
    """Return the folder's name if it begins with a letter and needs no quotes in YAML, else
    ``otherwise``.
    """
    name = folder.resolve().name
    return name if re.fullmatch(r"[A-Za-z][\w.-]*", name, re.ASCII) and name.lower() not in _YAML_WORDS else otherwise


_YAML_WORDS = ("y", "n", "yes", "no", "true", "false", "on", "off", "null")
"""Words that YAML 1.1 does not read as text."""


def plant(folder: Path, files: dict[str, str]) -> None:
    """Write ``files`` into ``folder``, which is made if need be.

    Raises ConfigError, before anything is written, if one of them is there.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError("this is a file", where="FOLDER", got=str(folder), expected="a folder, or a new name")
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise ConfigError(
            "nothing is overwritten",
            where="FOLDER",
            got=f"{', '.join(there)} in {folder.resolve().name}/",
            expected="a folder without them",
            fix="Name a new one: zero-trial init my_trial.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror})", where=str(error.filename or folder), fix="Name another folder."
        ) from error


def _next_commands(folder: Path) -> list[str]:
    """Return what to type next, from where the command was typed."""
    here = folder.resolve() == Path.cwd()
    return [
        *([] if here else [shlex.join(["cd", str(folder)])]),
        "zero-trial check const.yaml .",
        "zero-trial run const.yaml .",
        "zero-trial report runs/0001",
    ]
