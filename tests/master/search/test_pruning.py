"""Points that cannot be trained, told before they are launched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zero_trial.master.search.pruning import ds_config_file, reason

BASE: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 1}}


def why(
    ds_config: Any = None,
    *,
    base: Any = BASE,
    slots: int = 2,
    files: dict[str, bytes] | None = None,
    searcher: dict[str, Any] | None = None,
    entrypoint: str = "python3 -m zero_trial.run model_def:T",
    **hparams: Any,
) -> str | None:
    config = {
        "entrypoint": entrypoint,
        "data": {"ds_config": base},
        "resources": {"slots_per_trial": slots},
        "searcher": searcher or {"name": "random"},
    }
    overlay = {} if ds_config is None else {"ds_config": ds_config}
    return reason(config, {**overlay, **hparams}, files or {})


def test_an_example():
    assert why({"zero_optimization": {"stage": 2}}, global_batch_size=16) is None
    found = why({"train_micro_batch_size_per_gpu": 16}, global_batch_size=16)
    assert found is not None and found.startswith("train_batch_size 16 ≠ micro 16 × accumulation 1 × ranks 2 = 32.")


@pytest.mark.parametrize(
    ("leaves", "hparams", "part"),
    [
        ({"train_batch_size": 7}, {}, "7"),
        ({"train_batch_size": 32}, {"global_batch_size": 16}, "contradicts hyperparameter global_batch_size"),
        ({"zero_optimization": {"stage": 4}}, {"global_batch_size": 16}, "zero_optimization.stage"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {"global_batch_size": 16}, "bf16"),
        ({"zero_optimisation": {"stage": 1}}, {"global_batch_size": 16}, 'Did you mean "zero_optimization"?'),
        ({"optimizer": {"params": {"lr": "fast"}}}, {"global_batch_size": 16}, "optimizer.params.lr"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.022}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}},
            },
            {"global_batch_size": 16},
            "the learning rate has no effect: the scheduler WarmupLR sets it",
        ),
        ({"optimizer": 3}, {"global_batch_size": 16}, "hyperparameters.ds_config"),
        ({"mesh": {"pipe": 3}}, {"global_batch_size": 16}, "mesh"),
        ({}, {"global_batch_size": 3}, "3"),
        ({}, {"global_batch_size": 16, "data_parallel_world_size": 4}, "data_parallel_world_size"),
    ],
)
def test_what_cannot_be_reconciled(leaves: dict[str, Any], hparams: dict[str, Any], part: str):
    found = why(leaves, **hparams)
    assert found is not None and part in found and "\n" not in found


def test_several_faults_are_one_line():
    found = why({"nonsense": 1, "zero_optimization": {"stage": 9}})
    assert found is not None and "nonsense" in found and "; " in found and "\n" not in found


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_slots(slots: int):
    """No slots are one process on the CPU."""
    ranks = max(slots, 1)
    assert why({"train_batch_size": 4 * ranks, "train_micro_batch_size_per_gpu": 4}, slots=slots) is None
    assert why({"train_batch_size": 5 * ranks, "train_micro_batch_size_per_gpu": 4}, slots=slots) is not None


def test_the_base_is_a_file_of_the_context():
    files = {"conf/ds.json": json.dumps(BASE).encode(), "ds.yaml": b"zero_optimization: {stage: 1}\n"}
    assert why({"train_batch_size": 4}, base="conf/ds.json", files=files) is None
    assert why({"train_batch_size": 4}, base="./conf/ds.json", files=files) is None
    assert why({"train_batch_size": 4}, base="ds.yaml", files=files) is None
    assert why({"train_batch_size": 3}, base="conf/ds.json", files=files) is not None


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"{", "ds.json"), (b"\xff", "ds.json: cannot be read"), (b'{"a": 1, "a": 2}', "duplicate key")],
)
def test_a_file_that_is_no_json(content: bytes, part: str):
    found = why({"train_batch_size": 4}, base="ds.json", files={"ds.json": content})
    assert found is not None and part in found


def test_the_trials_own_ways_to_name_a_base():
    assert why(base=None, deepspeed_config=BASE, global_batch_size=16) is None
    assert why(base=None, deepspeed_config={**BASE, "train_batch_size": 3}) is not None
    files = {"ds.json": json.dumps({**BASE, "train_batch_size": 3}).encode()}
    assert why("ds.json", base=None, files=files) is not None
    assert why({"train_batch_size": 3}, base=None) is not None  # leaves alone are a ds_config too


@pytest.mark.parametrize(
    ("changes"),
    [
        {"base": None},
        {"base": "not-here.json", "ds_config": {"train_batch_size": 3}},
        {"entrypoint": "python3 -m determined.launch.deepspeed x.py", "ds_config": {"train_batch_size": 3}},
        {"entrypoint": "python3 -m zero_trial.as_deepspeed x.py", "base": {**BASE, "gradient_clipping": "auto"}},
    ],
)
def test_what_cannot_be_known_is_not_pruned(changes: dict[str, Any]):
    assert why(**changes) is None


@pytest.mark.parametrize(
    "searcher",
    [
        {"name": "random", "max_length": {"batches": 70}},
        {"name": "adaptive_asha", "max_time": 70, "time_metric": "batches", "max_length": None},
    ],
)
def test_auto_is_filled_from_the_runs_length(searcher: dict[str, Any]):
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 5}}
    base = {**BASE, "scheduler": schedule, "train_batch_size": 4}
    assert why(base=base, searcher=searcher) is None
    found = why(base=base)
    assert found is not None and "total_num_steps" in found


def test_ds_config_file():
    assert ds_config_file({"data": {"ds_config": "a.json"}}, {}) == "a.json"
    assert ds_config_file({"data": {"ds_config": {}}}, {}) is None
    assert ds_config_file({"data": None}, {"deepspeed_config": "b.json"}) == "b.json"
    assert ds_config_file({}, {}) is None


def test_a_preset_counts():
    assert why(trainer="zero_3_offload", global_batch_size=16) is None
    assert why(base="zero_2", global_batch_size=16) is None
    assert ds_config_file({"data": {"ds_config": "zero_2"}}, {}) is None
    found = why(trainer="zero_4", global_batch_size=16)
    assert found is not None and "hyperparameters.trainer" in found
