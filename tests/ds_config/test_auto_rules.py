"""Rules of "auto": names and formulas."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.auto import RULES, AutoValue, named
from zero_trial.ds_config.table import TABLE
from zero_trial.schema.document import Document


def compute(path: str, hints: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    formula = RULES[path].compute
    assert formula is not None
    found = formula(hints, Document(config or {}))
    return found and found.value


@pytest.mark.parametrize("path", RULES)
def test_rules_are_for_known_keys(path: str):
    assert path in TABLE or path.rpartition(".")[0] in ("optimizer.params", "scheduler.params")


def test_the_first_name_with_a_value_counts():
    assert named({"b": 2, "c": 3}, ("a", "b", "c")) == AutoValue(2, "hyperparameter b")
    assert named({"a": None, "b": "auto"}, ("a", "b")) is None


@pytest.mark.parametrize(
    ("path", "hints", "value"),
    [
        ("zero_optimization.reduce_bucket_size", {"hidden_size": 64}, 4096),
        ("zero_optimization.prefetch_bucket_size", {"d_model": 64}, 3686),
        ("zero_optimization.param_persistence_threshold", {"hidden_sizes": [8, 64]}, 640),
        ("zero_optimization.reduce_bucket_size", {}, None),
        ("optimizer.params.betas", {"adam_beta1": 0.9, "adam_beta2": 0.95}, [0.9, 0.95]),
        ("optimizer.params.betas", {"adam_beta1": 0.9}, None),
        ("scheduler.params.warmup_min_lr", {}, 0.0),
        ("scheduler.params.warmup_max_lr", {"learning_rate": 0.1}, 0.1),
        ("scheduler.params.warmup_max_lr", {}, None),
        ("scheduler.params.warmup_num_steps", {"warmup_ratio": 0.1, "max_steps": 95}, 10),
        ("scheduler.params.warmup_num_steps", {"warmup_ratio": 0.1}, None),
    ],
)
def test_formulas(path: str, hints: dict[str, Any], value: Any):
    assert compute(path, hints) == value


def test_the_peak_lr_is_the_optimizers():
    assert compute("scheduler.params.warmup_max_lr", {}, {"optimizer": {"params": {"lr": 0.3}}}) == 0.3
    assert compute("scheduler.params.warmup_max_lr", {}, {"optimizer": {"params": {"lr": "auto"}}}) is None
