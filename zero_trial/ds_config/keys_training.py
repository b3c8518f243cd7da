"""ds_config keys: what is trained and in which precision: batch, optimizer, scheduler, clipping,
dtypes, gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from zero_trial.ds_config.key import Origin, Support, mapped, no_effect, ours, refused, section, supported
from zero_trial.schema.types import AnyOf, Bool, DType, Float, Int, Opaque, Text

_FP32_MASTERS = "the master weights and the accumulated gradients are fp32"


@dataclass(frozen=True)
class OptimizerSection:
    """``optimizer``: a name and its keyword arguments."""

    type: str = supported(
        None,
        Text(),
        "Adam, AdamW, Lamb, Adagrad, Lion, Muon, SGD in any case; otherwise a class of "
        "torch.optim in exact case. Adam means decoupled weight decay, as in DeepSpeed, "
        "unless params.adam_w_mode is false",
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

    enabled: bool = supported(False, Bool(), "switches fp16 on")
    auto_cast: bool = no_effect(False, Bool(), "floating inputs are always cast to the dtype of the parameters")
    loss_scale: float = supported(0.0, Float(low=0), "a fixed loss scale; 0 means dynamic")
    initial_scale_power: int = supported(16, Int(0, 126), "a dynamic scale starts at 2 to this power")
    loss_scale_window: int = supported(1000, Int(1, unit="steps"), "good steps before a dynamic scale doubles")
    hysteresis: int = supported(2, Int(1), "overflows that are tolerated before a dynamic scale halves")
    consecutive_hysteresis: bool = supported(False, Bool(), "a good step refills the hysteresis")
    min_loss_scale: float = supported(1.0, Float(above=0), "a dynamic scale does not fall below it")
    fp16_master_weights_and_grads: bool = refused(False, Bool(), _FP32_MASTERS, instead="Remove the key.")


@dataclass(frozen=True)
class Bf16Section:
    """``bf16``: bfloat16 parameters with fp32 master weights."""

    enabled: bool = supported(False, Bool(), "switches bf16 on")
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

    enabled: bool = supported(False, Bool(), "engine(...) runs under torch.autocast; a loss outside of it does not")
    dtype: str | None = supported(
        None, DType(), "null means bf16; with fp16 the loss is scaled as the keys of fp16 say"
    )


@dataclass(frozen=True)
class DataTypesSection:
    """``data_types``: dtypes; ``None`` follows the precision mode."""

    grad_accum_dtype: str | None = supported(
        None, DType(), "dtype in which gradients are summed over micro-batches; null means fp32 where masters are fp32"
    )
    param_dtype: str | None = supported(
        None, DType(), "checked: it must be the dtype of the precision mode (fp16, bf16 or fp32)"
    )
    buffer_dtype: str | None = supported(
        None,
        DType(),
        "dtype of floating buffers; null means that of the parameters, and fp32 for fp32 buffers that are not saved",
    )
    optimizer_states: str | None = ours(
        None,
        Text(("fp32", "bf16", "8bit")),
        "how the optimizer's moments are stored, 4 or 2 bytes each; bf16 is rounded up or down at random. For Adam, "
        'AdamW, Lion, Adagrad and SGD with momentum; null means fp32. "8bit" is refused',
    )


@dataclass(frozen=True)
class EmaSection:
    """``ema``: an exponential moving average of the weights, beside the optimizer's moments."""

    decay: float = ours(0.999, Float(above=0, high=1), "d; with a warm-up, what d rises to")
    update_after_step: int = ours(0, Int(0, unit="steps"), "until then, and one step on, the average is the weights")
    update_every: int = ours(1, Int(1, unit="steps"), "steps from one update of the average to the next")
    use_ema_warmup: bool = ours(False, Bool(), "d = min(decay, 1 - (1 + k / inv_gamma)^-power), as in diffusers")
    inv_gamma: float = ours(1.0, Float(above=0), "see use_ema_warmup")
    power: float = ours(2 / 3, Float(above=0), "see use_ema_warmup")
    evaluate: bool = ours(False, Bool(), "the validation of a ZeroTrial computes with the averages")


@dataclass(frozen=True)
class AmpSection:
    """``amp``: apex mixed precision, read as torch_autocast or fp16."""

    enabled: ClassVar = mapped(False, Bool(), "see amp", becomes="fp16")
    opt_level: ClassVar = mapped("O1", Text(("O0", "O1", "O2", "O3")), "see amp", becomes="fp16")
    loss_scale: ClassVar = mapped(None, AnyOf((Text(("dynamic",)), Float(low=0))), "see amp", becomes="fp16.loss_scale")
    min_loss_scale: ClassVar = mapped(None, Float(above=0), "see amp", becomes="fp16.min_loss_scale")


@dataclass(frozen=True)
class TrainingKeys:
    """What is trained and in which precision."""

    train_batch_size: int | None = supported(
        None, Int(1), "samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel ranks"
    )
    train_micro_batch_size_per_gpu: int | None = supported(
        None, Int(1), "samples of one forward pass on one rank, on any device"
    )
    gradient_accumulation_steps: int | None = supported(
        None, Int(1), "forward and backward passes for one optimizer step"
    )
    optimizer: OptimizerSection | None = section(
        OptimizerSection, "a client optimizer passed to initialize wins over it", optional=True
    )
    scheduler: SchedulerSection | None = section(
        SchedulerSection,
        "stepped once per optimizer step, not on skipped ones; a client scheduler wins over it",
        optional=True,
    )
    gradient_clipping: float = supported(
        1.0, Float(low=0), "largest global L2 norm of the gradient over all parameters; 0 switches it off", was="0.0"
    )
    zero_allow_untested_optimizer: bool = no_effect(
        False,
        AnyOf((Bool(), Int(0, 1))),
        "every optimizer that works element by element is sharded; none is called untested",
    )
    zero_force_ds_cpu_optimizer: bool = no_effect(True, Bool(), "any elementwise optimizer can be offloaded")
    fp16: Fp16Section = section(Fp16Section, "half-precision parameters with loss scaling and fp32 master weights")
    bf16: Bf16Section = section(Bf16Section, "bfloat16 parameters with fp32 master weights", aliases=("bfloat16",))
    torch_autocast: TorchAutocastSection = section(
        TorchAutocastSection, "the forward under torch.autocast, over fp32 parameters"
    )
    data_types: DataTypesSection = section(DataTypesSection, "dtypes beside those of the precision mode")
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
        "without prescale_gradients: gradients are divided by it before they are summed, and by the rest after",
    )
    gradient_allreduce_op: str = supported(
        "mean",
        Text(("mean", "sum")),
        "gradients are averaged or summed over the data-parallel ranks, at every ZeRO stage",
    )
    managed_gradient_accumulation: bool = supported(
        True,
        Bool(),
        "false: every engine.step() is an update with all that backward has added since "
        "the last one. Pass scale_wrt_gas=False and average yourself; "
        "set_gradient_accumulation_boundary(True) before the last backward lets its "
        "communication overlap",
    )
    fp32_allreduce: ClassVar = mapped(False, Bool(), "gradients on the wire in fp32", becomes="communication_data_type")
    amp: ClassVar = section(
        AmpSection,
        "apex: opt_level O1 becomes torch_autocast, O2 and O3 become fp16, O0 is fp32",
        becomes="torch_autocast or fp16",
        origin=Origin.LEGACY,
        support=Support.MAPPED,
    )
