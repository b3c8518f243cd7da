"""The cause of a failed run among all that is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zero_trial.launch.first_cause import Cause, RankExit, first_cause, how_it_ended, is_secondary, launcher_line
from zero_trial.trial.runs.run_layout import ErrorRecord

ECHO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41122"


def error(
    rank: int, time: float, message: str = "loss is not a scalar", type_: str = "TrialError", code: int = 2
) -> ErrorRecord:
    return ErrorRecord(rank, type_, message, code, time)


FIRST_ECHO = error(0, 1.0, ECHO, "RuntimeError", 1)
LOST = error(0, 1.0, "rank 1 never came to all_gather", "MeshError", 5)


@pytest.mark.parametrize(
    ("errors", "exits", "cause"),
    [
        ([], [], None),
        # rank 0 wrote first, but only heard of it
        ([FIRST_ECHO, error(1, 2.0)], [RankExit(0, 1)], Cause(1, "loss is not a scalar", 2)),
        ([error(0, 5.0), error(2, 4.0, "no data")], [], Cause(2, "no data", 2)),
        # a killed rank leaves no words, and the launcher's own SIGTERM is no cause
        ([FIRST_ECHO], [RankExit(0, 1), RankExit(1, -9)], Cause(1, how_it_ended(-9), 5, killed=True)),
        ([FIRST_ECHO], [RankExit(0, 1), RankExit(1, -15, stopped=True), RankExit(2, -9)], Cause(2, how_it_ended(-9), 5, killed=True)),
        ([LOST], [RankExit(1, -11)], Cause(1, how_it_ended(-11), 5)),
        ([LOST], [RankExit(0, 5), RankExit(1, -15, stopped=True)], Cause(0, LOST.message, 5, echo=True)),
        # someone outside has sent it, and another died of something else
        ([LOST], [RankExit(0, 5), RankExit(1, -15)], Cause(1, how_it_ended(-15), 5)),
        ([], [RankExit(1, -15), RankExit(2, -11)], Cause(2, how_it_ended(-11), 5)),
        ([], [RankExit(2, 3)], Cause(2, "the process ended with exit code 3 without an error message", 3)),
        # of what another host's error has stopped, nothing else is known
        ([], [RankExit(0, -9, stopped=True)], Cause(0, how_it_ended(-9), 5, killed=True)),
        # an exit code that cannot be passed on
        ([error(0, 1.0, code=-3)], [], Cause(0, "loss is not a scalar", 1)),
    ],
)  # fmt: skip
def test_causes(errors: list[ErrorRecord], exits: list[RankExit], cause: Cause | None):
    assert first_cause(errors, exits) == cause


@pytest.mark.parametrize(
    ("message", "secondary"),
    [
        (ECHO, True),
        ("Connection reset by peer", True),
        ("[Rank 1] NCCL communicator was aborted", True),
        ("recvValue failed on SocketImpl", True),
        ("loss is not a scalar", False),
        ("the loader yields nothing", False),
    ],
)
def test_echoes(message: str, secondary: bool):
    assert is_secondary(error(0, 1.0, message, "RuntimeError")) is secondary


def test_signals_in_words():
    assert "OOM" in how_it_ended(-9)
    assert how_it_ended(-200).startswith("killed by signal 200")


KILLED = "killed by SIGKILL (signal 9). Killed from outside, or by the kernel's OOM killer (see dmesg)"


@pytest.mark.parametrize(
    ("codes", "said", "line"),
    [
        ([241, 247], {}, f"error   rank 1: {KILLED}; ended with it: rank 0"),
        ([-15, -15, -15, 137], {}, f"error   rank 3: {KILLED}; ended with it: ranks 0, 1, 2"),
        ([-15], {}, "error   rank 0: killed by SIGTERM (signal 15)"),
        ([1], {}, "failed  rank 0 with exit code 1"),
        ([241, 2], {1: ("x: bad", True)}, "failed  rank 1 with exit code 2; ended with it: rank 0"),
        ([1], {0: ("ValueError: boom\nand more", False)}, "error   rank 0: ValueError: boom"),
        ([1, 1], {0: ("Connection closed by peer", True), 1: ("ValueError: boom", True)}, "error   rank 1: ValueError: boom; ended with it: rank 0"),
        ([5, 247], {0: ("MeshError: rank 1 never came", True)}, f"error   rank 1: {KILLED}; ended with it: rank 0"),
        # it was only ended
        ([1, 241], {0: (ECHO, True)}, "failed  rank 0 with exit code 1; ended with it: rank 1"),
    ],
)  # fmt: skip
def test_the_line_of_a_launcher(codes: list[int], said: dict[int, tuple[str, bool]], line: str, tmp_path: Path):
    for rank, (message, printed) in said.items():
        content = {"message": message, "extraInfo": {"timestamp": str(5 + rank)}, "printed": printed}
        (tmp_path / f"{rank}.json").write_text(json.dumps({"message": content}))
    failures = {rank: ProcessFailure(rank, 42, code, str(tmp_path / f"{rank}.json")) for rank, code in enumerate(codes)}
    assert launcher_line(failures) == line
