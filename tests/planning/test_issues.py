"""Issues, the place that a message names, and those of a machine and its disks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.planning.project import DS_CONFIG, messages, project
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import HostDevices
from zero_trial.planning.issues import (
    Area,
    CheckIssue,
    Severity,
    check_machine,
    check_nvme,
    issues_of,
    look_at,
    note,
    split_where,
)


def texts(found: list[CheckIssue]) -> list[str]:
    return [f"{issue.severity.value}: {issue.text}" for issue in found]


def test_an_issue_for_programs():
    error = ConfigError("wrong value", where="const.yaml:14 data.x", got=3, expected="a word", fix="Write a.")
    issue = CheckIssue(Area.DS_CONFIG, Severity.FAULT, error, (3, 7), "at 2 of 9 points")
    assert issue.text == "const.yaml:14 data.x: wrong value: got 3, expected a word. Write a. (at 2 of 9 points)"
    place = {"severity": "error", "area": "ds_config", "file": "const.yaml", "line": 14, "key": "data.x"}
    parts = {"what": "wrong value", "got": "3", "expected": "a word", "fix": "Write a.", "points": [3, 7]}
    assert issue.as_json() == {**place, **parts, "text": issue.text}
    many = ConfigError.many([ConfigError("a", where="x"), ConfigError("b")])
    assert texts(issues_of(Area.EXPERIMENT, many)) == ["error: x: a.", "error: b."]
    assert note(Area.SLOTS, Severity.NOTE, "so", where="here").text == "here: so."


def test_a_place_taken_apart():
    for where, place in (
        (None, (None, None, None)),
        ("const.yaml:14 searcher.metric", ("const.yaml", 14, "searcher.metric")),
        ("const.yaml searcher.metric", ("const.yaml", None, "searcher.metric")),
        ("a/model_def.py:3", ("a/model_def.py", 3, None)),
        ("hyperparameters.lr", (None, None, "hyperparameters.lr")),
        ("MODEL_DIR /a/b", (None, None, "MODEL_DIR /a/b")),
    ):
        assert split_where(where) == place


WHERE = "const.yaml:4 resources.slots_per_trial"
FP16 = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("slots", "cores", "gpus", "config", "said"),
    [
        (
            *(8, 64, 2, {}),
            f"error: {WHERE}: more ranks than GPUs: got 8, expected at most 2 (this host's GPUs). "
            "Use --slots 2, or CUDA_VISIBLE_DEVICES= to train on the CPU.",
        ),
        (2, 1, 2, {}, ""),
        (
            *(8, 2, 0, {}),
            f"warn: {WHERE}: 8 ranks would share the 2 cores of this machine, which has no GPU. Use --slots 2 to try it here.",
        ),
        (0, 2, 0, {}, f"error: {WHERE}: a run needs"),
        (
            *(1, 2, 0, FP16),
            "warn: fp16.enabled: fp16 on a machine without a GPU: fp16 is slow on CPUs, and its gradients need a loss scale. "
            'Use "bf16": {"enabled": true} instead; the processor supports it.',
        ),
        (1, 2, 1, FP16, ""),
    ],
)
def test_slots_and_precision_against_a_machine(slots: int, cores: int, gpus: int, config: dict[str, Any], said: str):
    found = texts(check_machine(slots, WHERE, HostDevices(cores=cores, gpus=gpus), read_ds_config(config)))
    assert len(found) == bool(said) and all(text.startswith(said) for text in found)


STATE, PARAMS = "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"
DISK = {"device": "nvme", "nvme_path": "/disk"}
DRIVES = {"device": "nvme", "nvme_path": ["/disk", "/other"]}
GONE = "the folder does not exist on this machine"


@pytest.mark.parametrize(
    ("seen", "zero", "said"),
    [
        ("ext4", {"offload_optimizer": DISK}, []),
        ("missing", {}, []),
        ("missing", {"offload_optimizer": {"device": "cpu"}}, []),
        ("missing", {"offload_optimizer": DISK}, [f"error: {STATE}: {GONE}: got /disk. Create it, or use another folder."]),
        (
            "read-only",
            {"offload_optimizer": DISK},
            [f"error: {STATE}: the folder is not writable: got /disk. Use another folder."],
        ),
        (
            "tmpfs",
            {"stage": 3, "offload_param": DISK},
            [
                f"warn: {PARAMS}: this folder is in memory (tmpfs), so offloading to it saves no memory: got /disk. "
                "Use a folder on a disk."
            ],
        ),
        (
            "missing",
            {"stage": 3, "offload_optimizer": DRIVES, "offload_param": DISK},
            [f"error: {STATE}[{place}]: {GONE}" for place in (0, 1)],
        ),
    ],
)  # fmt: skip
def test_folders_for_offload(seen: str, zero: dict[str, Any], said: list[str]) -> None:
    found = texts(check_nvme(read_ds_config({"zero_optimization": zero}), lambda _: seen))
    assert len(found) == len(said) and all(map(str.startswith, found, said))


def test_a_comma_is_between_folders_or_in_a_list() -> None:
    def folders(value: object) -> object:
        section = {"offload_optimizer": {"device": "nvme", "nvme_path": value}}
        state = read_ds_config({"zero_optimization": section}).zero_optimization.offload_optimizer
        return state.nvme_path if state is not None else None

    assert folders("/disk, /other") == ("/disk", "/other") and folders("disk,other") == ("disk", "other")
    assert folders(["/runs/lr=1,wd=2"]) == ("/runs/lr=1,wd=2",)
    with pytest.raises(ConfigError, match=r'\["/runs/lr=1,wd=2"\]'):
        folders("/runs/lr=1,wd=2")


def test_folders_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is below the model's folder, where ranks start; a name that is too long, or
    that may not be looked at, is no folder; the innermost mount counts."""
    assert look_at(tmp_path) not in ("", "missing", "read-only")
    assert look_at(tmp_path / "none") == look_at(tmp_path / ("x" * 300)) == "missing"
    mounts = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in (("/", "xfs"), (tmp_path, "ext4"))]
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "disk_partitions", lambda all: mounts)
        assert look_at(tmp_path) == "ext4"
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "none"}}
    (text,) = messages(project(tmp_path, ds_config={**DS_CONFIG, "zero_optimization": offload}).check())
    assert text.startswith("error: ds_config.json:") and f"nvme_path: {GONE}: got {tmp_path / 'none'}." in text
