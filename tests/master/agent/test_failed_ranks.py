"""Which rank is named, and whether the line is the trial's cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero_trial.master.agent.supervisor import FailedRank, first_of, of_failure, verdict

MEMORY = "by somebody or because memory ran out"


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        ([FailedRank(0, 241), FailedRank(1, 247)], "error   rank 1: killed by SIGKILL, " + MEMORY + "; ended with it: rank 0"),
        ([FailedRank(0, -11)], "error   rank 0: killed by SIGSEGV: a native library crashed"),
        ([FailedRank(3, 137), FailedRank(0, -15), FailedRank(1, -15)], "error   rank 3: killed by SIGKILL, " + MEMORY + "; ended with it: ranks 0, 1"),  # noqa: E501
        ([FailedRank(0, 241), FailedRank(1, 2, "x: bad", True)], "failed  rank 1 with exit code 2; ended with it: rank 0"),
        ([FailedRank(0, 1, "ValueError: boom\nand more", False)], "error   rank 0: ValueError: boom"),
        (
            [FailedRank(0, 1, "Connection closed by peer", True), FailedRank(1, 1, "ValueError: boom", True)],
            "error   rank 1: ValueError: boom; ended with it: rank 0",
        ),
        ([FailedRank(0, 1)], "failed  rank 0 with exit code 1"),
        ([FailedRank(0, -15)], "error   rank 0: killed by SIGTERM"),
    ],
)  # fmt: skip
def test_lines(failed: list[FailedRank], line: str):
    assert verdict(failed) == line


def test_the_echo_of_another_s_end_is_not_the_cause():
    echo = FailedRank(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]", True, time=5)
    assert first_of([echo, FailedRank(1, 1, "ValueError: boom", True, time=6)]).rank == 1
    assert first_of([echo, FailedRank(1, 247, time=6)]).rank == 1  # it died without a word
    assert first_of([echo, FailedRank(1, 241, time=4)]).rank == 0  # it was only ended


def test_torch_s_failures_are_read(tmp_path: Path):
    place = tmp_path / "error.json"
    place.write_text(json.dumps({"message": {"message": "words", "extraInfo": {"timestamp": "7"}, "printed": True}}))
    assert of_failure(1, ProcessFailure(1, 42, 2, str(place))) == FailedRank(1, 2, "words", True, 7)
    silent = of_failure(0, ProcessFailure(0, 41, -9, "<N/A>"))
    assert (silent.words, silent.signal, silent.printed) == ("", 9, False)
