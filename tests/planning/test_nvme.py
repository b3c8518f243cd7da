"""Folders for offload against this machine's disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planning.project import DS_CONFIG, messages, project
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.planning.machine import DiskSpace, check_nvme, disk_of

MIB = 1 << 20
LARGE = DiskSpace(True, True, 1 << 50, "ext4")


def said(
    disk: DiskSpace,
    *,
    parameters: int | None = MIB,
    slots: int = 1,
    stage: int = 2,
    state: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    **config: Any,
) -> list[str]:
    zero: dict[str, Any] = {"stage": stage}
    for name, given in (("offload_optimizer", state), ("offload_param", params)):
        if given is not None:
            zero[name] = {"device": "nvme", "nvme_path": "/disk"} | given
    settings = read_ds_config({"zero_optimization": zero, **config})
    return [
        f"{issue.severity.value}: {issue.text}" for issue in check_nvme(settings, slots, parameters, lambda _: disk)
    ]


def test_a_disk_with_room() -> None:
    assert said(LARGE, state={}) == []
    assert said(DiskSpace(False)) == [], "nothing is offloaded"
    assert said(DiskSpace(False), state={"device": "cpu"}) == []


def test_no_folder_and_no_permission() -> None:
    key = "zero_optimization.offload_optimizer.nvme_path"
    assert said(DiskSpace(False), state={}) == [
        f"error: {key}: the folder does not exist on this machine: got /disk. Make it, or name another one."
    ]
    assert said(DiskSpace(True, False, 1 << 50, "ext4"), state={}) == [
        f"error: {key}: the folder is not writable: got /disk. Name another one."
    ]


def test_a_folder_that_is_memory() -> None:
    assert said(DiskSpace(True, True, 1 << 50, "tmpfs"), stage=3, params={}) == [
        "warn: zero_optimization.offload_param.nvme_path: this folder is memory (tmpfs): what is offloaded to it saves none: "
        "got /disk. Name a folder on a disk."
    ]


@pytest.mark.parametrize(
    ("given", "mib"),
    [
        ({"state": {}}, 8),
        ({"state": {}, "bf16": {"enabled": True}}, 12),
        ({"state": {}, "ema": {"decay": 0.99}}, 12),
        ({"state": {}, "slots": 4}, 8),
        ({"state": {}, "slots": 4, "stage": 0}, 32),
        ({"state": {}, "slots": 4, "mesh": {"shard": 2}}, 16),
        ({"state": {}, "slots": 4, "stage": 0, "mesh": {"pipe": 2}}, 16),
        ({"state": {"ratio": 0.5}}, 4),
        ({"state": {}, "optimizer": {"type": "Lion", "params": {}}}, 4),
        ({"state": {}, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "fp16": {"enabled": True}}, 8),
        ({"state": {}, "optimizer": {"type": "SGD", "params": {}}, "fp16": {"enabled": True}}, 4),
        ({"stage": 3, "params": {"max_in_cpu": 0}}, 4),
        ({"stage": 3, "params": {"max_in_cpu": 0}, "bf16": {"enabled": True}}, 2),
        ({"stage": 3, "params": {"max_in_cpu": MIB // 4}, "slots": 2}, 4),
        ({"stage": 3, "params": {"max_in_cpu": MIB // 2}, "slots": 2}, 0),
        ({"stage": 3, "params": {}}, 0),
        ({"stage": 1, "params": {"max_in_cpu": 0}, "slots": 4}, 16),
        ({"stage": 0, "params": {"max_in_cpu": 0}, "slots": 4, "mesh": {"pipe": 2}, "bf16": {"enabled": True}}, 4),
        ({"stage": 3, "params": {"max_in_cpu": 0}, "state": {}, "bf16": {"enabled": True}}, 14),
    ],
)
def test_the_room_that_it_takes(given: dict[str, Any], mib: int) -> None:
    """Of a model of 1 Mi parameters; both files are in one folder."""
    assert all(text.startswith("warn: ") for text in said(DiskSpace(True, True, mib * MIB, "ext4"), **given))
    if mib:
        (text,) = said(DiskSpace(True, True, mib * MIB - 1, "ext4"), **given)
        assert "the disk has not enough room for what is offloaded: got" in text
        assert f"{mib}.0 MiB for the ranks of this machine" in text
    assert said(DiskSpace(True, True, 0, "ext4"), **given | {"parameters": None}) == [], "not known"


def test_a_comma_is_between_folders_or_in_a_list() -> None:
    def folders(value: object) -> object:
        section = {"device": "nvme", "nvme_path": value}
        state = read_ds_config(
            {"zero_optimization": {"offload_optimizer": section}}
        ).zero_optimization.offload_optimizer
        return state.nvme_path if state is not None else None

    assert folders("/disk, /other") == ("/disk", "/other") and folders("disk,other") == ("disk", "other")
    assert folders(["/runs/lr=1,wd=2"]) == ("/runs/lr=1,wd=2",)
    with pytest.raises(ConfigError, match=r'\["/runs/lr=1,wd=2"\]'):
        folders("/runs/lr=1,wd=2")


def test_drives_have_equal_parts() -> None:
    drives = {"nvme_path": ["/disk", "/other"]}
    assert said(DiskSpace(True, True, 4 * MIB, "ext4"), state=drives) == []
    first, second = said(DiskSpace(True, True, 4 * MIB - 1, "ext4"), state=drives)
    assert "nvme_path[0]: the disk has not enough room" in first and "nvme_path[1]: the disk has" in second


def test_this_machine(tmp_path: Path) -> None:
    here = disk_of(tmp_path)
    assert here.exists and here.writable and here.free > 0 and here.kind
    assert disk_of(tmp_path / "none") == DiskSpace(False)


def test_ranks_start_in_the_folder_of_the_model(tmp_path: Path) -> None:
    """A relative path is one below it."""
    seen: list[Path] = []
    section = {"device": "nvme", "nvme_path": "disk"}
    config = read_ds_config({"zero_optimization": {"offload_optimizer": section}})
    check_nvme(config, 1, None, lambda folder: (seen.append(folder), LARGE)[1], tmp_path)
    assert seen == [tmp_path / "disk"]


def test_the_check_says_it(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "none")}
    report = project(tmp_path, ds_config={**DS_CONFIG, "zero_optimization": {"offload_optimizer": offload}}).check()
    (text,) = messages(report)
    assert text.startswith("error: ds_config.json:") and "nvme_path: the folder does not exist on this machine" in text
    assert report.exit_code == 2


def test_a_folder_that_may_not_be_looked_at_is_none(tmp_path: Path) -> None:
    """The system refuses in its own ways: here by a name that is too long."""
    assert disk_of(tmp_path / ("x" * 300)) == DiskSpace(False)


def test_mounts_may_have_names_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(b"/dev/sda1 / ext4 rw 0 0\n/dev/sdb1 /media/caf\xe9 vfat rw 0 0\n")
    once = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args, **kwargs: once(mounts if "proc" in path.parts else path, *args, **kwargs)
    )
    assert disk_of(tmp_path).kind == "ext4"
