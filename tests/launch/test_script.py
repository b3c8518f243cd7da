"""Plain scripts: what is passed to them, and how the parts on other hosts are started."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.pool import free_port
from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import HostPlan, PlacementRequest, RendezvousSpec
from zero_trial.launch.script import ScriptRequest, launch_script, read_hostfile, remote_command, wants_local_rank


@pytest.mark.parametrize(
    ("source", "wanted", "as_deepspeed"),
    [
        ("parser.add_argument('--local_rank', type=int)", True, True),
        ('parser.add_argument("--local-rank", "--local_rank")', True, True),
        ("print('no options')", False, False),
        ("def train(steps, local_rank=-1): ...", False, True),
        ("from options import parse\nprint(parse().local_rank)", False, True),
        ("rank = os.environ['LOCAL_RANK']", False, False),
    ],
)
def test_local_rank_is_passed_to_scripts_that_name_it(tmp_path: Path, source: str, wanted: bool, as_deepspeed: bool):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert wants_local_rank(script) is wanted
    assert wants_local_rank(script, as_deepspeed=True) is as_deepspeed


def test_the_part_of_another_host():
    plan = HostPlan("b", 2, RendezvousSpec("2", 1, "a", 7000), visible=(1, 3))
    request = ScriptRequest("train", ("--x", "1"), kind="module", local_rank=False, as_deepspeed="replace")
    words = (
        "--slots 2 --run-dir /r --nnodes 2 --node_rank 1 --master_addr a --master_port 7000 --module --no_local_rank"
    )
    assert remote_command(plan, request, Path("/r")) == [
        *("env", "CUDA_VISIBLE_DEVICES=1,3", sys.executable, "-m", "zero_trial.cli.main", "launch"),
        *(*words.split(), "--replace-deepspeed", "train", "--x", "1"),
    ]


def test_a_hostfile_that_is_named_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="--hostfile: there is no such file"):
        read_hostfile(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("a slots=1")
    assert read_hostfile(str(tmp_path / "hosts")) == ("a slots=1", str(tmp_path / "hosts"))


def test_a_script_must_be_there():
    with pytest.raises(ConfigError, match=r"launch: there is no such script: got nowhere\.py"):
        launch_script(ScriptRequest("nowhere.py"), io.StringIO())


def test_ssh_starts_the_other_host_s_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An ``ssh`` that runs the command on this very machine plays the other host; both parts meet
    at 127.0.0.1."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\necho "$4" >>"$FAKE_SSH_LOG"\nexec /bin/sh -c "$5"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "train.py").write_text(
        "import os\nopen('rank-' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])\n"
    )
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "hosts"))
    monkeypatch.chdir(tmp_path)
    hosts = PlacementRequest(
        hostfile="localhost slots=1\nother slots=1", master_addr="127.0.0.1", master_port=free_port(), spread=True
    )
    outcome, _ = launch_script(ScriptRequest("train.py", run_dir=Path("run"), placement=hosts), io.StringIO())
    assert outcome.exit_code == 0
    assert (tmp_path / "hosts").read_text() == "other\n"
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
