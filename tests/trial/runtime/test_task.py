"""How a rank of a cluster's task ends: its exit code, what it prints, and what it reports to the
master; without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import Claims, FakeCore
from tests.trial.fake_engine import fake_factory
from tests.trial.harness import DS_CONFIG, LineTrial
from zero_trial.errors import ConfigError, InvalidHP, TrialError
from zero_trial.trial import ZeroTrialContext
from zero_trial.trial.runtime import task
from zero_trial.trial.runtime.determined import DeterminedPlatform, TensorboardSync, TrialFacts
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.runtime.rank import RankState
from zero_trial.trial.runtime.task import EARLY_EXIT, open_task, train_task

EXPERIMENT: dict[str, Any] = {
    "data": {"ds_config": DS_CONFIG},
    "searcher": {"metric": "validation_loss", "max_length": {"batches": 4}},
    "scheduling_unit": 2,
    "min_validation_period": None,
}


class DetInvalidHP(Exception):
    """Instead of Determined's own."""


@pytest.fixture()
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    """What the rank sees as its core.Context."""
    ranks = Distributed()
    fake = FakeCore(tmp_path, ranks)

    @contextmanager
    def opened(distributed: Any, claim: Any, show: Any, *, launched: bool, core_context: Any) -> Iterator[Any]:
        facts = TrialFacts("1", "1", 7, {}, EXPERIMENT)
        sync = TensorboardSync(fake, 0, 0)
        try:
            yield DeterminedPlatform(
                **vars(facts),
                core=fake,
                distributed=distributed,
                show=show,
                claim=claim,
                tensorboard=sync,
                model_dir=tmp_path,
            )
        finally:
            sync.close()

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(task, "open_platform", opened)
    monkeypatch.setattr(task, "invalid_hp_class", lambda: DetInvalidHP)
    return fake


def run(trial: Any) -> int:
    """The exit code of the rank."""
    try:
        train_task(lambda platform: trial, fake_factory())
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_trial_that_completes(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(LineTrial) == 0
    assert [step for step, _ in core.training] == [2, 4]
    assert [(step, metrics["batches"]) for step, metrics in core.validation] == [(4, 4)]
    assert core.progress[-1] == 1.0 and core.early_exits == []
    assert core.reported[-1]["metadata"]["steps_completed"] == 4
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("done    0 s · validation_loss ") and last[0].endswith(" · 1 rank · ZeRO-0 · seed 7")
    assert last[1].startswith("kept    step 4/4  checkpoint ")


def test_the_host_is_profiled_where_the_experiment_says_so(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(LineTrial) == 0 and not core.profiling
    monkeypatch.setitem(EXPERIMENT, "profiling", {"enabled": True})
    assert run(LineTrial) == 0 and core.profiling


def test_a_trial_that_is_asked_to_stop_has_saved_and_is_no_failure(
    core: FakeCore, capsys: pytest.CaptureFixture[str]
) -> None:
    core.wants_stop = True
    assert run(LineTrial) == 0
    assert core.reported[-1]["metadata"]["steps_completed"] < 4
    assert capsys.readouterr().out.splitlines()[-1].startswith("paused  step ")


def test_a_complete_trial_is_not_asked_whether_it_would_stop(core: FakeCore) -> None:
    """An answered question at the last step would make the master start a complete trial again."""

    class OneStep(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            core.wants_stop = batch_idx == 3
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    assert run(OneStep) == 0
    assert core.reported[-1]["metadata"]["steps_completed"] == 4
    asked_at_the_end = core.asked
    core.wants_stop = False
    core.asked = 0
    assert run(LineTrial) == 0
    assert core.asked == asked_at_the_end


@pytest.mark.parametrize("error", [InvalidHP("too small"), DetInvalidHP("too small")])
def test_hyperparameters_that_cannot_be_trained(
    core: FakeCore, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(context: ZeroTrialContext) -> Any:
        raise error

    class Late(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise error

    for trial in (refuse, Late):
        core.early_exits.clear()
        assert run(trial) == 0
        assert core.early_exits == ["EXITED_REASON_INVALID_HP"]
        assert "hyperparameters that cannot be trained: too small" in capsys.readouterr().err


def test_the_echo_of_another_ranks_leaving_is_no_failure(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise RuntimeError("Connection closed by peer")

    assert run(Lost) == 1
    claims = Claims()
    claims(EARLY_EXIT)

    class Recorded:
        claim = staticmethod(claims)

        def watch(self, name: str) -> None: ...

        def close(self) -> None: ...

        def claimed(self, name: str) -> bool:
            return name == EARLY_EXIT

    monkeypatch.setattr(task, "open_exit_notice", Recorded)
    assert run(Lost) == 0 and core.early_exits == []


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [(ConfigError("wrong", where="here"), 2, False), (KeyError("bug"), 1, True), (MemoryError(), 3, False)],
)
def test_a_failure_has_its_exit_code(
    core: FakeCore, error: Exception, code: int, traceback: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(context: ZeroTrialContext) -> Any:
        raise error

    assert run(fail) == code
    assert core.early_exits == []
    assert ("Traceback" in capsys.readouterr().err) == traceback


@pytest.mark.parametrize("closing", [None, RuntimeError("no storage")])
def test_an_error_is_printed_before_the_platform_closes(
    core: FakeCore,
    closing: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Closing copies files and may take long, fail or be killed; the cause is in the log by then,
    and stays the cause."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    printed: list[str] = []

    def close(self: TensorboardSync) -> None:
        printed.append(capsys.readouterr().err)
        printed.append(json.loads((tmp_path / "error.json").read_text())["message"]["message"])
        if closing is not None:
            raise closing

    monkeypatch.setattr(TensorboardSync, "close", close)

    def fail(context: ZeroTrialContext) -> Any:
        raise ConfigError("wrong", where="here")

    assert run(fail) == 2
    assert printed == ["error   here: wrong.\n", "here: wrong."]
    after = capsys.readouterr().err
    assert "here: wrong" not in after and ("no storage" in after) == (closing is not None)


def test_a_script_s_own_error_is_raised_as_it_is(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised, open_task(RankState(), script=True):
        raise mine
    assert raised.value is mine and "KeyError" not in capsys.readouterr().err


def test_what_fails_while_the_platform_opens_is_a_failure_too(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise ConfigError("not installed", where="cluster")

    monkeypatch.setattr(task, "open_platform", refuse)
    assert run(LineTrial) == 2
    assert capsys.readouterr().err == "error   cluster: not installed.\n"


def test_an_exit_of_the_users_own_is_reported(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that left without a word would keep the others waiting."""

    def leave(context: ZeroTrialContext) -> Any:
        raise SystemExit(7)

    assert run(leave) == TrialError("").exit_code
    assert "in leave: raise SystemExit(7): the trial's code called exit(): got sys.exit(7)" in capsys.readouterr().err
