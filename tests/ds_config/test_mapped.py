"""Old spellings and what they become."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.canonical import translate, translate_amp


@pytest.mark.parametrize(
    ("path", "value", "becomes"),
    [
        ("zero_optimization.cpu_offload", True, [("zero_optimization.offload_optimizer", {"device": "cpu"})]),
        ("zero_optimization.cpu_offload", False, []),
        ("zero_optimization.cpu_offload", None, []),
        ("zero_optimization.cpu_offload_param", True, [("zero_optimization.offload_param", {"device": "cpu"})]),
        ("zero_optimization.cpu_offload_params", True, [("zero_optimization.offload_param", {"device": "cpu"})]),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            False,
            [("zero_optimization.gather_16bit_weights_on_model_save", False)],
        ),
        ("fp32_allreduce", True, [("communication_data_type", "fp32")]),
        ("fp32_allreduce", False, []),
        ("something_else", True, []),
    ],
)
def test_translate(path: str, value: Any, becomes: list[tuple[str, Any]]):
    assert translate(path, value) == becomes


@pytest.mark.parametrize(
    ("amp", "becomes"),
    [
        ({"enabled": False, "opt_level": "O2"}, []),
        ({"opt_level": "O2"}, []),
        ({"enabled": True, "opt_level": "O0"}, []),
        ({"enabled": True}, [("torch_autocast", {"enabled": True, "dtype": "fp16"})]),
        ({"enabled": True, "opt_level": "O2"}, [("fp16.enabled", True)]),
        ({"enabled": True, "opt_level": "O3", "loss_scale": "dynamic"}, [("fp16.enabled", True)]),
        (
            {"enabled": True, "opt_level": "O2", "loss_scale": 64.0, "min_loss_scale": 2.0},
            [("fp16.enabled", True), ("fp16.loss_scale", 64.0), ("fp16.min_loss_scale", 2.0)],
        ),
    ],
)
def test_amp(amp: dict[str, Any], becomes: list[tuple[str, Any]]):
    assert translate_amp(amp) == becomes
