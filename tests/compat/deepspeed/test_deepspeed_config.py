"""DeepSpeed's names for sections of ds_config and for builders of ops."""

from __future__ import annotations

import sys

import pytest

from zero_trial.compat.deepspeed import deepspeed_config
from zero_trial.compat.deepspeed.deepspeed_config import (
    COMPATIBLE_OPS,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from zero_trial.errors import ConfigError


def test_a_class_of_a_section_reads_it_and_knows_it() -> None:
    found = DeepSpeedZeroConfig(
        stage=3, stage3_prefetch_bucket_size=7, offload_param={"device": "cpu"}, cpu_offload=True
    )
    assert (found.stage, found.prefetch_bucket_size) == (3, 7)
    assert found == DeepSpeedZeroConfig(stage=3, prefetch_bucket_size=7, cpu_offload_param=True, cpu_offload=True)
    assert isinstance(found, DeepSpeedZeroConfig) and not isinstance(found.offload_param, DeepSpeedZeroConfig)
    assert isinstance(found.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(found.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)


def test_a_wrong_value_in_a_section_is_the_error_that_the_program_can_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError, match=r"zero_optimization\.stage"):
        DeepSpeedZeroConfig(stage=4)
    monkeypatch.delitem(sys.modules, "pydantic_core")
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        DeepSpeedZeroConfig(stage=4)


def test_a_builder_says_that_its_op_is_there() -> None:
    builder = deepspeed_config.CPUAdamBuilder()
    assert COMPATIBLE_OPS[builder.NAME] and builder.is_compatible()
    with pytest.raises(ConfigError, match="CPUAdamBuilder"):
        builder.load()
    with pytest.raises(AttributeError):
        deepspeed_config.QuantizerBuilder  # noqa: B018
