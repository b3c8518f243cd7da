"""A profile as text."""

from __future__ import annotations

import pytest

from zero_trial.engine.flop_count import Peak
from zero_trial.engine.profile import ModelProfile, ModuleRow, render, shorten

PROFILE = ModelProfile(
    rows=(
        ModuleRow("", "Net", 1000, 3_000_000, 6_000_000, 2.5),
        ModuleRow("body", "ModuleList", 900, 2_000_000, 4_000_000, None),
        ModuleRow("body.0", "Block", 900, 2_000_000, 4_000_000, 1.5),
        ModuleRow("head", "Linear", 100, 1_000_000, 2_000_000, 0.5),
    ),
    parameters=1000,
    forward_flops=3_000_000,
    backward_flops=6_000_000,
    forward_ms=3.0,
    backward_ms=6.0,
    peak=Peak(4e9, "made up"),
)


def test_the_whole_report():
    assert render(PROFILE, title="FLOPs profile of rank 0") == (
        "FLOPs profile of rank 0\n"
        "  parameters   1,000\n"
        "  forward      3 MFLOP in 3.000 ms: 1 GFLOP/s\n"
        "  backward     6 MFLOP in 6.000 ms: 1 GFLOP/s\n"
        "  achieved     1 GFLOP/s\n"
        "  MFU          25.0% of 4 GFLOP/s (made up)\n"
        "  Matrix products, convolutions and attention are counted, a multiply-add as two.\n"
        "  heaviest kinds of modules (top 1 per depth; operations of forward and backward, parameters, ms of forward):\n"
        "    depth 0: Net x 1: 9 MFLOP, 1,000, 2.500 ms\n"
        "    depth 1: ModuleList x 1: 6 MFLOP, 900, 0.000 ms\n"
        "    depth 2: Block x 1: 6 MFLOP, 900, 1.500 ms\n"
        "    module              parameters  forward  backward   share     ms\n"
        "    Net                      1,000  3 MFLOP   6 MFLOP  100.0%  2.500\n"
        "      body: ModuleList         900  2 MFLOP   4 MFLOP   66.7%      -\n"
        "        0: Block               900  2 MFLOP   4 MFLOP   66.7%  1.500\n"
        "      head: Linear             100  1 MFLOP   2 MFLOP   33.3%  0.500"
    )


def test_top_modules_depth_and_detail():
    text = render(PROFILE, title="t", top_modules=2, module_depth=1, detailed=False)
    assert "depth 1: ModuleList" in text and "depth 1: Linear x 1: 3 MFLOP" in text
    assert "depth 2" not in text and "head: Linear" not in text
    assert "depth 1" not in render(PROFILE, title="t", module_depth=0, detailed=False)


def test_recomputation_is_taken_off():
    text = render(PROFILE, title="t", recompute_fwd_factor=1.0)
    assert "without recomputation (1 of forward)   6 MFLOP" in text
    assert "MFU          16.7% of 4 GFLOP/s" in text


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0, "FLOP", "0 FLOP"),
        (999, "FLOP", "999 FLOP"),
        (1234, "FLOP", "1.234 kFLOP"),
        (5e12, "FLOP/s", "5 TFLOP/s"),
        (2e6, "", "2 M"),
    ],
)
def test_short_numbers(number: float, unit: str, text: str):
    assert shorten(number, unit) == text
