"""How much memory processes may use here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_trial.util.memory import limit_files, machine_memory

MOUNTS = """\
30 20 0:26 / {root} ro - tmpfs tmpfs rw
31 30 0:27 / {root}/memory rw,relatime shared:9 - cgroup cgroup rw,memory
32 30 0:28 / {root}/cpu rw,relatime - cgroup cgroup rw,cpu
33 30 0:29 {above} {root}/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    ("membership", "above", "expected"),
    [
        ("4:memory:/jobs/7\n1:cpu:/other\n", "/", ["memory/jobs/7", "memory/jobs", "memory"]),
        ("4:cpu,memory:/\n", "/", ["memory"]),
        ("0::/jobs/7\n", "/", ["unified/jobs/7", "unified/jobs", "unified"]),
        ("0::/pods/a/b\n", "/pods/a", ["unified/b", "unified"]),
        ("0::/host/only\n", "/pods/a", ["unified"]),
        ("4:memory:/a\n0::/b\n", "/", ["memory/a", "memory", "unified/b", "unified"]),
        ("1:cpu:/a\n", "/", []),
        ("", "/", []),
    ],
)
def test_where_limits_are(membership: str, above: str, expected: list[str]) -> None:
    found = limit_files(membership, MOUNTS.format(root="/sys", above=above))
    names = {"memory": "memory.limit_in_bytes", "unified": "memory.max"}
    assert found == [Path("/sys", folder, names[folder.partition("/")[0]]) for folder in expected]


@pytest.mark.parametrize(("own", "above", "expected"), [("1048576", "max", 1048576), ("2097152", "1048576", 1048576)])
def test_a_control_group_may_have_less(tmp_path: Path, own: str, above: str, expected: int) -> None:
    """The smallest of all groups above counts, too; none of a machine that has none."""
    membership, mounts = tmp_path / "cgroup", tmp_path / "mountinfo"
    assert machine_memory(membership, mounts) == (whole := machine_memory(tmp_path / "none", mounts))
    membership.write_text("0::/jobs/7\n")
    mounts.write_text(MOUNTS.format(root=tmp_path, above="/"))
    assert machine_memory(membership, mounts) == whole, "without limits"
    folder = tmp_path / "unified" / "jobs" / "7"
    folder.mkdir(parents=True)
    folder.joinpath("memory.max").write_text(f"{own}\n")
    folder.parent.joinpath("memory.max").write_text(f"{above}\n")
    assert machine_memory(membership, mounts) == expected


@pytest.mark.parametrize("hidden", ["cgroup", "mountinfo", "memory.max"])
def test_what_a_sandbox_hides_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    membership, mounts = tmp_path / "cgroup", tmp_path / "mountinfo"
    membership.write_text("0::/\n")
    mounts.write_text(MOUNTS.format(root=tmp_path, above="/"))
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "memory.max").write_text("4096\n")
    assert machine_memory(membership, mounts) == 4096
    once = Path.read_text

    def read(path: Path, *args: Any) -> str:
        if path.name == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return once(path, *args)

    monkeypatch.setattr(Path, "read_text", read)
    assert machine_memory(membership, mounts) == machine_memory(tmp_path / "none", mounts)
