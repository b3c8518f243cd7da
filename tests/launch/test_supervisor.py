"""Supervised runs of small programs: however a rank ends, all end, one cause is named, and no
process is left."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.launch.programs import LIMIT, QUICK, Silent, start_zero_trial, supervisor, write_program
from zero_trial.launch.supervisor import LaunchResult, Supervisor, is_running, marked_processes
from zero_trial.trial.runs.rank_records import read_ranks


def run(job: Supervisor) -> LaunchResult:
    """Run to the end; afterwards nothing of the run may be alive."""
    outcome = job.run()
    assert marked_processes(job.mark) == []
    assert isinstance(job.watcher, Silent) and job.watcher.closed
    return outcome


def test_a_run_that_ends_well(tmp_path: Path):
    job = supervisor(tmp_path, "print('rank', rank, os.environ['WORLD_SIZE'])")
    assert run(job) == LaunchResult(0)
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["rank 0 2\n", "rank 1 2\n"]


@pytest.mark.parametrize(
    "forked",
    [True, pytest.param(False, marks=pytest.mark.slow)],  # the same, with ranks that start by themselves
)
def test_one_failure_ends_a_rank_that_will_not_end(tmp_path: Path, forked: bool):
    """Rank 0 ignores SIGTERM, as a rank that waits inside a native collective does in effect."""
    job = supervisor(
        tmp_path,
        """
        if rank == 1:
            raise ValueError("my mistake")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
        """,
        forked=forked,
    )
    outcome = run(job)
    assert outcome.exit_code == 1 and outcome.cause is not None
    assert outcome.cause.rank == 1 and outcome.cause.message.startswith("ValueError: my mistake (program.py:")


@pytest.mark.parametrize(("by_kernel", "code", "said"), [(0, 5, "SIGKILL"), (1, 3, "memory ran out")])
def test_a_rank_killed_with_sigkill(
    by_kernel: int, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other one ignores SIGTERM, and sees a broken connection. They are those of a user's
    script; ranks of a trial are killed in test_end_to_end.py."""
    counted = iter([7, 7 + by_kernel])  # before and after
    monkeypatch.setattr("zero_trial.launch.supervisor.oom_kills", lambda: next(counted))
    job = supervisor(
        tmp_path,
        """
        if rank == 1:
            open("dying", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, lambda *_: None)
        while not os.path.exists("dying"):
            threading.Event().wait(0.01)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41122")
        """,
        forked=False,
    )
    outcome = run(job)
    assert outcome.exit_code == code and outcome.cause is not None
    assert outcome.cause.rank == 1 and said in outcome.cause.message


def test_a_rank_that_somebody_sent_sigterm_is_blamed_although_another_s_echo_came_first(tmp_path: Path):
    """The agent looks only once both have ended, and finds rank 0 first."""
    job = supervisor(
        tmp_path,
        """
        import psutil
        if rank == 1:
            with open("pid.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename("pid.new", "pid")
            wait()
        while not os.path.exists("pid"):
            threading.Event().wait(0.01)
        other, agent, own = int(open("pid").read()), os.getppid(), os.getpid()
        os.kill(agent, signal.SIGSTOP)
        if os.fork() == 0:
            while os.getppid() == own:
                threading.Event().wait(0.01)
            os.kill(agent, signal.SIGCONT)
            os._exit(0)
        os.kill(other, signal.SIGTERM)
        while psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
            threading.Event().wait(0.01)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41122")
        """,
        timeouts=replace(QUICK, after_failure=LIMIT),
    )
    outcome = run(job)
    assert outcome.exit_code == 5 and outcome.cause is not None
    assert outcome.cause.rank == 1 and "SIGTERM" in outcome.cause.message


class Late(Silent):
    """Looks for long, as on a busy machine: ranks that are there when it begins are gone when it
    ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def tick(self) -> None:
        super().tick()
        while any(is_running(record.pid) for record in read_ranks(self.folder / "run")):
            (self.folder / "looking").touch()
            threading.Event().wait(0.01)


def test_a_killed_agent_is_not_explained_by_an_earlier_start_nor_by_its_ranks(tmp_path: Path):
    """They die with it."""
    kill = """
        while not os.path.exists("looking"):
            threading.Event().wait(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
        wait()
    """
    job = supervisor(tmp_path, kill, ranks=1, watcher=Late(tmp_path))
    job.command.log.parent.mkdir(parents=True)
    job.command.log.write_text("exitcode : 75 (stopped at step 250)\n")
    outcome = run(job)
    assert outcome.exit_code == 5 and outcome.cause is not None
    assert "SIGKILL" in outcome.cause.message and "75" not in outcome.cause.message


def test_children_of_ranks_do_not_stay(tmp_path: Path):
    job = supervisor(
        tmp_path,
        """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
        """,
        ranks=1,
    )
    assert run(job).exit_code == 0


def test_what_the_agent_cannot_do_is_an_infrastructure_error(tmp_path: Path):
    job = supervisor(tmp_path, "", ranks=1)
    object.__setattr__(job.command, "ranks", "many")
    outcome = run(job)
    assert outcome.exit_code == 5 and outcome.cause is not None
    assert outcome.cause.rank is None and "torch.distributed.run" in outcome.cause.message


def when_ranks_run(folder: Path, ranks: int, then: object) -> threading.Thread:
    """Call ``then`` as soon as all ranks have said so by a file ``ready-<r>``."""

    def watch() -> None:
        ready = threading.Event()
        while not all((folder / f"ready-{rank}").exists() for rank in range(ranks)):
            ready.wait(0.05)
        then()  # type: ignore[operator]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


READY = 'open(f"ready-{rank}", "w").close()'


def test_a_stop_lets_ranks_save(tmp_path: Path):
    job = supervisor(
        tmp_path,
        f"""
        def save(*_):
            open(f"saved-{{rank}}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        {READY}
        wait()
        """,
    )
    when_ranks_run(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = run(job)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert outcome.exit_code in (0, 130)  # the ranks have all ended with 0 by then, or not yet


def test_a_second_stop_kills(tmp_path: Path):
    job = supervisor(
        tmp_path,
        f"""
        def refuse(*_):
            open(f"asked-{{rank}}", "w").close()
        signal.signal(signal.SIGTERM, refuse)
        {READY}
        wait()
        """,
    )

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        asked = threading.Event()
        while not all((tmp_path / f"asked-{rank}").exists() for rank in (0, 1)):
            asked.wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    when_ranks_run(tmp_path, 2, twice)
    outcome = run(job)
    assert outcome.exit_code == 128 + signal.SIGTERM and outcome.cause is not None
    assert outcome.cause.message == "stopped by SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_command_itself_is_ended(number: signal.Signals, tmp_path: Path):
    """SIGKILL cannot be handled: the kernel's tie between parent and child has to hold."""
    script = write_program(tmp_path, f"{READY}\nwait()")
    command = start_zero_trial("launch", "--slots", 2, "--run-dir", "run", script, cwd=tmp_path)
    try:
        watcher = when_ranks_run(tmp_path, 2, lambda: None)
        watcher.join(LIMIT)
        assert not watcher.is_alive()
        family = psutil.Process(command.pid).children(recursive=True)
        assert len(family) == 3  # the agent and two ranks
        os.kill(command.pid, number)
        assert psutil.wait_procs(family, timeout=30)[1] == []
        command.communicate(timeout=30)
    finally:
        command.kill()
    assert [record.rank for record in read_ranks(tmp_path / "run")] == [0, 1]
