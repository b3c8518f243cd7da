"""Commands are ended in time with all their children, and what they said is kept."""

from __future__ import annotations

import os
import sys
import time

import pytest

from benchmarks import processes
from benchmarks.processes import BROKEN, Ended, run


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *arguments]


def test_what_was_said_and_how_it_ended() -> None:
    ended = run(python("import sys; print('{\"name\": \"a\"}'); print('{no row'); sys.exit('over')"), 30)
    assert ended.code == 1 and ended.rows == [{"name": "a"}]
    assert ended.why() == "ended with 1: over" and ended.tail() == ["over"]


def test_a_hang_is_ended_with_its_children_and_keeps_what_was_said() -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid); time.sleep(60)"
    )
    begin = time.monotonic()
    ended = run(python(code), 60, silence=1.0)
    assert ended.code is None and time.monotonic() - begin < 30
    child = int(ended.said)
    for _ in range(1000):  # the child is gone, or about to be collected by init
        try:
            os.kill(child, 0)
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().split()[2] == "Z":
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    pytest.fail("the child is still there")


def test_paths_of_the_machine_stay_out() -> None:
    said = f'  File "{processes.ROOT}/zero_trial/x.py"\n{os.path.expanduser("~")}/.cache/zero_trial\n'
    assert Ended(1, said, 0.0).tail() == ['  File "zero_trial/x.py"', "~/.cache/zero_trial"]


WORKER = """
import json, os, sys
for name in sys.argv[1:]:
    if name == "crash":
        print("boom", flush=True)
        os._exit(9)
    print(json.dumps({"name": name, "value": 1}), flush=True)
    if name == "poison":
        sys.exit(3)
"""


def test_a_crash_costs_one_row_and_the_others_follow() -> None:
    found = processes.rows(python(WORKER), ["a", "crash", "b", "poison", "c"], time.monotonic() + 60)
    assert [row["name"] for row in found] == ["a", "crash", "b", "poison", "c"] and BROKEN == 3
    assert found[1]["why"] == "ended with 9: boom"
    assert [row.get("value") for row in found] == [1, None, 1, 1, 1]


def test_what_never_works_is_not_tried_for_ever() -> None:
    found = processes.rows(python("import sys; sys.exit('no torch')"), ["a", "b", "c", "d"], time.monotonic() + 60)
    assert [row["why"] for row in found] == ["ended with 1: no torch"] * 2 + [
        "not tried: nothing came of the starts before"
    ] * 2


def test_without_time_nothing_starts() -> None:
    assert processes.rows(["nonsense"], ["a"], time.monotonic() - 1) == [{"name": "a", "why": "no time left"}]
