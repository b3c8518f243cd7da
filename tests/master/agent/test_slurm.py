"""What is written for Slurm's commands and read from them, by tables. The texts to read are those
of Slurm 22.05 and 23.11."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.resources import Node
from zero_trial.master.agent.slurm import (
    Slurm,
    arguments_of,
    gpus_in,
    hosts,
    is_busy,
    is_usable,
    jobs_in,
    nodes_in,
    partitions_in,
    script,
    status_of,
)

NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=1.03 AvailableFeatures=(null) \
Gres=(null) NodeAddr=10.0.0.1 NodeHostName=vm Version=22.05.8 OS=Linux 4.4.0 #1 SMP Sun Jan 10 RealMemory=1 \
State=IDLE ThreadsPerCore=1 Partitions=main,long BootTime=2026-11-22T06:47:57
NodeName=n2 CPUAlloc=4 CPUEfctv=4 CPUTot=4 Gres=(null) NodeAddr=n2 State=DOWN* Partitions=main Reason=Not responding [root@now]
NodeName=g1 CPUTot=62 Gres=gpu:a100:4(S:0-1) NodeAddr=g1 State=MIXED+PLANNED ThreadsPerCore=2 Partitions=gpu,all
NodeName=g0 CPUTot=64 Gres=(null) NodeAddr=g0 State=IDLE Partitions=gpu
NodeName=c1 CPUTot=4 Gres=(null) NodeAddr=c1 State=IDLE Partitions=all,cpu
NodeName=login CPUTot=2 Gres=(null) NodeAddr=login State=IDLE Partitions=
"""


def test_nodes_with_their_pools_and_slots() -> None:
    assert nodes_in(NODES, cpus=2, gpus=True) == [
        Node("n1", 2, 0, "cpu", ("main", "long"), True, "10.0.0.1", cpus=2),
        Node("n2", 2, 0, "cpu", ("main",), False, "n2", cpus=2),
        Node("g1", 4, 0, "cuda", ("gpu", "all"), True, "g1", cpus=14),  # 15, in whole cores
        Node("c1", 2, 0, "cpu", ("cpu",), True, "c1", cpus=2),  # its other partition has GPUs
    ]
    assert [(node.name, node.slots) for node in nodes_in(NODES, cpus=8, gpus=False)] == [("g1", 7), ("g0", 8)]


def test_texts_of_slurm() -> None:
    for text, names in (
        ("n1", ["n1"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a,b[1]-ib", ["a", "b1-ib"]),
        ("(null)", []),
        ("", []),
    ):
        assert hosts(text) == names
    counts = {"(null)": 0, "gpu": 1, "gpu:a100:4(S:0-1)": 4, "gpu:a100:2,gpu:v100:2(S:0,1),nic:1": 4, "shard:8": 0}
    assert {gres: gpus_in(gres) for gres in counts} == counts
    usable = ("IDLE", "MIXED", "ALLOCATED+COMPLETING", "IDLE+CLOUD+POWERED_DOWN")
    assert all(map(is_usable, usable))
    assert not any(map(is_usable, ("IDLE*", "DOWN", "IDLE+DRAIN", "MIXED+MAINT+RESERVED", "UNKNOWN")))
    text = "PartitionName=a Default=NO Nodes=n1\nPartitionName=b AllowGroups=ALL Default=YES Nodes=n2\n"
    assert partitions_in(text) == ("b", "a")


@pytest.mark.parametrize(
    ("columns", "status"),
    [
        (("RUNNING", "n[1-2]", "None"), JobStatus(("n1", "n2"))),
        (("COMPLETING", "n1", "None"), JobStatus(("n1",))),
        (("PENDING", "", "Resources"), JobStatus(why="Slurm has queued the job: Resources")),
        (("CONFIGURING", "n1", "None"), JobStatus(why="Slurm has queued the job: CONFIGURING")),
        (("COMPLETED", "n1", "None"), JobStatus(("n1",), JobEnd.DONE, "Slurm: COMPLETED")),
        (("FAILED", "n1", "NonZeroExitCode"), JobStatus(("n1",), JobEnd.FAILED, "Slurm: FAILED, NonZeroExitCode")),
        (("CANCELLED", "", "None"), JobStatus((), JobEnd.CANCELED, "Slurm: CANCELLED")),
        (("NODE_FAIL", "n1", "NodeDown"), JobStatus(("n1",), JobEnd.NODE_LOST, "Slurm: NODE_FAIL, NodeDown")),
        (("PREEMPTED", "n1", "None"), JobStatus(("n1",), JobEnd.PREEMPTED, "Slurm: PREEMPTED")),
        (("TIMEOUT", "n1", "TimeLimit"), JobStatus(("n1",), JobEnd.TIME_LIMIT, "Slurm: TIMEOUT, TimeLimit")),
        (("OUT_OF_MEMORY", "n1", "OutOfMemory"), JobStatus(("n1",), JobEnd.OUT_OF_MEMORY, "Slurm: OUT_OF_MEMORY, OutOfMemory")),
    ],
)  # fmt: skip
def test_states_of_jobs(columns: tuple[str, str, str], status: JobStatus) -> None:
    assert status_of(*columns) == status


def test_jobs_are_found_by_the_name_of_their_allocation() -> None:
    found = jobs_in(
        "7|RUNNING|n1|None|zt-1.a.1\n6|FAILED|n2|None|zt-1.a.1\n5|RUNNING|n2|None|other\n9|PENDING||Priority|zt-2.b|c.1\n"
    )
    assert {name: number for name, (number, _) in found.items()} == {"1.a.1": 7, "2.b|c.1": 9}
    assert found["1.a.1"][1].nodes == ("n1",)


def lines(job: ClusterJob) -> list[str]:
    return script(job).splitlines()


def test_the_script_of_a_job_on_cpus(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    made = lines(
        ClusterJob("1.a.1", folder, 2, 3, "cpu", "main", ("n7", "n8"), {"sbatch_args": ["--time=10", "-A a"]}, "/py", 2)
    )
    options = [line.removeprefix("#SBATCH ") for line in made if line.startswith("#SBATCH")]
    assert made[0] == "#!/bin/bash" and options == [
        "--job-name=zt-1.a.1",
        "--partition=main",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"'--output={folder}/job.out'",
        "--open-mode=append",
        "--no-requeue",
        "--export=ALL",
        "--cpus-per-task=6",
        "--exclude=n7,n8",
        "--time=10 -A a",
    ]
    assert made[-1].endswith(f"/py -m zero_trial.master.agent.node '{folder}'")
    assert {"--kill-on-bad-exit=1", "--wait=0"} < set(made[-1].split())
    for asked, given in (("", []), ("6", ["--cpus-per-task=6"])):  # also if sbatch_args have asked
        step = made[-1].replace("exec srun", "printf '%s\\n'")
        env = {"SLURM_CPUS_PER_TASK": asked, "PATH": "/bin:/usr/bin"}
        said = subprocess.run(["bash", "-c", step], env=env, text=True, capture_output=True, check=True).stdout
        assert [word for word in said.split() if word.startswith("--cpus-per-task")] == given


def test_a_nodes_part_reads_no_modules_where_the_job_was_submitted(tmp_path: Path) -> None:
    """Where the master runs: in its folder, which may be on NFS."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd; echo "$@"\n')
    python.chmod(0o755)
    step = lines(ClusterJob("1", tmp_path, 1, 1, "cpu", "main", python=str(python)))[-1]
    command = f"/bin/bash{step.partition('/bin/bash')[2]}"
    env = {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == ["/", f"-m zero_trial.master.agent.node {tmp_path} 1 n2"]


@pytest.mark.parametrize(
    ("slots", "kind", "arguments", "asked"),
    [
        (4, "cuda", [], ["--cpus-per-task=8", "--gpus-per-node=4"]),
        (4, "cuda", ["--cpus-per-gpu=3"], ["--gpus-per-node=4", "--cpus-per-gpu=3"]),
        (0, "cpu", [], ["--cpus-per-task=2"]),
        (1, "cpu", ["--cpus-per-task=7"], ["--cpus-per-task=2", "--cpus-per-task=7"]),  # the last one counts
    ],
)
def test_what_a_job_asks_for(tmp_path: Path, slots: int, kind: str, arguments: list[str], asked: list[str]) -> None:
    made = lines(ClusterJob("1", tmp_path, 1, slots, kind, "main", options={"sbatch_args": arguments}, cpus=2))
    assert [line.split()[1] for line in made if "-per-" in line and line.startswith("#SBATCH")][1:] == asked
    done = subprocess.run(["bash", "-n"], input="\n".join(made), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], []),
        (["--account=physics", "-A physics"], ["--account=physics", "-A", "physics"]),
        (["--comment='a b'", "--mem=0\n--nice"], ["--comment=a b", "--mem=0", "--nice"]),
        (["-c 4", "--cpus-per-task=4", "--time", "10", "--exclusive", "--nodelist=n1", "-e x"], None),
        (["--comment='a"], "split"),
        (["--job-name=x"], "--job-name"),
        (["--job=x"], "--job"),  # sbatch takes the beginning of a name
        (["-Jx"], "-Jx"),
        (["-QJ x"], "-QJ"),
        (["-p gpu"], "resource_pool"),
        (["--array=1-3"], "--array"),
        (["--output", "x"], "--output"),
        (["--exclude=n1"], "det agent disable"),
        (["--wait"], "--wait"),
        (["-N2"], "slots_per_trial"),
    ],
)
def test_arguments_of_sbatch(items: list[str], words: list[str] | str | None) -> None:
    config: dict[str, Any] = {"slurm": {"sbatch_args": items}}
    if isinstance(words, str):
        with pytest.raises(ConfigError, match=words):
            Slurm(env={}).check(config)
    else:
        Slurm(env={}).check({**config, "pbs": {"pbsbatch_args": []}})
        assert words in (None, arguments_of(config["slurm"]))
    with pytest.raises(ConfigError, match=r"slurm\.slots_per_node"):
        Slurm(env={}).check({"slurm": {"slots_per_node": 2}})


def test_a_shell_cannot_change_what_commands_do(tmp_path: Path) -> None:
    command = tmp_path / "squeue"
    command.write_text("#!/bin/sh\nexport -p > $(dirname $0)/seen\n")
    command.chmod(0o700)
    host = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": "/h", "SLURM_CONF": "/c", "SECRET": "s"}
    others = ("SBATCH_JOB_NAME", "SBATCH_PARTITION", "SQUEUE_PARTITION", "SCANCEL_INTERACTIVE", "SLURM_JOB_ID")
    assert Slurm(env={**host, **dict.fromkeys(others, "x")}).statuses(["1"]) == {}
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF" in seen and "HOME" in seen
    assert not [name for name in (*others, "SECRET") if name in seen]


def test_a_machine_without_slurm_and_a_command_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scontrol was not found"):
        Slurm(env={"PATH": str(tmp_path)}).nodes()
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\necho 'slurm_load_node error: no controller' >&2\nexit 1\n")
    command.chmod(0o700)
    with pytest.raises(MasterError, match="no controller"):
        Slurm(env={"PATH": f"{tmp_path}:/bin"}).nodes()


@pytest.mark.parametrize(
    ("state", "refused"),
    [("RUNNING", True), ("COMPLETED", False), ("", False)],  # it has ended in between: a refusal is no fault then
)
def test_a_job_that_cannot_be_canceled(tmp_path: Path, state: str, refused: bool) -> None:
    """All that can be done is done, and what Slurm says counts only if the job goes on."""
    after = f"echo '7|{state}|n1|None|zt-1.a.1'" if state else "true"
    commands = {
        "squeue": f'if test -e $0.asked; then {after}; else echo "7|RUNNING|n1|None|zt-1.a.1"; touch $0.asked; fi',
        "scancel": 'echo "$@" >> $0.words; echo "scancel: error: Kill job error on job id 7" >&2; exit 1',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    engine = Slurm(env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    with pytest.raises(MasterError, match="Kill job error") if refused else contextlib.nullcontext():
        engine.cancel("1.a.1", force=True)
    assert (tmp_path / "scancel.words").read_text().split("\n") == ["--full --signal=KILL 7", "7", ""]


@pytest.mark.parametrize(
    ("complaint", "busy"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: Batch job submission failed: Slurm backup controller in standby mode", True),
        ("sbatch: error: Batch job submission failed: Rate limit exceeded, please retry later", True),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit; sbatch: error: Batch job submission failed: "
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            True,
        ),
        ("sbatch: error: AssocGrpSubmitJobsLimit", True),
        (
            "sbatch: error: QOSMaxCpuPerUserLimit; sbatch: error: Batch job submission failed: "
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            False,
        ),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", False),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", False),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid", False),
    ],
)
def test_whether_a_refusal_is_about_the_job(complaint: str, busy: bool) -> None:
    assert is_busy(complaint) is busy
