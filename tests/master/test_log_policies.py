"""Patterns of log policies: how they are read and searched, and how matches reach the master."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master import logs
from zero_trial.master.logs import LogMatch, LogMatcher, LogPolicy, LogQuery, policies_of, read_matches


def test_every_form_of_a_policy() -> None:
    config = {
        "log_policies": [
            {"pattern": "a", "action": "cancel_retries"},
            {"pattern": "b", "action": {"type": "exclude_node"}},
            {"name": "n", "pattern": "c"},
            {"name": "off", "pattern": None},
            {"name": "none", "pattern": "d", "action": None},
        ]
    }
    named = [LogPolicy("c", name="n"), LogPolicy("d", name="none")]
    assert policies_of(config) == [LogPolicy("a", "cancel_retries"), LogPolicy("b", "exclude_node"), *named]
    assert policies_of({}) == policies_of({"log_policies": None}) == []


def test_the_first_line_of_each_policy_counts() -> None:
    matcher = LogMatcher([LogPolicy("o+m", name="memory"), LogPolicy(r"^code (\d)$"), LogPolicy("oo")])
    printed = json.dumps({"log_policies": [{"pattern": "oom"}]})
    assert matcher.match(["fine", printed, json.dumps({"DET_EXPERIMENT_CONFIG": printed})]) == []
    found = matcher.match(["code 7 ", "code 7", "an oom", "code 7", "oom"])
    first = [(match.policy.pattern, match.line) for match in found]
    assert first == [(r"^code (\d)$", "code 7"), ("o+m", "an oom"), ("oo", "an oom")]
    assert matcher.match(["oom", "code 7"]) == []


def test_records_are_read_once_and_never_in_part(tmp_path: Path) -> None:
    assert read_matches(tmp_path, 0) == ([], 0)
    one, two = (LogMatch(LogPolicy("p", "cancel_retries", "n"), f"line {number} é") for number in (1, 2))
    logs.record_matches(tmp_path, [one])
    found, end = read_matches(tmp_path, 0)
    assert found == [one]
    (file,) = tmp_path.iterdir()
    with file.open("ab") as stream:
        stream.write(b'{"pattern"')
    assert read_matches(tmp_path, end) == ([], end)
    file.write_bytes(file.read_bytes()[:end])
    logs.record_matches(tmp_path, [two])
    assert read_matches(tmp_path, end)[0] == [two]


CANCEL = LogMatch(LogPolicy("code.*7", "cancel_retries"), "exit code 7")
EXCLUDE = LogMatch(LogPolicy("ECC", "exclude_node"), "an ECC error")
NAMED = LogMatch(LogPolicy("memory", "", "CUDA OOM"), "out of memory")


def text(master: Sandbox) -> str:
    return "\n".join(line.message for line in master.trials.logs(1, LogQuery()) if line is not None)


def match(master: Sandbox, *found: LogMatch) -> None:
    for each in found:
        for _ in range(2):  # an agent reports again after a restart
            master.on_matched(master.run_of(1).allocation.id, each)


def test_a_trial_that_fails_is_not_started_again(master: Sandbox) -> None:
    made = master.create(max_restarts=3)
    match(master, CANCEL)
    assert text(master).count("exit code 7") == 1 and "code.*7" in text(master)
    master.exit(1, code=7)
    assert master.states(made.id) == ("ERROR", ["ERROR"]) and master.trials.get(1).restarts == 0
    assert "trial failed and matched logs to a don't retry policy" in text(master)
    assert "exit code 7" in master.experiments.get(made.id).error


def test_what_matched_in_an_earlier_run_counts(master: Sandbox) -> None:
    made = master.create(max_restarts=3)
    match(master, CANCEL)
    master.experiments.pause(made.id)
    master.ack(1)
    master.exit(1)
    master.restart()
    master.experiments.activate(made.id)
    master.exit(1, code=1)
    assert master.state_of(1) == "ERROR"


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (7, "ACTIVE")])
def test_without_a_failure_or_a_match_nothing_changes(master: Sandbox, code: int, state: str) -> None:
    master.create(max_restarts=1)
    match(master, *([CANCEL] if code == 0 else [NAMED]))
    master.exit(1, code=code)
    assert master.state_of(1) == state


def test_an_excluded_machine_gets_no_other_run(master: Sandbox) -> None:
    made = master.create(max_restarts=3)
    match(master, EXCLUDE)
    assert '(log "an ECC error" matched regex "ECC") therefore will not schedule on this-machine' in text(master)
    master.exit(1, code=1)
    assert master.states(made.id) == ("ERROR", ["ERROR"]) and master.trials.get(1).restarts == 1
    master.create()  # another trial is not concerned
    assert master.run_of(2)


def test_a_paused_trial_of_an_excluded_machine_waits_and_says_why(master: Sandbox) -> None:
    made = master.create()
    match(master, EXCLUDE)
    master.experiments.pause(made.id)
    master.ack(1)
    master.exit(1)
    master.experiments.activate(made.id)
    assert master.runs() == [] and master.experiments.get(made.id).shown_state == "QUEUED"
    assert "waits: (log" in text(master)


def test_lines_that_come_over_http_are_searched_and_the_name_of_a_policy_is_shown(master: Sandbox) -> None:
    policies: list[dict[str, Any]] = [{"name": "seven", "pattern": "code 7"}]
    master.create(log_policies=policies)
    task = master.run_of(1).allocation.task_id
    for line, matched in (("code 6", None), ("code 7", "seven")):
        master.tasks.append_logs(task, [{"log": line}])
        assert master.trials.get(1).log_policy_matched == matched
    match(master, NAMED)
    assert master.trials.get(1).log_policy_matched == "CUDA OOM" and "CUDA OOM" in text(master)
