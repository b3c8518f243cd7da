"""What kernels take, and what nobody could compute: said in words, the same as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.support.cuda_cases import STEPS
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import ConfigError
from zero_trial.ops import arguments, plain
from zero_trial.ops.dispatch import CUDA

ops = torch.ops.zero_trial
COLUMNS = [[x] for x in (1e-3, 0.9, 0.99, 1e-8, 0.1)]


def test_sizes_that_do_not_fit_are_refused(emulator: Emulator) -> None:
    five, four = torch.zeros(5), torch.zeros(4)
    with pytest.raises(ConfigError, match="different sizes"):
        CUDA["adam_"](five, four, five, five, None, None, *STEPS["adam_"](1, 1.0))
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["copy_many_"]([five], [five, five])
    with pytest.raises(ConfigError, match="number 1"):
        plain.same_sizes([five, five], [five, four])
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["adam_many_"]([five], [five], [five], [five], [], None, None, *COLUMNS, [1.0, 2.0], 1.0, True)
    with pytest.raises(ConfigError, match="different lengths"):
        CUDA["lamb_apply_"]([five], [five], [five], [], None, torch.ones(1), *COLUMNS, [1.0, 2.0], True)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan")])
def test_steps_of_adam_begin_with_the_first(emulator: Emulator, step: float) -> None:
    p, g, m, v = (torch.zeros(3) for _ in range(4))
    for each in (SimpleNamespace(**CUDA), ops):
        with pytest.raises(ConfigError, match="numbered from 1"):
            each.adam_(p, g, m, v, None, None, 1e-3, 0.9, 0.99, 1e-8, 0.1, step, 1.0, True)
        with pytest.raises(ConfigError, match="numbered from 1"):
            each.adam_many_([p], [g], [m], [v], [], None, None, *COLUMNS, [step], 1.0, True)


def test_a_parameter_in_a_graph_is_refused(emulator: Emulator) -> None:
    p = torch.zeros(3, requires_grad=True)
    g, m, v = (torch.zeros(3) for _ in range(3))
    calls: list[Callable[[], object]] = [
        lambda: CUDA["adam_"](p, g, m, v, None, None, *STEPS["adam_"](1, 1.0)),
        lambda: CUDA["adam_many_"]([p], [g], [m], [v], [], None, None, *COLUMNS, [1.0], 1.0, True),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="no derivative"):
            call()
        with torch.no_grad(), emulator.watching(p, g, m, v):
            call()


def test_nothing_to_do_is_no_launch(emulator: Emulator) -> None:
    emulator.library.forget()
    CUDA["lamb_apply_"]([], [], [], [], torch.zeros(1), torch.ones(0), [], [], [], [], [], [], True)
    assert CUDA["lamb_moments_"]([], [], [], [], None, None, [], [], [], [], [], 1.0, True).shape == (2, 0)
    CUDA["adam_many_"]([], [], [], [], [], torch.zeros(1), None, [], [], [], [], [], [], 1.0, True)
    assert emulator.library.launch_count() == 0


def test_arguments_fill_whole_words() -> None:
    assert [len(arguments.padded(bytes(n))) for n in (0, 1, 8, 20)] == [0, 8, 8, 24]


def test_lists_are_picked_from() -> None:
    assert arguments.pick([2, 0], "abc", [], [1, 2, 3]) == [["c", "a"], [], [3, 1]]
