"""Checkpoints whose content is changed at random: each is read, or refused with a CheckpointError
that names the place."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.importing.checkpoints import CASES, unpack
from tests.compat.importing.synthetic import foreign
from zero_trial.compat.importing.foreign_source import read_source
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.torch_file import UnknownObject, read_torch_file
from zero_trial.errors import CheckpointError

CHANGES = 60  # for each case

JUNK: list[Any] = [
    *(None, True, -1, 3, 2**70, 1.5, float("nan"), float("inf"), "x", b"x"),
    *([], {}, (), [None], [1], [[0]], {"a": 1}, {0: None}, {1: {}}, (1, 2), (-1,), ("a",), (2**65,)),
    *(torch.zeros(0), torch.zeros(3), torch.tensor(2.0), [torch.zeros(3)]),
    *(foreign("a.b"), foreign("a.b", (1,), {"cur_scale": "x"})),
    *({"params": [0]}, [{"params": [[0]]}], [{"params": [9]}]),
]


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a file's content."""
    if isinstance(value, UnknownObject):
        value = value.state
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = dict(enumerate(value)).items()
    else:
        return [above]
    return [above, *(path for key, item in inside for path in paths(item, (*above, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``."""
    if not path:
        return new
    if isinstance(value, UnknownObject):
        return foreign(value.path, value.args, replaced(value.state, path, new))
    if isinstance(value, dict):
        return {key: replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    kind = list if isinstance(value, list) else tuple
    return kind(replaced(item, path[1:], new) if key == path[0] else item for key, item in enumerate(value))


@pytest.mark.parametrize("case", CASES)
def test_any_content_is_read_or_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpack(case, tmp_path)
    generator = random.Random(case)
    opened = cache(read_torch_file)
    changed: dict[Path, Any] = {}

    def open_changed(path: Path) -> Any:
        return changed[path] if path in changed else opened(path)

    monkeypatch.setattr("zero_trial.compat.importing.deepspeed.read_torch_file", open_changed)
    files = sorted(folder.rglob("*.pt"))
    refused = 0
    for _ in range(CHANGES):
        file = generator.choice(files)
        content = opened(file)
        place = generator.choice(paths(content))
        place = place[: generator.randint(1, max(1, len(place)))]
        changed = {file: replaced(content, place, generator.choice(JUNK))}
        try:
            read_source(folder, None, ImportOptions(with_optimizer=generator.random() < 0.8))
        except CheckpointError:
            refused += 1
        except Exception as fault:
            raise AssertionError(f"{file.name} with {place} as {changed[file]!r:.200}") from fault
    assert 0 < refused < CHANGES
