"""The size of the folder that a cluster would be sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.planning.context_folder import ALWAYS, LIMIT, ContextFolder, check_context, measure
from zero_trial.planning.issues import Severity


def test_what_is_counted(tmp_path: Path):
    for name, size in {
        "a.py": 10,
        "data/big.bin": 5000,
        "data/b.bin": 400,
        "__pycache__/a.pyc": 9,
        "out/x": 7,
        "a.log": 7,
        "deep/b.log": 7,
        "kept.log": 3,
        "s": 1,
        "t": 2,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".detignore").write_text("# not sent\nout/\n*.log\n!kept.log\n")
    found = measure(tmp_path)
    assert (found.size, found.complete) == (5416, True)
    assert [path for _, path in found.largest] == ["data/big.bin", "data/b.bin", "a.py", "kept.log", "t"]
    assert not measure(tmp_path, most_files=2).complete
    for line in ("!", "[z-a]"):
        (tmp_path / ".detignore").write_text(line)
        with pytest.raises(ConfigError, match="no pattern"):
            measure(tmp_path)


def test_a_folder_that_is_too_large():
    context = ContextFolder(Path("model"), 100 * 2**20, 3, ((90 * 2**20, "data/big.bin"), (10 * 2**20, "b")))
    (issue,) = check_context(context, for_cluster=True)
    assert issue.severity is Severity.FAULT
    assert issue.text == (
        "MODEL_DIR model: the folder is too large to be sent to a cluster: 3 files; the largest are data/big.bin (90.0 MiB), "
        "b (10.0 MiB): got 100.0 MiB, expected at most 95.0 MiB. "
        "Name what the trial does not need in model/.detignore, for example: data/big.bin"
    )
    assert check_context(context, for_cluster=False)[0].severity is Severity.WARNING
    assert check_context(ContextFolder(Path("m"), LIMIT, 1, ()), for_cluster=True) == []


def test_the_limit_is_determined_s():
    constants = pytest.importorskip("determined.common.constants")
    assert constants.MAX_CONTEXT_SIZE == LIMIT
    assert sorted(ALWAYS) == sorted(constants.DEFAULT_DETIGNORE)
