"""From a trial's class to its outcome on one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trial.fake_engine import fake_factory
from tests.trial.harness import DS_CONFIG, LineTrial
from zero_trial.comm.env import RankEnv
from zero_trial.errors import ConfigError, DoesNotFit, InvalidHP, TrialError
from zero_trial.launch.entrypoint import Entrypoint
from zero_trial.runtime.in_memory import InMemoryPlatform, ReportedRecord
from zero_trial.runtime.open import rank_of_folder
from zero_trial.runtime.rank import (
    RankState,
    as_known_error,
    figures_of,
    load_trial_class,
    own_device,
    peak_memory,
    rank_world,
    train,
)
from zero_trial.trial import ZeroTrial, ZeroTrialContext
from zero_trial.trial.reporting import End
from zero_trial.trial.settings import TrainPosition

EXPERIMENT = {"data": {"ds_config": DS_CONFIG}, "searcher": {"max_length": {"batches": 3}}}


def test_a_trial_is_built_and_run_as_the_experiment_says() -> None:
    record, state = ReportedRecord(), RankState()
    trained = train(LineTrial, InMemoryPlatform(experiment=EXPERIMENT, record=record), state, fake_factory())
    assert (trained.outcome.end, trained.outcome.step) == (End.COMPLETED, 3)
    assert trained.context is state.context and state.step == 3
    assert isinstance(trained.trial, LineTrial) and trained.watch is not None


def test_its_figures_are_those_of_its_trial() -> None:
    trained = train(LineTrial, InMemoryPlatform(experiment=EXPERIMENT), RankState(), fake_factory())
    figures = figures_of(trained)
    assert (figures["step"], figures["ranks"], figures["end"]) == (3, 1, "completed")
    assert figures["peak_memory_bytes"][0] > 2**20 and figures["peak_memory_kind"] == "resident set"


def test_a_rank_leaves_without_looking_for_garbage() -> None:
    """The cycle's finalizer would be called by the search at the interpreter's end."""
    code = (
        "import weakref, zero_trial.runtime.rank as rank\n"
        "class Cycle:\n    def __del__(self): print('found', flush=True)\n"
        "made = Cycle(); made.me = made\n"
    )
    for quickly, said in (("rank.skip_last_garbage_collection()", ""), ("", "found\n")):
        command = [sys.executable, "-c", code + quickly + "\ndel made"]
        assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == said


def leaves(context: ZeroTrialContext) -> ZeroTrial:
    sys.exit("no data here")


def test_a_trial_that_leaves_says_where() -> None:
    """SystemExit is no Exception: the rank would be gone without a word."""
    expected = r"^test_rank.py:\d+ in leaves: .*ended the process: got sys.exit\('no data here'\)"
    with pytest.raises(TrialError, match=expected):
        train(leaves, InMemoryPlatform(experiment=EXPERIMENT), RankState(), fake_factory())


def test_other_ranks_do_not_watch_their_memory() -> None:
    state = RankState(RankEnv(rank=1, world_size=2))
    trained = train(LineTrial, InMemoryPlatform(experiment=EXPERIMENT), state, fake_factory())
    assert trained.watch is None


def test_hyperparameters_that_cannot_be_trained_are_told_at_once() -> None:
    def refuse(context: ZeroTrialContext) -> ZeroTrial:
        raise InvalidHP("too small")

    record, state = ReportedRecord(), RankState()
    with pytest.raises(SystemExit), rank_of_folder(state):
        train(refuse, InMemoryPlatform(experiment=EXPERIMENT, record=record), state, fake_factory())
    assert record.early_exits == ["INVALID_HP"]


def test_memory_that_runs_out_exits_with_3() -> None:
    fault = as_known_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert isinstance(fault, DoesNotFit) and fault.exit_code == 3
    assert "memory ran out: CUDA out of memory" in str(fault)
    other = ValueError("mine")
    assert as_known_error(other) is other


def test_what_one_process_has() -> None:
    assert peak_memory(torch.device("cpu")) > 1e6
    assert rank_world(RankEnv()).allgather({"a": 1}) == [{"a": 1}]
    assert own_device(RankEnv()).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert RankState().step is None


def test_the_step_is_the_contexts() -> None:
    state = RankState(context=ZeroTrialContext(InMemoryPlatform(), fake_factory()))
    assert state.step is None and state.context is not None
    state.context.position = TrainPosition(5, 10)
    assert state.step == 5


def test_a_class_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_def"):
        load_trial_class(Entrypoint("model_def", "MyTrial"), tmp_path)
