"""Processes that end with their parent, and finding those of a run by their mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from zero_trial.util.process_tree import descendants, is_running, marked, send, sweep

MARK = "ZT_TEST_MARK"

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

SLEEPER = [sys.executable, "-c", "import threading; threading.Event().wait()"]

# A parent that starts a tied child, prints the child's pid when the child says that it is tied, and
# waits.
PARENT = """
import os, subprocess, sys, threading
code = "from zero_trial.util.process_tree import die_with_parent; die_with_parent(%d); print(flush=True); import threading; threading.Event().wait()"
child = subprocess.Popen([sys.executable, "-c", code % os.getpid()], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
threading.Event().wait()
"""


def test_a_tied_process_dies_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
        gone, alive = psutil.wait_procs([child], timeout=30)
        assert (len(gone), len(alive)) == (1, 0)


def test_a_process_whose_parent_is_gone_already_does_not_live():
    code = "from zero_trial.util.process_tree import die_with_parent; die_with_parent(1 if __import__('os').getppid() != 1 else 2); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


@linux
def test_the_mark_finds_a_run_s_processes_and_no_others():
    with (
        subprocess.Popen(SLEEPER, env={**os.environ, MARK: "abc"}) as mine,
        subprocess.Popen(SLEEPER, env={**os.environ, MARK: "abcd"}) as other,
    ):
        try:
            assert marked(MARK, "abc") == [mine.pid]
            sweep(MARK, "abc", seconds=0.1)
            assert mine.wait(30) == -signal.SIGKILL
            assert marked(MARK, "abc") == []
        finally:
            mine.kill()
            other.kill()


def test_running_or_not():
    with subprocess.Popen(SLEEPER) as process:
        assert is_running(process.pid)
        process.kill()
        if sys.platform == "linux":  # dead, not yet waited for: a zombie runs no more
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert not is_running(process.pid)
        process.wait(30)
        assert not is_running(process.pid)


GRANDPARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=bool(sys.argv[1:]))
print(child.pid, flush=True)
child.wait()
"""


def test_a_signal_reaches_the_group_of_its_leader_and_descendants_other_groups():
    with subprocess.Popen(
        [sys.executable, "-c", GRANDPARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        child = psutil.Process(int(leader.stdout.readline()))
        # a pid that does not exist is passed over
        send([leader.pid, 2**22 + 1], signal.SIGKILL)
        assert psutil.wait_procs([child], timeout=30)[1] == []
    with subprocess.Popen([sys.executable, "-c", GRANDPARENT, "apart"], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        assert {parent.pid, grandchild} <= set(descendants(os.getpid()))
        assert descendants(parent.pid) == [grandchild]
        send([parent.pid, grandchild], signal.SIGKILL)
