"""The search of a running experiment: the searcher with what is needed to create its trials, kept between events, made again from the store."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.master.search import Searcher, build, restore

HOOK = "startup-hook.sh"
_SUFFIXES = (".json", ".yaml", ".yml")
_LARGEST = 4 << 20  # bytes of a file that may hold a ds_config

MAX_PRUNED = 200
"""Points in a row that cannot be reconciled before the search is given up: a searcher replaces each of them for ever."""


@dataclass(frozen=True)
class Context:
    """What the master itself reads of a context directory."""

    files: Mapping[str, bytes]
    has_hook: bool


@dataclass
class LiveSearch:
    """A searcher between two events. ``pruned`` counts points in a row that were never launched."""

    searcher: Searcher
    context: Context
    pruned: int = 0


def read_context(tgz: bytes) -> Context:
    """The small configuration files of a clean .tar.gz."""
    files: dict[str, bytes] = {}
    has_hook = False
    if not tgz:
        return Context(files, has_hook)
    with tarfile.open(fileobj=io.BytesIO(tgz), mode="r:gz") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            has_hook = has_hook or name == HOOK
            if member.isfile() and name.endswith(_SUFFIXES) and member.size <= _LARGEST:
                content = archive.extractfile(member)
                files[name] = content.read() if content is not None else b""
    return Context(files, has_hook)


def new_searcher(config: Mapping[str, Any]) -> Searcher:
    """The searcher of a completed config, not yet started."""
    seed = int((config.get("reproducibility") or {}).get("experiment_seed", 0))
    return build(config["searcher"], config.get("hyperparameters") or {}, seed)


def old_searcher(config: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Searcher:
    """The searcher as it was when ``snapshot`` was taken."""
    return restore(config["searcher"], config.get("hyperparameters") or {}, snapshot)
