"""Supervisors record output, report how it ended, and leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_trial.master import logs, shepherd
from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.resources import Identity, identify
from zero_trial.master.logs import LogLine, LogMatcher, LogQuery
from zero_trial.master.shepherd import Lines

ESCAPE = """
import os, signal, sys, time
there, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon of its own, whose parent is gone, and which will not hear
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("daemon", os.getpid(), flush=True)
        os.write(tell, b"x")
        time.sleep(60)
    os._exit(0)
os.wait()
os.read(there, 1)  # main ends after the daemon has spoken
print("main", os.getpid(), flush=True)
"""


POLITE = """
import signal, sys, time
def bye(*_):
    print("bye", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, bye)
print("up", flush=True)
time.sleep(60)
"""


QUICK = """
import sys, time
from pathlib import Path
from zero_trial.master.shepherd import AllocationSupervisor, RunOrder
made = AllocationSupervisor(RunOrder(("/bin/sh", "-c", "exit 6"), sys.argv[1], {}, sys.argv[2], 1.0), Path(sys.argv[1]))
made._start()
time.sleep(0.3)  # it has ended by now, and no one has looked
print(made._finish().code)
"""


class Supervised:
    """Starts a supervisor in a folder and reads its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.logs = folder / "logs"

    def start(self, *command: str, grace: float = 10.0) -> subprocess.Popen[bytes]:
        log = str(logs.path_of(self.logs, 1))
        order = {"command": command, "cwd": str(self.folder), "env": dict(os.environ), "log": log, "grace": grace}
        words = [sys.executable, "-m", "zero_trial.master.shepherd", str(self.folder)]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
        return child

    def run(self, *command: str) -> resources.Exit:
        assert self.start(*command).wait(timeout=60) == 0
        ended = resources.exit_of(self.folder)
        assert ended is not None
        return ended

    def lines(self) -> list[LogLine]:
        return list(logs.lines(logs.Source(self.logs, 1, "t"), LogQuery()))

    def wait_for(self, word: str) -> str:
        """The rest of the first line that begins with the word."""
        source = logs.Source(self.logs, 1, "t")
        for line in logs.follow(source, LogQuery(), lambda: resources.exit_of(self.folder) is not None):
            if line is not None and line.message.startswith(word):
                return line.message[len(word) :].strip()
        raise AssertionError([line.message for line in self.lines()])


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path / "allocation")


def py(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def test_every_line_of_both_streams_is_kept_with_its_time(supervised: Supervised) -> None:
    """The temporary directory ends with a run; a printed error is no cause of a good end."""
    made = storage.make_scratch(supervised.folder, {})
    (made / "socket").touch()
    code = "import sys; print('one\\nerror   it was fixed', flush=True); sys.stderr.write('[rank=1] WARNING: oops\\n'); print('no end', end='')"
    ended = supervised.run(*py(code))
    assert (ended.code, ended.killed, ended.why, made.exists()) == (0, False, "", False)
    found = {line.message: line for line in supervised.lines()}
    assert set(found) == {"one", "error   it was fixed", "[rank=1] WARNING: oops", "no end"}
    assert found["one"].time <= found["no end"].time and found["one"].stdtype == "stdout"
    odd = found["[rank=1] WARNING: oops"]
    assert (odd.stdtype, odd.rank, odd.level) == ("stderr", 1, "WARNING")


FIRST, LATER = "[rank=1] error   searcher.metric: no such metric.", "[rank=0] error   connection closed by peer"
LAUNCHER = "error   rank 1: killed by SIGKILL; ended with it: rank 0"


@pytest.mark.parametrize(
    ("lines", "end", "status", "why"),
    [
        (("error in a sentence", FIRST, "Traceback", LATER), "sys.exit(7)", 7, "searcher.metric: no such metric"),
        ((LATER, LAUNCHER), "os.kill(os.getpid(), 9)", 137, LAUNCHER.removeprefix("error   ")),
    ],
)
def test_a_failure_is_known_by_its_code_and_what_was_printed(
    supervised: Supervised, lines: tuple[str, ...], end: str, status: int, why: str
) -> None:
    ended = supervised.run(*py(f"import os, sys; print({chr(10).join(lines)!r}, file=sys.stderr, flush=True); {end}"))
    assert (ended.code, ended.killed, ended.why) == (status, False, why)


def test_a_command_that_ends_before_the_first_look_is_not_missed(supervised: Supervised) -> None:
    command = [sys.executable, "-c", QUICK, str(supervised.folder), str(logs.path_of(supervised.logs, 1))]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "6\n"


def test_a_command_that_is_not_there(supervised: Supervised) -> None:
    assert supervised.run("/no/such/program").code == 127
    assert "cannot start /no/such/program" in supervised.lines()[0].message


def test_a_daemon_that_ran_away_ends_with_the_main_process(supervised: Supervised) -> None:
    ended = supervised.run(*py(ESCAPE))
    assert ended.code == 0
    daemon = int(next(line.message for line in supervised.lines() if line.message.startswith("daemon")).split()[1])
    assert not identify(daemon).alive


def test_asked_to_end_it_gives_time_and_then_ends_everybody(supervised: Supervised) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); import os; print('up', os.getpid(), flush=True); time.sleep(60)"
    child = supervised.start(*py(deaf), grace=0.2)
    pid = int(supervised.wait_for("up"))
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 0
    ended = resources.exit_of(supervised.folder)
    assert ended is not None and (ended.code, ended.killed) == (137, True) and not identify(pid).alive


def test_sigterm_leaves_time_to_clean_up(supervised: Supervised) -> None:
    child = supervised.start(*py(POLITE))
    supervised.wait_for("up")
    identity: Any = resources.lease_owner(supervised.folder)
    assert isinstance(identity, Identity) and identity.pid == child.pid and identity.alive
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 0
    ended = resources.exit_of(supervised.folder)
    assert ended is not None and (ended.code, ended.killed) == (5, True)
    assert [line.message for line in supervised.lines()][-1] == "bye"


def test_what_is_claimed_already_is_not_run(supervised: Supervised) -> None:
    assert resources.acquire_lease(supervised.folder, None)
    assert supervised.start(*py("open('ran', 'w')")).wait(timeout=60) == 0
    assert not (supervised.folder / "ran").exists() and resources.exit_of(supervised.folder) is None


def test_an_end_on_a_full_disk_is_recorded_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Path] = []

    def record_exit(folder: Path, ended: resources.Exit) -> None:
        tries.append(folder)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resources, "record_exit", record_exit)
    monkeypatch.setattr(shepherd.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(shepherd.AllocationSupervisor, "__init__", lambda *_: None)
    monkeypatch.setattr(shepherd.AllocationSupervisor, "run", lambda _: resources.Exit(0, 1.0))
    monkeypatch.setattr(shepherd.process_tree, "adopt_orphans", lambda: False)
    order = {"command": [], "cwd": "", "env": {}, "log": "", "grace": 1.0}
    assert shepherd.main(tmp_path, json.dumps(order)) == 0 and tries == [tmp_path] * 3


def test_lines_are_cut_where_they_end_and_where_they_are_too_long(tmp_path: Path) -> None:
    lines = Lines("stdout", logs.path_of(tmp_path, 1), LogMatcher([]), tmp_path)
    for data in (b"a", b"b\nc", b"d\n", b"x" * (1 << 20), b"y", b"\xff"):
        lines.add(data)
    lines.close()
    found = [line.message for line in logs.lines(logs.Source(tmp_path, 1, "t"), LogQuery())]
    assert found[:2] == ["ab", "cd"] and "".join(found[2:]) == "x" * (1 << 20) + "y\ufffd"


def test_lines_that_cannot_be_written_are_lost_without_the_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("full").touch()
    lines = Lines("stdout", tmp_path / "full" / "log", LogMatcher([]), tmp_path)
    for _ in range(3):
        lines.add(b"error   so it ends\n")
    assert capsys.readouterr().err.count("lost lines of") == 1 and lines.cause == "so it ends"
