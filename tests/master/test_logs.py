"""Lines of output on disk, how they are read back, and the patterns of log policies that are
searched in them."""

from __future__ import annotations

import itertools
import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.master.fakes import Sandbox
from zero_trial.master import logs
from zero_trial.master.logs import LogLine, LogMatch, LogMatcher, LogPolicy, LogQuery, policies_of, read_matches


def write(folder: Path, run: int, *messages: str, at: float = 10.0, step: float = 1.0) -> None:
    entries = [logs.entry(message, at + step * number) for number, message in enumerate(messages)]
    logs.append(logs.path_of(folder, run), entries)


def read(folder: Path, query: LogQuery | None = None) -> list[LogLine]:
    return list(logs.lines(logs.Source(folder, 7, "1.t"), query or LogQuery()))


def texts(lines: list[LogLine]) -> list[str]:
    return [line.message for line in lines]


def test_lines_of_all_runs_and_of_the_master_by_time(tmp_path: Path) -> None:
    write(tmp_path, 1, "a", "b")
    write(tmp_path, logs.MASTER, "m", at=11.5)
    write(tmp_path, 2, "c", at=12)
    found = read(tmp_path)
    assert texts(found) == ["a", "b", "m", "c"]
    assert [line.allocation_id for line in found] == ["1.t.1", "1.t.1", "", "1.t.2"]
    assert [line.source for line in found] == ["task", "task", "master", "task"] and found[0].trial_id == 7
    ids = [line.id for line in found]
    assert ids == sorted(ids) and len(set(ids)) == 4


def test_levels_and_ranks_are_read_from_the_line(tmp_path: Path) -> None:
    write(tmp_path, 1, "[rank=3] INFO: x", "[2026-01-01] ERROR: y", "plain")
    logs.append(logs.path_of(tmp_path, 1), [logs.entry("sent", 20.0, l="DEBUG", r=5)])
    found = [(line.level, line.rank) for line in read(tmp_path)]
    assert found == [("INFO", 3), ("ERROR", None), ("INFO", None), ("DEBUG", 5)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (LogQuery(limit=2), "ab"),
        (LogQuery(limit=2, newest_first=True), "dc"),
        (LogQuery(newest_first=True), "dcba"),
        (LogQuery(since=11.0, until=12.0), "bc"),
        (LogQuery(search="c"), "c"),
        (LogQuery(among={"level": ["ERROR"]}), ""),
        (LogQuery(among={"rank": [1]}), ""),
        (LogQuery(among={"allocation_id": ["1.t.1"]}), "abcd"),
        (LogQuery(among={"allocation_id": ["1.t.9"]}), ""),
        (LogQuery(limit=0), ""),
    ],
)
def test_queries(tmp_path: Path, query: LogQuery, expected: str) -> None:
    write(tmp_path, 1, *"abcd")
    assert "".join(texts(read(tmp_path, query))) == expected


def test_a_line_that_is_not_whole_yet_is_left_for_later(tmp_path: Path) -> None:
    whole = logs.entry("whole", 1.0) + logs.entry("later", 2.0)
    logs.append(logs.path_of(tmp_path, 1), [whole[:-5]])
    assert texts(read(tmp_path)) == ["whole"]


def test_writers_do_not_cut_into_each_others_lines(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda word=word: [write(tmp_path, 1, word * 500) for _ in range(50)])
        for word in "abcd"
    ]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = texts(read(tmp_path))
    assert len(found) == 200 and {len(set(text)) for text in found} == {1}


class TestFollow:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logs, "FOLLOW_SECONDS", 0.001)
        monkeypatch.setattr(logs, "SILENCE_SECONDS", 0.003)

    def follow(self, folder: Path, query: LogQuery, *happens: Callable[[], object]) -> list[str]:
        """What is read while one thing happens at each look, until nothing happens any more."""
        todo = iter(happens)

        def ended() -> bool:
            for work in todo:
                work()
                return False
            return True

        source = logs.Source(folder, 7, "1.t")
        return [line.message for line in logs.follow(source, query, ended) if line is not None]

    def test_to_the_last_line(self, tmp_path: Path) -> None:
        write(tmp_path, 1, "a")
        happens = [lambda: write(tmp_path, 1, "b", at=20), lambda: write(tmp_path, 2, "c", at=30)]
        assert self.follow(tmp_path, LogQuery(), *happens) == ["a", "b", "c"]

    def test_of_what_has_ended(self, tmp_path: Path) -> None:
        write(tmp_path, 1, "a")
        assert self.follow(tmp_path, LogQuery()) == ["a"]

    def test_a_limit_ends_it(self, tmp_path: Path) -> None:
        write(tmp_path, 1, "a")
        happens = [lambda: None] + [lambda n=n: write(tmp_path, 1, f"b{n}", at=20 + n) for n in range(5)]  # type: ignore[misc]
        assert self.follow(tmp_path, LogQuery(limit=3), *happens) == ["a", "b0", "b1"]

    def test_the_tail_and_then_what_comes(self, tmp_path: Path) -> None:
        write(tmp_path, 1, *"abc")
        happens = [lambda: None, lambda: write(tmp_path, 1, "d", at=20)]
        assert self.follow(tmp_path, LogQuery(limit=2, newest_first=True), *happens) == ["b", "c", "d"]

    def test_what_comes_while_the_tail_is_given_is_given_once(self, tmp_path: Path) -> None:
        write(tmp_path, 1, *"abc")
        source = logs.Source(tmp_path, 7, "1.t")
        lines = logs.follow(source, LogQuery(limit=2, newest_first=True), lambda: True)
        found = [next(lines)]
        write(tmp_path, 1, "d", at=20)
        assert [line.message for line in [*found, *lines] if line is not None] == ["b", "c", "d"]

    def test_silence_is_reported(self, tmp_path: Path) -> None:
        source = logs.Source(tmp_path, 7, "1.t")
        assert list(itertools.islice(logs.follow(source, LogQuery(), lambda: False), 2)) == [None, None]


def test_a_source_without_files(tmp_path: Path) -> None:
    assert read(tmp_path / "nothing") == []


def test_half_a_line_of_a_writer_that_was_killed_is_shown_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, 1, "a")
    logs.append(logs.path_of(tmp_path, 1), [b'{"t":11.0,"m":"hal\n'])
    write(tmp_path, 1, "b", at=12)
    assert texts(read(tmp_path)) == ["a", '{"t":11.0,"m":"hal', "b"]


def test_the_tail_of_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    """Three gigabytes, of which nothing but the last block is looked at: neither memory nor time
    grows with a log."""
    path = logs.path_of(tmp_path, 1)
    write(tmp_path, 1, "first")
    with path.open("r+b") as file:
        file.truncate(3 << 30)  # a hole: it takes no room
    with path.open("ab") as file:
        file.write(b"\n")
    write(tmp_path, 1, *"abc", at=20)
    write(tmp_path, logs.MASTER, "m", at=21.5)
    tracemalloc.start()
    found = read(tmp_path, LogQuery(limit=3, newest_first=True))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts(found) == ["c", "m", "b"]
    assert used < 20 * logs.BLOCK


def test_a_whole_log_is_not_held_in_memory(tmp_path: Path) -> None:
    # 5 MB
    write(tmp_path, 1, *(f"{number:06d}" + "x" * 1500 for number in range(3000)), step=0.001)
    for query in (LogQuery(), LogQuery(newest_first=True), LogQuery(search="nowhere"), LogQuery(limit=10)):
        tracemalloc.start()
        count = sum(1 for _ in logs.lines(logs.Source(tmp_path, 7, "1.t"), query))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == (query.limit or (0 if query.search else 3000))
        assert used < 1 << 20


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:7]))
    entries = [logs.entry("one", 1.0), logs.entry("two", 2.0)]
    logs.append(tmp_path / "000001.jsonl", entries)
    assert (tmp_path / "000001.jsonl").read_bytes() == b"".join(entries)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60).map(lambda raw: raw.translate(bytes(10 if b < 90 else b for b in range(256)))),
    size=st.integers(1, 9),
)
def test_both_ends_see_the_same_lines(content: bytes, size: int, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(content)
    whole = content[: content.rfind(b"\n") + 1]
    expected, place = [], 0
    for line in whole.split(b"\n")[:-1]:
        expected.append((place, line + b"\n"))
        place += len(line) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK", size)
        assert list(logs.forward(path)) == expected
        assert list(logs.backward(path)) == expected[::-1]
        assert logs.end_of_lines(path) == len(whole)
        for start, _ in expected:
            assert list(logs.backward(path, start)) == [item for item in expected[::-1] if item[0] < start]
            assert list(logs.forward(path, start)) == [item for item in expected if item[0] >= start]


def test_no_file(tmp_path: Path):
    assert list(logs.forward(tmp_path / "none")) == list(logs.backward(tmp_path / "none")) == []
    assert logs.end_of_lines(tmp_path / "none") == 0


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
