"""Plain torch in a trial's training is seen in its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.planning.project import MODEL, messages, project
from zero_trial.trial.source_hints import training_issues


class Ported:
    """A loop of plain torch, half of it moved over."""

    engine: Any
    optimizer: Any

    def train_batch(self, batch: Any) -> Any:
        self.engine.optimizer.zero_grad()
        loss = self.engine(batch)
        self.engine.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), 1.0)
        self.engine.optimizer.step()
        return loss

    def clean(self, batch: Any) -> Any:
        loss = self.engine(batch)
        self.engine.backward(loss)
        self.engine.step()
        self.step.zero_grad(loss)  # type: ignore[attr-defined]
        return loss


def test_each_call_with_its_line_and_what_to_write() -> None:
    first = Ported.train_batch.__code__.co_firstlineno
    found = training_issues(Ported.train_batch)
    assert [(remark.where, remark.what.split(" ")[0]) for remark in found] == [
        (f"test_source_issues.py:{first + 1}", "self.engine.optimizer.zero_grad"),
        (f"test_source_issues.py:{first + 4}", "torch.nn.utils.clip_grad_norm_"),
        (f"test_source_issues.py:{first + 5}", "self.engine.optimizer.step"),
    ]
    assert found[1].fix == "Set gradient_clipping in ds_config." and "ZeRO 2 and 3" in found[1].what


def test_an_optimizer_beside_the_engine_is_the_trial_s_business() -> None:
    class Two:
        def train_batch(self, batch: Any) -> None:
            self.second.optimizer.step()  # type: ignore[attr-defined]
            self.model_engine.optimizer.step()  # type: ignore[attr-defined]

    assert [remark.what.split(" ")[0] for remark in training_issues(Two.train_batch)] == [
        "self.model_engine.optimizer.step"
    ]


def test_an_engine_s_own_calls_need_no_remark() -> None:
    assert training_issues(Ported.clean) == []
    assert training_issues(len) == []  # no source


def test_check_warns(tmp_path: Path) -> None:
    before = "        self.engine.step()\n"
    assert before in MODEL
    model = MODEL.replace(before, f"        torch.nn.utils.clip_grad_norm_([], 1.0)\n{before}")
    report = project(tmp_path, model=model).check()
    (warning,) = [message for message in messages(report) if message.startswith("warn: model_def.py:")]
    assert "train_batch: torch.nn.utils.clip_grad_norm_ is an error" in warning and report.exit_code == 0
