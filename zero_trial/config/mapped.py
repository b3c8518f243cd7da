"""Spellings that DeepSpeed has left behind, and what they mean in the present ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Assignments = list[tuple[str, Any]]

_CPU = {"device": "cpu"}


def translate(path: str, value: Any) -> Assignments:
    """The (dotted path, value) pairs that stand for a mapped key with a checked value; none where it asks for nothing."""
    if path == "zero_optimization.stage3_gather_fp16_weights_on_model_save":
        return [("zero_optimization.gather_16bit_weights_on_model_save", value)]
    if path == "pipeline.stages":
        return [("mesh.pipe", value)] if isinstance(value, int) else []
    if value is not True:
        return []
    if path == "zero_optimization.cpu_offload":
        return [("zero_optimization.offload_optimizer", dict(_CPU))]
    if path in ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"):
        return [("zero_optimization.offload_param", dict(_CPU))]
    if path == "fp32_allreduce":
        return [("communication_data_type", "fp32")]
    return []


def translate_amp(amp: Mapping[str, Any]) -> Assignments:
    """apex's levels: O1 is autocast with fp16, O2 and O3 are fp16 parameters, O0 is fp32. An "auto" switch is off, as there is no apex."""
    if amp.get("enabled") is not True or amp.get("opt_level", "O1") == "O0":
        return []
    if amp.get("opt_level", "O1") in ("O1", "auto"):
        return [("torch_autocast", {"enabled": True, "dtype": "fp16"})]
    found: Assignments = [("fp16.enabled", True)]
    if isinstance(amp.get("loss_scale"), int | float):
        found.append(("fp16.loss_scale", amp["loss_scale"]))
    if "min_loss_scale" in amp:
        found.append(("fp16.min_loss_scale", amp["min_loss_scale"]))
    return found
