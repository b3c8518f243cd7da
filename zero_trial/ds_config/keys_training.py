"""ds_config keys of training and precision: batch, optimizer, scheduler, clipping, dtypes,
gradients; and the parameters of optimizers and schedulers by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from zero_trial.ds_config.key import Origin, Support, mapped, no_effect, ours, refused, section, supported
from zero_trial.errors import ConfigError
from zero_trial.schema.types import AnyOf, Bool, DType, Float, Int, Names, Numbers, Opaque, Text, Type
from zero_trial.util.text import did_you_mean

_FP32_MASTERS = "the master weights and the accumulated gradients are fp32"


@dataclass(frozen=True)
class OptimizerSection:
    """``optimizer``: a name and its keyword arguments."""

    type: str = supported(
        None,
        Text(),
        "Adam, AdamW, Lamb, Adagrad, Lion, Muon, SGD in any case; otherwise a class of torch.optim in exact case. Adam means decoupled weight "
        "decay, as in DeepSpeed, unless params.adam_w_mode is false",
        required=True,
    )
    params: Mapping[str, Any] = supported(
        {}, Opaque(), "keyword arguments of the optimizer; see the parameters by name below"
    )


@dataclass(frozen=True)
class SchedulerSection:
    """``scheduler``: a name and its keyword arguments."""

    type: str = supported(
        None,
        Text(),
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler",
        required=True,
    )
    params: Mapping[str, Any] = supported(
        {}, Opaque(), "keyword arguments of the scheduler; see the parameters by name below"
    )


@dataclass(frozen=True)
class Fp16Section:
    """``fp16``: half precision with loss scaling; ``loss_scale`` 0 means dynamic."""

    enabled: bool = supported(False, Bool(), "enables fp16")
    auto_cast: bool = no_effect(False, Bool(), "floating inputs are always cast to the dtype of the parameters")
    loss_scale: float = supported(0.0, Float(low=0), "a fixed loss scale; 0 means dynamic")
    initial_scale_power: int = supported(16, Int(0, 126), "a dynamic scale starts at 2 to this power")
    loss_scale_window: int = supported(1000, Int(1, unit="steps"), "good steps before a dynamic scale doubles")
    hysteresis: int = supported(2, Int(1), "number of overflows that are tolerated before a dynamic scale halves")
    consecutive_hysteresis: bool = supported(False, Bool(), "a good step refills the hysteresis")
    min_loss_scale: float = supported(1.0, Float(above=0), "lower limit of a dynamic scale")
    fp16_master_weights_and_grads: bool = refused(False, Bool(), _FP32_MASTERS, instead="Remove the key.")


@dataclass(frozen=True)
class Bf16Section:
    """``bf16``: bfloat16 parameters with fp32 master weights."""

    enabled: bool = supported(False, Bool(), "enables bf16")
    check_grad_overflow: bool = supported(
        True, Bool(), "a step with a non-finite gradient is skipped on all ranks", was="false"
    )
    bf16_master_weights_and_grads: bool = refused(False, Bool(), _FP32_MASTERS, instead="Remove the key.")
    bf16_optimizer_states: bool = supported(
        False, Bool(), 'the same as data_types.optimizer_states "bf16"; masters stay fp32'
    )


@dataclass(frozen=True)
class TorchAutocastSection:
    """``torch_autocast``: forward and loss run under torch.autocast."""

    enabled: bool = supported(
        False, Bool(), "engine(...) runs under torch.autocast; a loss computed outside of it does not"
    )
    dtype: str | None = supported(
        None, DType(), "null means bf16; with fp16 the loss is scaled as set by the keys of fp16"
    )


@dataclass(frozen=True)
class DataTypesSection:
    """``data_types``: dtypes; ``None`` follows the precision mode."""

    grad_accum_dtype: str | None = supported(
        None, DType(), "dtype in which gradients are summed over micro-batches; null means fp32 if masters are fp32"
    )
    param_dtype: str | None = supported(
        None, DType(), "checked: it must be the dtype of the precision mode (fp16, bf16 or fp32)"
    )
    buffer_dtype: str | None = supported(
        None,
        DType(),
        "dtype of floating buffers; null means that of the parameters, and fp32 for fp32 buffers that are not saved",
    )
    keep_in_fp32_modules: tuple[str, ...] = supported(
        ("auto",),
        Names(("auto",)),
        "modules or parameters that stay fp32 in bf16 or fp16 training: whole components of dotted names, with * for any text. Names that a "
        "model of transformers lists itself (auto) always stay fp32",
    )
    optimizer_states: str | None = ours(
        None,
        Text(("fp32", "bf16", "8bit")),
        "how the optimizer's moments are stored, 4 or 2 bytes each; bf16 is rounded up or down at random. For Adam, "
        'AdamW, Lion, Adagrad and SGD with momentum; null means fp32. "8bit" is refused',
    )


@dataclass(frozen=True)
class EmaSection:
    """``ema``: an exponential moving average of the weights."""

    decay: float = ours(0.999, Float(above=0, high=1), "the decay d; with a warmup, the limit of d")
    update_after_step: int = ours(
        0, Int(0, unit="steps"), "up to this step and one more, the average equals the weights"
    )
    update_every: int = ours(1, Int(1, unit="steps"), "steps from one update of the average to the next")
    use_ema_warmup: bool = ours(False, Bool(), "d = min(decay, 1 - (1 + k / inv_gamma)^-power), as in diffusers")
    inv_gamma: float = ours(1.0, Float(above=0), "see use_ema_warmup")
    power: float = ours(2 / 3, Float(above=0), "see use_ema_warmup")
    evaluate: bool = ours(False, Bool(), "the validation of a ZeroTrial computes with the averages")


@dataclass(frozen=True)
class AmpSection:
    """``amp``: apex mixed precision, translated to torch_autocast or fp16."""

    enabled: ClassVar = mapped(False, Bool(), "see amp", becomes="fp16")
    opt_level: ClassVar = mapped("O1", Text(("O0", "O1", "O2", "O3")), "see amp", becomes="fp16")
    loss_scale: ClassVar = mapped(None, AnyOf((Text(("dynamic",)), Float(low=0))), "see amp", becomes="fp16.loss_scale")
    min_loss_scale: ClassVar = mapped(None, Float(above=0), "see amp", becomes="fp16.min_loss_scale")


@dataclass(frozen=True)
class TrainingKeys:
    """The keys of training and precision."""

    train_batch_size: int | None = supported(
        None, Int(1), "samples per optimizer step over all ranks: micro batch x accumulation x data-parallel ranks"
    )
    train_micro_batch_size_per_gpu: int | None = supported(
        None, Int(1), "samples per forward pass of one rank, on any device"
    )
    gradient_accumulation_steps: int | None = supported(None, Int(1), "forward and backward passes per optimizer step")
    optimizer: OptimizerSection | None = section(
        OptimizerSection, "an optimizer passed to initialize overrides it", optional=True
    )
    scheduler: SchedulerSection | None = section(
        SchedulerSection,
        "stepped once per optimizer step, but not on skipped steps; a scheduler passed to initialize overrides it",
        optional=True,
    )
    gradient_clipping: float = supported(
        1.0, Float(low=0), "maximum global L2 norm of the gradient over all parameters; 0 disables clipping", was="0.0"
    )
    zero_allow_untested_optimizer: bool = no_effect(
        False,
        AnyOf((Bool(), Int(0, 1))),
        "every optimizer that works element by element is sharded; none is considered untested",
    )
    zero_force_ds_cpu_optimizer: bool = no_effect(True, Bool(), "any elementwise optimizer can be offloaded")
    fp16: Fp16Section = section(Fp16Section, "half-precision parameters with loss scaling and fp32 master weights")
    bf16: Bf16Section = section(Bf16Section, "bfloat16 parameters with fp32 master weights", aliases=("bfloat16",))
    torch_autocast: TorchAutocastSection = section(
        TorchAutocastSection, "the forward under torch.autocast, over fp32 parameters"
    )
    data_types: DataTypesSection = section(DataTypesSection, "dtypes in addition to that of the precision mode")
    ema: EmaSection | None = section(
        EmaSection,
        "an exponential moving average of the weights, fp32, 4 bytes per parameter / shards. After applied step n, "
        "with k = floor((n - 1 - update_after_step) / update_every): the weights while k <= 0; when k grows, "
        "average += (1 - d) (weights - average). Read it with engine.ema_weights(), or export it with "
        "zero-trial ckpt export --ema",
        optional=True,
        origin=Origin.OURS,
    )
    communication_data_type: str | None = supported(
        None, DType(), "dtype of gradients on the wire; null means the dtype of the parameters"
    )
    prescale_gradients: bool = supported(False, Bool(), "gradients are divided before they are summed, not after")
    gradient_predivide_factor: float = supported(
        1.0,
        Float(above=0),
        "without prescale_gradients: gradients are divided by this factor before they are summed, and by the rest after",
    )
    gradient_allreduce_op: str = supported(
        "mean",
        Text(("mean", "sum")),
        "gradients are averaged or summed over the data-parallel ranks, at every ZeRO stage",
    )
    managed_gradient_accumulation: bool = supported(
        True,
        Bool(),
        "false: every engine.step() updates the weights with all that backward has accumulated since the last step. Pass scale_wrt_gas=False and "
        "average yourself; set_gradient_accumulation_boundary(True) before the last backward lets its communication overlap",
    )
    fp32_allreduce: ClassVar = mapped(False, Bool(), "gradients on the wire in fp32", becomes="communication_data_type")
    amp: ClassVar = section(
        AmpSection,
        "apex: opt_level O1 becomes torch_autocast, O2 and O3 become fp16, O0 is fp32",
        becomes="torch_autocast or fp16",
        origin=Origin.LEGACY,
        support=Support.MAPPED,
    )


# --- the parameters of optimizers and schedulers that are known without importing torch ---


@dataclass(frozen=True)
class Param:
    """One keyword argument with DeepSpeed 0.19.8's ``default``; if ``required``, it has no default.
    ``only``: why no value other than the default is possible."""

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

# Arguments that are passed through to torch's own classes.
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
    "amsgrad": Param(Bool(), False, only="LAMB has no AMSGrad variant"),
}
# Arguments that DeepSpeed's 1-bit optimizers add to those of the optimizer that they compress.
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


# Names that match in any case. Every other name must match a class of torch.optim in exact case,
# and torch checks its arguments.
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
_MUP = "it needs the shapes that the mup package records; build it with mup and pass it to initialize"
REFUSED_OPTIMIZERS = {
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
    "LBFGS": "it calls the model several times per step, which is impossible after backward",
    "SparseAdam": "it needs sparse gradients, but gradients here are dense",
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
    """Return an error for each parameter that the optimizer or scheduler ``name`` does not have."""
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
