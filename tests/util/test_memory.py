"""How much memory processes may use here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_trial.util.memory import available_memory, limit_files, machine_memory

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


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("", {}, 3 << 20),
        ("0::/a", {"unified/a": ("max", "2000", "active_file 100\n")}, 3 << 20),
        ("0::/a", {"unified/a": ("9000", "8000", "anon 7\nactive_file 100\ninactive_file 20\n")}, 1120),
        ("0::/a", {"unified/a": ("9000", "9500", "anon 9500\n")}, -500),
        ("0::/a", {"unified/a": ("9000", "50", "anon 50\n"), "unified": ("9100", "9000", "anon 1\n")}, 100),
        ("4:memory:/a", {"memory/a": ("9000", "8000", "active_file 9\ntotal_active_file 100\n")}, 1100),
        ("0::/a", {"unified/a": (str(1 << 40), "1", "anon 1\n")}, 3 << 20),
    ],
)
def test_what_is_left(tmp_path: Path, group: str, files: dict[str, tuple[str, str, str]], expected: int) -> None:
    """Cached files are left, too; a version 1 group counts those of the groups below it."""
    membership, mounts, machine = tmp_path / "cgroup", tmp_path / "mountinfo", tmp_path / "meminfo"
    membership.write_text(f"{group}\n" if group else "")
    mounts.write_text(MOUNTS.format(root=tmp_path, above="/"))
    machine.write_text("MemTotal:       9999 kB\nMemAvailable:   3072 kB\n")
    for folder, texts in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        kind = folder.partition("/")[0]
        limit = {
            "unified": ("memory.max", "memory.current"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        }
        for name, text in zip((*limit[kind], "memory.stat"), texts, strict=True):
            (tmp_path / folder / name).write_text(text)
    assert available_memory(membership, mounts, machine) == expected
