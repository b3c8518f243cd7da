"""The parameters of optimizers and schedulers by name, as far as they are known without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.schema.types import AnyOf, Bool, Float, Int, Numbers, Opaque, Text, Type
from zero_trial.util.text import did_you_mean


@dataclass(frozen=True)
class Param:
    """One keyword argument; ``default`` is DeepSpeed 0.19.8's, and ``required`` means that there is
    none. ``only``: why no other value than the default can be had.
    """

    type: Type
    default: Any = None
    required: bool = False
    only: str = ""


@dataclass(frozen=True)
class KnownParams:
    """An optimizer or a scheduler by its canonical name."""

    name: str
    params: Mapping[str, Param]


_LR = Param(Float(low=0), 0.001)
_BETAS = Param(Numbers(2, 0.0, 1.0), (0.9, 0.999))
_EPS = Param(Float(low=0), 1e-8)
_DECAY = Param(Float(low=0), 0.0)
_FLAG = Param(Bool(), False)

# Arguments of torch's own classes that are passed through.
_TORCH = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), _FLAG) | {
    name: Param(Bool()) for name in ("foreach", "fused")
}
_MOMENTS = {
    "lr": _LR,
    "betas": _BETAS,
    "eps": _EPS,
    "weight_decay": _DECAY,
    "bias_correction": Param(Bool(), True),
}
_ADAM = {
    **_MOMENTS,
    "adam_w_mode": Param(Bool(), True),
    "torch_adam": _FLAG,
    "set_grad_none": Param(Bool(), True),
    "fp32_optimizer_states": Param(Bool(), True),
    **_TORCH,
}
_LAMB = {
    **_MOMENTS,
    "max_coeff": Param(Float(above=0), 10.0),
    "min_coeff": Param(Float(low=0), 0.01),
    "eps_inside_sqrt": Param(Bool(), False, only="eps is added outside the square root"),
    "amsgrad": Param(Bool(), False, only="LAMB has no AMSGrad form"),
}
# Of DeepSpeed's 1-bit optimizers, beside those of the optimizer that they compress.
COMPRESSION = dict.fromkeys((
    "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min",
    "factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler",
    "local_step_clipper", "pipeline_enable",
), Param(Opaque()))  # fmt: skip
_ADAGRAD = {
    "lr": Param(Float(low=0), 0.01),
    "lr_decay": Param(Float(low=0), 0.0),
    "weight_decay": _DECAY,
    "initial_accumulator_value": Param(Float(low=0), 0.0),
    "eps": Param(Float(low=0), 1e-10),
    **_TORCH,
}
_LION = {
    "lr": Param(Float(low=0), 0.0001),
    "betas": Param(Numbers(2, 0.0, 1.0), (0.9, 0.99)),
    "weight_decay": _DECAY,
    "set_grad_none": Param(Bool(), True),
}


_MUON = {
    "lr": Param(Float(low=0)),
    "muon_lr": Param(Float(low=0), 0.02),
    "adam_lr": Param(Float(low=0), 3e-4),
    "momentum": Param(Float(low=0), 0.95),
    "weight_decay": _DECAY,
    "betas": Param(Numbers(2, 0.0, 1.0), (0.9, 0.95)),
    "eps": Param(Float(low=0), 1e-10),
    "ns_method": Param(Text(("standard", "gram")), "gram"),
    "nesterov": Param(Bool(), True),
    "ns_steps": Param(Int(1, 99), 5),
    "ns_coefficients": Param(Numbers(3)),
}


def _by_lower_name(*named: KnownParams) -> Mapping[str, KnownParams]:
    return MappingProxyType({item.name.lower(): item for item in named})


# Names that are read in any case. Every other name is a class of torch.optim in exact case, and
# torch checks its arguments.
OPTIMIZERS = _by_lower_name(
    KnownParams("Adam", _ADAM),
    KnownParams("AdamW", _ADAM),
    KnownParams("Lamb", _LAMB),
    KnownParams("Adagrad", _ADAGRAD),
    KnownParams("Lion", _LION),
    KnownParams("Muon", _MUON),
    KnownParams("OneBitAdam", _ADAM | COMPRESSION),
    KnownParams("ZeroOneAdam", _ADAM | COMPRESSION),
    KnownParams("OneBitLamb", _LAMB | COMPRESSION),
)
ONE_BIT = {"OneBitAdam": "AdamW", "ZeroOneAdam": "AdamW", "OneBitLamb": "Lamb"}
_MUP = "it needs the shapes that the mup package keeps; build it with mup and pass it to initialize"
REFUSED_OPTIMIZERS = {
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
    "LBFGS": "it calls the model several times per step, which a step after backward cannot do",
    "SparseAdam": "it works on sparse gradients, and gradients here are dense",
}
TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip

_RATE = AnyOf((Float(low=0), Numbers(low=0.0, below=float("inf"))))
_LAST = Param(Int(-1), -1)
_WARMUP = {
    "warmup_min_lr": Param(_RATE, 0.0),
    "warmup_max_lr": Param(_RATE, None),
    "warmup_num_steps": Param(Int(0), 1000),
    "warmup_type": Param(Text(("log", "linear")), "log"),
    "last_batch_iteration": _LAST,
}
SCHEDULERS = _by_lower_name(
    KnownParams("WarmupLR", _WARMUP),
    KnownParams(
        "WarmupDecayLR",
        _WARMUP | {"warmup_max_lr": Param(_RATE, 0.001), "total_num_steps": Param(Int(1), required=True)},
    ),
    KnownParams(
        "WarmupCosineLR",
        {
            "total_num_steps": Param(Int(1), required=True),
            "warmup_min_ratio": Param(Float(low=0), 0.0),
            "warmup_num_steps": Param(Int(0), 1000),
            "cos_min_ratio": Param(Float(low=0), 0.0001),
            "warmup_type": Param(Text(("log", "linear")), "log"),
            "last_batch_iteration": _LAST,
        },
    ),
    KnownParams(
        "OneCycle",
        {
            "cycle_min_lr": Param(_RATE, required=True),
            "cycle_max_lr": Param(_RATE, required=True),
            "decay_lr_rate": Param(Float(low=0), 0.0),
            "cycle_first_step_size": Param(Int(1), 2000),
            "cycle_second_step_size": Param(Int(0)),
            "cycle_first_stair_count": Param(Int(0), 0),
            "cycle_second_stair_count": Param(Int(0)),
            "decay_step_size": Param(Int(0), 0),
            "cycle_momentum": Param(Bool(), True),
            "cycle_min_mom": Param(_RATE, 0.8),
            "cycle_max_mom": Param(_RATE, 0.9),
            "decay_mom_rate": Param(Float(low=0), 0.0),
            "last_batch_iteration": _LAST,
        },
    ),
    KnownParams(
        "LRRangeTest",
        {
            "lr_range_test_min_lr": Param(_RATE, 0.001),
            "lr_range_test_step_size": Param(Int(1), 2000),
            "lr_range_test_step_rate": Param(Float(low=0), 1.0),
            "lr_range_test_staircase": _FLAG,
            "last_batch_iteration": _LAST,
        },
    ),
)
TORCH_SCHEDULERS = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR",
    "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip


def unknown_parameters(name: str, where: str, given: Iterable[str], known: Collection[str]) -> list[ConfigError]:
    """Return an error for each parameter that ``name``, an optimizer or a scheduler, does not
    have."""
    return [
        ConfigError(
            f"{name} has no parameter {key!r}",
            where=f"{where}.{key}",
            expected=", ".join(known),
            fix=did_you_mean(key, known),
        )
        for key in given
        if key not in known
    ]
