""" "auto" from the hyperparameters, the model and the mesh."""

from __future__ import annotations

from typing import Any

from zero_trial.ds_config.auto import contradictions, resolve_auto
from zero_trial.schema.document import Document

HF_FILE: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
        "gather_16bit_weights_on_model_save": "auto", "overlap_comm": "auto", "sub_group_size": "auto"},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-3,
    "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "weight_decay": 0.1, "warmup_ratio": 0.1,
    "num_training_steps": 95, "fp16": False, "bf16": True, "hidden_size": 64, "zero3_save_16bit_model": True,
}  # fmt: skip


def test_a_hugging_face_file_is_filled():
    document, faults = resolve_auto(Document.of(HF_FILE), ARGUMENTS)
    assert faults == []
    assert document.value == {
        "train_batch_size": None, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 95}},
        "fp16": {"enabled": False}, "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 4096, "prefetch_bucket_size": 3686, "param_persistence_threshold": 640,
            "gather_16bit_weights_on_model_save": True, "overlap_comm": None, "sub_group_size": None},
    }  # fmt: skip
    assert document.at(("optimizer", "params", "lr")).source() == "auto: hyperparameter learning_rate"
    assert document.at(("zero_optimization", "reduce_bucket_size")).source() == "auto: hidden², hidden size 64"
    assert document.at(("train_batch_size",)).source() == "auto: left to zero_trial"


def test_what_has_no_source_is_named_with_the_way_to_set_it():
    _, faults = resolve_auto(Document.of(HF_FILE), {})
    asked = {
        "gradient_clipping": ("a number", "max_grad_norm"),
        "optimizer.params.lr": ("a number", "learning_rate"),
        "optimizer.params.betas": ("two numbers, such as [0.9, 0.999]", "betas"),
        "optimizer.params.eps": ("a number", "adam_epsilon"),
        "optimizer.params.weight_decay": ("a number", "weight_decay"),
        "scheduler.params.warmup_max_lr": ("a number", "warmup_max_lr"),
        "scheduler.params.warmup_num_steps": ("a number", "warmup_steps"),
        "scheduler.params.total_num_steps": ("a number", "max_steps"),
        "fp16.enabled": ("true or false", "fp16"),
        "bf16.enabled": ("true or false", "bf16"),
    }
    assert [str(fault) for fault in faults] == [
        f'{key}: "auto" has no source. Set {what}, or the hyperparameter {name} in the trial, or args.{name} in a script.'
        for key, (what, name) in asked.items()
    ]


def test_a_stage_is_never_guessed():
    _, faults = resolve_auto(Document.of({"optimizer": {"type": "auto"}, "zero_optimization": {"stage": "auto"}}), {})
    assert "Set a string" in str(faults[0]) and "zero_stage" in str(faults[1])
    document, faults = resolve_auto(Document.of({"zero_optimization": {"stage": "auto"}}), {"zero_stage": 2})
    assert document.value == {"zero_optimization": {"stage": 2}} and not faults


def test_auto_stays_where_it_is_a_value_of_the_key():
    for value in (
        {"zero_optimization": {"reduce_every": "auto"}},
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {"autotuning": {"arg_mappings": {"x": "auto"}}},
    ):
        document, faults = resolve_auto(Document.of(value), {})
        assert document.value == value and not faults


def test_missing_keys_are_filled_only_on_request():
    hints = {"lr": 0.1, "global_batch_size": 8, "bf16": True, "max_grad_norm": 2.0}
    bare = Document.of({"optimizer": {"type": "SGD"}})
    assert resolve_auto(bare, hints)[0].value == bare.value
    filled = resolve_auto(bare, hints, fill=True)[0]
    assert filled.value == {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_batch_size": 8, "gradient_clipping": 2.0, "bf16": {"enabled": True}
    }  # fmt: skip
    assert filled.at(("train_batch_size",)).source() == "hyperparameter global_batch_size"
    assert "optimizer" not in resolve_auto(Document.of({}), hints, fill=True)[0].value


def test_contradictions():
    config = Document.of({"train_batch_size": 6, "optimizer": {"params": {"lr": 0.1}}, "gradient_clipping": "auto"})
    faults = contradictions(config, {"global_batch_size": 8, "lr": 0.1, "max_grad_norm": 3.0})
    assert [str(fault) for fault in faults] == [
        'train_batch_size: contradicts hyperparameter global_batch_size: got 6, expected 8. Set one of them, or write "auto" in ds_config.'
    ]
    assert contradictions(config, {}) == []
    assert (
        contradictions(Document.of({"train_batch_size": "x"}), {"global_batch_size": 8}) == []
    )  # the reader's fault to name
