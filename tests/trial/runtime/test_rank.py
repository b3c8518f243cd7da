"""From a trial's class to its outcome on one rank."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.in_memory import InMemoryPlatform, ReportedRecord
from tests.support.models import TinyLM, make_engine, train_engine
from tests.trial.fake_engine import fake_factory
from tests.trial.harness import DS_CONFIG, LineTrial
from zero_trial.comm.rendezvous import RankEnv
from zero_trial.device import own_device
from zero_trial.errors import ConfigError, TrialError
from zero_trial.experiment.entrypoint import parse_entrypoint
from zero_trial.trial import ZeroTrial, ZeroTrialContext
from zero_trial.trial.reporting import End, Outcome
from zero_trial.trial.runs.run_layout import read_errors
from zero_trial.trial.runtime import rank
from zero_trial.trial.runtime.rank import (
    EventLog,
    RankState,
    done_event,
    error_text,
    figures_of,
    load_trial_class,
    peak_memory,
    print_error,
    rank_world,
    train,
    write_error_file,
)
from zero_trial.trial.runtime.run_folder import rank_of_folder
from zero_trial.trial.settings import TrainPosition

EXPERIMENT = {"data": {"ds_config": DS_CONFIG}, "searcher": {"max_length": {"batches": 3}}}


def test_a_trial_is_built_and_run_as_the_experiment_says() -> None:
    record, state = ReportedRecord(), RankState()
    trained = train(LineTrial, InMemoryPlatform(experiment=EXPERIMENT, record=record), state, fake_factory())
    assert (trained.outcome.end, trained.outcome.step) == (End.COMPLETED, 3)
    assert trained.context is state.context and state.step == 3
    assert isinstance(trained.trial, LineTrial) and trained.watch is not None
    figures = figures_of(trained)
    assert (figures["step"], figures["ranks"], figures["end"]) == (3, 1, "completed")
    assert figures["peak_memory_bytes"][0] > 2**20 and figures["peak_memory_kind"] == "resident set"


def leaves(context: ZeroTrialContext) -> ZeroTrial:
    sys.exit("no data here")


def test_a_trial_that_leaves_says_where() -> None:
    """SystemExit is no Exception: the rank would be gone without a word."""
    expected = r"^test_rank.py:\d+ in leaves: .*called exit\(\): got sys.exit\('no data here'\)"
    with pytest.raises(TrialError, match=expected):
        train(leaves, InMemoryPlatform(experiment=EXPERIMENT), RankState(), fake_factory())


def test_an_import_that_ends_the_process_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("import argparse", "argparse.ArgumentParser().parse_args(['--lr'])", "class MyTrial: pass")
    (tmp_path / "parses_arguments.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [*sys.path])
    expected = (
        r"^parses_arguments.py:2: argparse.*: the import of parses_arguments ended the process: got sys.exit\(2\)"
    )
    with pytest.raises(TrialError, match=expected):
        load_trial_class(parse_entrypoint("parses_arguments:MyTrial"), tmp_path)


def test_what_one_process_has() -> None:
    assert peak_memory(torch.device("cpu")) > 1e6
    assert rank_world(RankEnv()).allgather({"a": 1}) == [{"a": 1}]
    assert own_device(0).type == ("cuda" if torch.cuda.is_available() else "cpu")
    state = RankState(context=ZeroTrialContext(InMemoryPlatform(), fake_factory()))
    assert RankState().step is None and state.step is None and state.context is not None
    state.context.position = TrainPosition(5, 10)
    assert state.step == 5


def test_torch_reports_the_first_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "error.json"
    write_error_file("ValueError: boom\nmore", printed=True, path=str(place), now=1_700_000_000.9)
    failure = ProcessFailure(1, 42, 2, str(place))
    report = ChildFailedError("run", {1: failure}).format_msg()
    assert "traceback : ValueError: boom\n  more" in report
    assert failure.timestamp == 1_700_000_000
    write_error_file("second", printed=True, path=str(place), now=1.0)
    assert json.loads(place.read_text())["message"]["message"] == "ValueError: boom\nmore"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    write_error_file("no one asks", printed=True)
    write_error_file("no such folder", printed=True, path=str(tmp_path / "gone" / "error.json"))
    assert list(tmp_path.iterdir()) == [place]


def test_a_script_s_own_error_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(KeyError), rank_of_folder(RankState(), script=True):
        raise KeyError("no such thing")
    left = json.loads((tmp_path / "error.json").read_text())["message"]
    assert left["message"].startswith("KeyError: 'no such thing'") and not left["printed"]


class Killed(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def test_a_killed_worker_of_a_loader_ends_the_rank_as_a_lost_host_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ending, rank_of_folder(RankState(), script=True):
        next(iter(torch.utils.data.DataLoader(Killed(), num_workers=1)))
    assert ending.value.code == 5
    said = capsys.readouterr().err
    assert said.startswith("error   a worker of a DataLoader has died: got DataLoader worker (pid")
    assert said.endswith("use fewer num_workers, or 0 to see the error.\n")


class Unreadable(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise KeyError("no such sample")


def test_an_error_in_a_worker_of_a_loader_is_one_line() -> None:
    line = Unreadable.__getitem__.__code__.co_firstlineno + 1
    place = f"test_rank.py:{line} in __getitem__, DataLoader worker process 0"
    with pytest.raises(KeyError) as caught:
        next(iter(torch.utils.data.DataLoader(Unreadable(), num_workers=1)))
    assert error_text(caught.value) == f"KeyError: 'no such sample' ({place})"


def collate(samples: list[int]) -> None:
    torch._assert(not samples, f'CUDA error: bad sizes\n  File "x.py", line 1, in no one\nGiven: {samples}')


def test_an_error_of_several_lines_in_a_library_under_a_worker_keeps_them() -> None:
    with pytest.raises(AssertionError) as caught:
        next(iter(torch.utils.data.DataLoader([5], num_workers=1, collate_fn=collate)))  # type: ignore[arg-type]
    line = collate.__code__.co_firstlineno + 1  # torch's own frame is the innermost one
    said = 'AssertionError: CUDA error: bad sizes\n  File "x.py", line 1, in no one\nGiven: [5]'
    assert error_text(caught.value) == f"{said}\n(test_rank.py:{line} in collate, DataLoader worker process 0)"


def test_an_error_of_the_user_s_own_about_a_worker_is_no_worker_s() -> None:
    try:
        try:
            next(iter(torch.utils.data.DataLoader(Unreadable(), num_workers=1)))
        except KeyError as error:
            raise RuntimeError(f"sample 3: {error}") from error
    except RuntimeError as error:
        assert error_text(error).startswith("RuntimeError: sample 3: Caught KeyError in DataLoader worker")


def raised_here(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_line_of_the_user_s_code_stands_beside_what_it_did():
    place = f"(test_rank.py:{raised_here.__code__.co_firstlineno + 2} in raised_here: raise error)"
    assert error_text(raised_here(ValueError("boom"))) == f"ValueError: boom {place}"
    assert error_text(raised_here(TrialError("no step"))) == f"no step. {place}"
    assert error_text(raised_here(ConfigError("bad", where="ds_config.json:4"))) == "ds_config.json:4: bad."


def test_a_traceback_is_for_unexpected_faults(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError("wrong", where="here"))
    assert capsys.readouterr().err == "error   here: wrong.\n"
    try:
        raise ValueError("mine\nall mine")
    except ValueError as error:
        print_error(error)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and said[-3:-1] == ["error   ValueError: mine", "        all mine"]
    assert said[-1].startswith("        (test_rank.py:"), "the line of the user's code"
    try:
        try:
            raise ValueError("in a layer")
        except ValueError as error:
            raise TrialError("a pipeline stage failed") from error
    except TrialError as error:
        print_error(error)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and "ValueError: in a layer" in said
    assert said[-1].startswith("error   a pipeline stage failed")


def outcome(end: End) -> Outcome:
    return Outcome(end, step=3, total_steps=8, train_seconds=1.0, samples=24, checkpoint="abc")


def test_the_last_step_stands_before_the_last_line() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    log({"kind": "note", "message": "hello"})
    log({"kind": "train", "step": 3, "total_steps": 8, "loss": 1.5})
    log(done_event(outcome(End.PREEMPTED)))
    log.close()
    assert stream.getvalue().splitlines() == [
        "note    hello",
        "train   step 3/8  loss 1.5",
        "paused  step 3/8  checkpoint abc",
    ]


def test_the_figures_of_a_run_stand_where_it_has_no_other_place_for_them() -> None:
    for end, word in ((End.COMPLETED, "done   "), (End.STOPPED, "stopped")):
        stream = io.StringIO()
        EventLog(stream)(done_event(outcome(end), {"train_seconds": 1.0, "ranks": 2, "seed": 7}))
        bare = io.StringIO()
        EventLog(bare)(done_event(outcome(end)))
        assert bare.getvalue().split() == [word.strip(), "step", "3/8", "checkpoint", "abc"]
        assert stream.getvalue().splitlines() == [f"{word} 1 s · 2 ranks · seed 7", "kept    step 3/8  checkpoint abc"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_held_memory_when_it_ran_out_is_named(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    train_engine(engine, range(1))
    memory = SimpleNamespace(memory=SimpleNamespace(_dump_snapshot=lambda path: Path(path).write_bytes(b"blocks")))
    monkeypatch.setattr(rank, "torch_module", lambda device: memory)
    context: Any = SimpleNamespace(engines=[engine], device=torch.device(device), position=None)
    state = rank.RankState(folder=tmp_path, context=context)
    with pytest.raises(SystemExit) as ending, rank_of_folder(state):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert ending.value.code == 3
    (record,) = read_errors(tmp_path)
    table = tmp_path / "errors" / "rank-0.memory.txt"
    assert (
        f"memory ran out: CUDA out of memory. Tried to allocate 2 GiB: got what each group held: {table}"
        in record.message
    )
    assert "Halve train_micro_batch_size_per_gpu" in record.message
    first, *rows = table.read_text().rstrip().splitlines()
    assert first.startswith("memory: parameters ") and len(rows) == len(engine.sharded.groups) + 1
    sizes = [[float(cell) for cell in row.split()[-2:]] for row in rows[1:]]
    assert sizes == sorted(sizes, key=sum, reverse=True) and sum(map(sum, sizes)) > 0
    total = engine.persistent_bytes()["parameters"] / 2**20
    assert sum(row[0] for row in sizes) == pytest.approx(total, abs=0.06 * len(sizes))
    snapshot = tmp_path / "errors" / "rank-0.memory.pickle"
    assert snapshot.exists() == (device == "cuda") == (f"torch's snapshot: {snapshot}" in record.message)
