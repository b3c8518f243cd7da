"""Supervised runs of small programs: however a rank ends, all end, one cause is named, and no
process is left."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tests.launch.programs import LIMIT, Silent, start_zero_trial, supervisor, write_program
from zero_trial.launch.supervisor import MARK, LaunchResult, Supervisor
from zero_trial.util.process_tree import marked


def run(job: Supervisor) -> LaunchResult:
    """Run to the end; afterwards nothing of the run may be alive."""
    outcome = job.run()
    assert marked(MARK, job.mark) == []
    assert isinstance(job.watcher, Silent) and job.watcher.closed
    return outcome


def test_a_run_that_ends_well(tmp_path: Path):
    job = supervisor(tmp_path, "print('rank', rank, os.environ['WORLD_SIZE'])")
    assert run(job) == LaunchResult(0)
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["rank 0 2\n", "rank 1 2\n"]


def test_one_failure_ends_a_rank_that_will_not_end(tmp_path: Path):
    """Rank 0 ignores SIGTERM, as a rank that waits inside a native collective does in effect."""
    job = supervisor(
        tmp_path,
        """
        if rank == 1:
            raise ValueError("my mistake")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
        """,
    )
    outcome = run(job)
    assert outcome.exit_code == 1 and outcome.cause is not None
    assert outcome.cause.rank == 1 and outcome.cause.message.startswith("ValueError: my mistake (program.py:")


@pytest.mark.parametrize(("by_kernel", "code", "said"), [(0, 5, "SIGKILL"), (1, 3, "memory ran out")])
def test_a_rank_killed_with_sigkill(
    by_kernel: int, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other one ignores SIGTERM, and sees a broken connection."""
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
    )
    outcome = run(job)
    assert outcome.exit_code == code and outcome.cause is not None
    assert outcome.cause.rank == 1 and said in outcome.cause.message


class LooksOnceAllHaveEnded(Silent):
    """Looks for long, as on a busy machine: all ranks have ended when it is done."""

    job: Supervisor

    def tick(self) -> None:
        super().tick()
        while marked(MARK, self.job.mark):
            threading.Event().wait(0.01)


def test_a_rank_that_somebody_sent_sigterm_is_blamed_although_another_s_echo_came_first(tmp_path: Path):
    """The supervisor looks only once both have ended, and finds rank 0 first."""
    job = supervisor(
        tmp_path,
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41122")
        """,
        watcher=(watcher := LooksOnceAllHaveEnded()),
    )
    watcher.job = job
    outcome = run(job)
    assert outcome.exit_code == 5 and outcome.cause is not None
    assert outcome.cause.rank == 1 and "SIGTERM" in outcome.cause.message


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
        assert len(family) == 2
        os.kill(command.pid, number)
        assert psutil.wait_procs(family, timeout=30)[1] == []
        command.communicate(timeout=30)
    finally:
        command.kill()
