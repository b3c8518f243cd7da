"""Which temporary folders belong to a save that still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from zero_trial.checkpoint import Slice, latest_checkpoint, save_checkpoint
from zero_trial.checkpoint.writer import FORGOTTEN_SECONDS, TEMPORARY, is_abandoned, temporary_name


def of(tmp_path: Path, pid: int, host: str = "") -> Path:
    own, _, ending = temporary_name("a").partition(TEMPORARY)[2].split("-")
    folder = tmp_path / f"a{TEMPORARY}{host or own}-{pid}-{ending}"
    folder.mkdir()
    return folder


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_names_are_new_every_time():
    first, second = temporary_name("a"), temporary_name("a")
    assert first != second and first.startswith("a.tmp-") and str(os.getpid()) in first


def test_a_living_process_finishes_its_own(tmp_path: Path):
    assert not is_abandoned(of(tmp_path, os.getppid()))
    assert is_abandoned(of(tmp_path, os.getpid())), "this process begins anew"
    assert is_abandoned(of(tmp_path, dead_pid())) and is_abandoned(of(tmp_path, 2**80))


def test_another_host_is_given_time(tmp_path: Path):
    folder = of(tmp_path, 1, host="0" * 8)
    (folder / "rank-00000.safetensors").write_bytes(b"x")
    assert not is_abandoned(folder)
    for path in (folder / "rank-00000.safetensors", folder):
        os.utime(path, (1, path.stat().st_mtime - FORGOTTEN_SECONDS - 60))
    assert is_abandoned(folder)
    assert not is_abandoned(tmp_path / f"a{TEMPORARY}00000000-1-{'0' * 12}"), "it has got its name just now"


def test_two_runs_that_save_under_one_tag_leave_each_other_alone(tmp_path: Path):
    theirs = of(tmp_path, os.getppid())
    (theirs / "rank-00000.safetensors").write_bytes(b"half")
    killed = of(tmp_path, dead_pid())
    save_checkpoint(tmp_path, "a", [Slice.whole("w", torch.ones(3))], step=1)
    assert (theirs / "rank-00000.safetensors").read_bytes() == b"half" and not killed.exists()
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.tag == "a"
