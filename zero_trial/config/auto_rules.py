"""Where the value of a key comes from when it is left to zero_trial: names of hyperparameters, and formulas of the model's size.

The names are those of Hugging Face's TrainingArguments and the short ones that trials use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.config.document import Document

AUTO = "auto"
Hints = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A value for a key, and what it was made from."""

    value: Any
    source: str


@dataclass(frozen=True)
class AutoRule:
    """``names``: hyperparameters, the first that exists is taken. ``compute``: otherwise, from the hints and the document.

    ``derived``: without a source the key is left out, because another part of the house derives it. ``fill``: the hyperparameter is also
    taken where ds_config says nothing, and a different number in ds_config is a contradiction.
    """

    names: tuple[str, ...] = ()
    compute: Callable[[Hints, Document], Found | None] | None = None
    derived: bool = False
    fill: bool = False


def _betas(hints: Hints, _: Document) -> Found | None:
    if "adam_beta1" in hints and "adam_beta2" in hints:
        return Found([hints["adam_beta1"], hints["adam_beta2"]], "hyperparameters adam_beta1, adam_beta2")
    return None


def _peak_lr(hints: Hints, document: Document) -> Found | None:
    found = named(hints, _LR)
    lr = document.get(("optimizer", "params", "lr"))
    return found or (None if lr in (None, AUTO) else Found(lr, "optimizer.params.lr"))


def _warmup_steps(hints: Hints, _: Document) -> Found | None:
    total = named(hints, _TOTAL)
    if total is not None and "warmup_ratio" in hints:
        steps = math.ceil(total.value * hints["warmup_ratio"])
        return Found(steps, f"hyperparameter warmup_ratio of {total.value} steps")
    return None


def _by_hidden(describe: str, formula: Callable[[int], int]) -> Callable[[Hints, Document], Found | None]:
    def compute(hints: Hints, _: Document) -> Found | None:
        hidden = named(hints, _HIDDEN)
        if hidden is None:
            return None
        size = max(hidden.value) if isinstance(hidden.value, list | tuple) else hidden.value
        return Found(formula(int(size)), f"{describe}, hidden size {size}")

    return compute


_LR = ("lr", "learning_rate")
_TOTAL = ("total_num_steps", "num_training_steps", "max_steps")
_HIDDEN = ("hidden_size", "hidden_sizes", "d_model", "n_embd")
_Z = "zero_optimization"

RULES: Mapping[str, AutoRule] = {
    "train_batch_size": AutoRule(("global_batch_size", "train_batch_size"), derived=True, fill=True),
    "train_micro_batch_size_per_gpu": AutoRule(
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "micro_batch_size"), derived=True, fill=True
    ),
    "gradient_accumulation_steps": AutoRule(("gradient_accumulation_steps",), derived=True, fill=True),
    "gradient_clipping": AutoRule(("gradient_clipping", "max_grad_norm"), fill=True),
    "optimizer.params.lr": AutoRule(_LR, fill=True),
    "optimizer.params.weight_decay": AutoRule(("weight_decay",), fill=True),
    "optimizer.params.betas": AutoRule(("betas",), _betas),
    "optimizer.params.eps": AutoRule(("eps", "adam_epsilon")),
    "optimizer.params.momentum": AutoRule(("momentum",)),
    "scheduler.params.warmup_min_lr": AutoRule(("warmup_min_lr",), lambda hints, document: Found(0.0, "always 0")),
    "scheduler.params.warmup_max_lr": AutoRule(("warmup_max_lr",), _peak_lr),
    "scheduler.params.warmup_num_steps": AutoRule(("warmup_num_steps", "warmup_steps"), _warmup_steps),
    "scheduler.params.total_num_steps": AutoRule(_TOTAL),
    "fp16.enabled": AutoRule(("fp16",), fill=True),
    "bf16.enabled": AutoRule(("bf16",), fill=True),
    f"{_Z}.stage": AutoRule(("zero_stage",), fill=True),
    f"{_Z}.reduce_bucket_size": AutoRule((), _by_hidden("hidden²", lambda hidden: hidden * hidden)),
    f"{_Z}.prefetch_bucket_size": AutoRule((), _by_hidden("0.9 × hidden²", lambda hidden: int(0.9 * hidden * hidden))),
    f"{_Z}.param_persistence_threshold": AutoRule((), _by_hidden("10 × hidden", lambda hidden: 10 * hidden)),
    f"{_Z}.gather_16bit_weights_on_model_save": AutoRule(("zero3_save_16bit_model",)),
}


def hint_names() -> tuple[str, ...]:
    """Every name under which a value for "auto" is looked for."""
    listed = [name for rule in RULES.values() for name in rule.names]
    return tuple(dict.fromkeys([*listed, "adam_beta1", "adam_beta2", "warmup_ratio", *_HIDDEN]))


def named(hints: Hints, names: tuple[str, ...]) -> Found | None:
    """The first of ``names`` that the hints hold with a value."""
    for name in names:
        if hints.get(name) is not None and hints[name] != AUTO:
            return Found(hints[name], f"hyperparameter {name}")
    return None
