"""Profiles of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zero_trial.engine.flop_count import Flops, Peak
from zero_trial.engine.profile import ModelProfile, Timers, build_profile, get_model_profile, timed_modules
from zero_trial.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor, repeat: int = 1) -> torch.Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        for _ in range(repeat):
            out = self.down(self.up(x))
        return out

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x, repeat=3)


FORWARD = 2 * 5 * 8 * 16 + 2 * 5 * 16 * 3
PARAMETERS = 8 * 16 + 16 + 16 * 3 + 3


def test_a_model_alone(capsys: pytest.CaptureFixture[str]):
    model = Net()
    numbers = get_model_profile(model, (5, 8), as_string=False)
    assert numbers == (FORWARD, FORWARD // 2, PARAMETERS)
    assert model.modes == [(False, False)] * 3  # warm-up, timed, counted
    assert model.training
    printed = capsys.readouterr().out
    assert printed.startswith("FLOPs profile\n") and "up: Linear" in printed


def test_text_and_the_depth(capsys: pytest.CaptureFixture[str]):
    assert get_model_profile(Net(), args=[torch.ones(5, 8)], module_depth=0) == ("1.76 kFLOP", "880 MAC", "195")
    assert "up: Linear" not in capsys.readouterr().out


def test_arguments_and_generate(capsys: pytest.CaptureFixture[str]):
    inputs = {"args": [torch.ones(5, 8)], "as_string": False, "print_profile": False}
    assert get_model_profile(Net(), kwargs={"repeat": 2}, **inputs)[0] == 2 * FORWARD
    assert get_model_profile(Net(), mode="generate", **inputs)[0] == 3 * FORWARD
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="no such mode"):
        get_model_profile(Net(), mode="backward", **inputs)


def test_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    get_model_profile(Net(), (5, 8), output_file=tmp_path / "profile.txt", warm_up=0)
    assert (tmp_path / "profile.txt").read_text().startswith("FLOPs profile\n")
    assert capsys.readouterr().out == ""


def test_a_model_that_fails_is_left_as_it_was():
    model = Net()
    with pytest.raises(RuntimeError):
        get_model_profile(model, (5, 9))
    assert model.training and not model._forward_hooks


def test_times_by_module():
    model, timers = Net(), Timers()
    with timed_modules(model, timers):
        model(torch.ones(1, 8))
    model(torch.ones(1, 8))
    sums = timers.take()
    assert list(sums) == ["up", "down", ""]
    assert sums[""] >= sums["up"] + sums["down"] > 0


def profile() -> ModelProfile:
    forward = Flops(100, {"": 100, "up": 60, "down": 40})
    both = Flops(330, {"": 330, "up": 200, "down": 130})
    return build_profile(Net(), forward, both, {"up": 1.0}, (4.0, 6.0), Peak(66_000.0, "made up"))


def test_the_arithmetic():
    """330 operations in 10 ms are 33 000 per second, half of the peak; recomputing half of forward (50) leaves 280 for the model."""
    found = profile()
    assert (found.forward_flops, found.backward_flops, found.parameters) == (100, 230, PARAMETERS)
    assert found.achieved == pytest.approx(33_000.0)
    assert found.utilisation() == pytest.approx(0.5)
    assert found.model_flops(0.5) == 280
    assert found.utilisation(0.5) == pytest.approx(0.5 * 280 / 330)
    up = next(row for row in found.rows if row.name == "up")
    assert (up.kind, up.depth, up.forward_flops, up.backward_flops, up.milliseconds) == ("Linear", 1, 60, 140, 1.0)
    assert found.rows[0].milliseconds is None


def test_nothing_counted_is_no_division_by_zero():
    empty = build_profile(nn.Identity(), Flops(0, {}), Flops(0, {}), {}, (0.0, 0.0), Peak(1.0, ""))
    assert empty.achieved == empty.utilisation() == 0.0
