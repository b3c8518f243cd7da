"""The steps of Determined's harness with a ZeroTrial, without a cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_memory import InMemoryPlatform
from tests.trial.fake_engine import fake_factory
from zero_trial.trial import ZeroTrial, ZeroTrialContext
from zero_trial.trial.runtime import task

load = pytest.importorskip("determined.load")


class Recorded:
    """Instead of the run on the cluster."""

    def __init__(self) -> None:
        self.end: BaseException | None = None
        self.core: Any = None
        self.load: Any = None

    def __call__(self, load: Any, core: Any) -> None:
        self.load, self.core = load, core
        if self.end is not None:
            raise self.end


@pytest.fixture()
def reported(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A base class of this test's own, made what the harness wants: a class that was adopted once
    stays so."""

    class Base(ZeroTrial):
        """Instead of ZeroTrial."""

    run = Recorded()
    monkeypatch.setattr(task, "ZeroTrial", Base)
    task.install(run)
    return run


@pytest.fixture()
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = """
        from tests.trial.harness import LineTrial
        from zero_trial.trial.runtime import task

        class MyTrial(LineTrial, task.ZeroTrial):
            pass
    """
    (tmp_path / "model_of_a_test.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return "model_of_a_test:MyTrial"


def test_the_harness_takes_the_class_and_hands_the_trial_over(reported: Recorded, module: str) -> None:
    kind = load.trial_class_from_entrypoint(module)
    controller_class = load.get_trial_controller_class(kind)
    controller_class.pre_execute_hook("env", "backend")
    context = kind.trial_context_class("core", "env")
    trial = kind(context)
    controller = controller_class.from_trial(trial_inst=trial, context=context, env="env")
    controller.run()
    assert reported.core == "core"
    made = reported.load(None)(
        ZeroTrialContext(
            InMemoryPlatform(
                experiment={
                    "data": {"ds_config": {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}}
                }
            ),
            fake_factory(),
        )
    )
    assert type(made) is kind and made.engine is not None


def test_a_failure_is_the_harness_exit_code(reported: Recorded, module: str) -> None:
    kind = load.trial_class_from_entrypoint(module)
    context = kind.trial_context_class("core", "env")
    reported.end = SystemExit(3)
    with pytest.raises(SystemExit, match="3"):
        kind.trial_controller_class.from_trial(kind(context), context, "env").run()


def test_any_other_construction_is_what_it_was(reported: Recorded, module: str) -> None:
    kind = load.trial_class_from_entrypoint(module)
    assert type(kind.__new__(kind)) is kind
    assert reported.load is None


def test_only_the_harness_process_is_changed() -> None:
    """The hook looks at how the process was started; a plain import of both packages changes
    nothing."""
    code = (
        "import determined, zero_trial; from zero_trial import ZeroTrial;"
        "assert not issubclass(ZeroTrial, determined.LegacyTrial), 'adopted'; assert not zero_trial._is_determined_harness()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
