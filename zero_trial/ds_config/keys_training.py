"""Rows of the table for what is trained and in which precision: batch, optimizer, scheduler, clipping, dtypes, gradients."""

from __future__ import annotations

from zero_trial.ds_config.key import Key, Origin, Support
from zero_trial.schema.types import AnyOf, Bool, DType, Float, Int, Names, Opaque, Section, Text

HONOURED, NO_EFFECT, NOT_YET, REFUSED = Support.HONOURED, Support.NO_EFFECT, Support.NOT_YET, Support.REFUSED

_FP32_MASTERS = "the master weights and the accumulated gradients are fp32"

BATCH = (
    Key(
        "train_batch_size",
        Int(1),
        HONOURED,
        "samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel ranks",
    ),
    Key("train_micro_batch_size_per_gpu", Int(1), HONOURED, "samples of one forward pass on one rank, on any device"),
    Key("gradient_accumulation_steps", Int(1), HONOURED, "forward and backward passes for one optimizer step"),
)

OPTIMIZER = (
    Key("optimizer", Section(), HONOURED, "a client optimizer passed to initialize wins over it"),
    Key(
        "optimizer.type",
        Text(),
        HONOURED,
        "Adam, AdamW, Lamb, Adagrad, Lion, SGD in any case; otherwise a class of torch.optim in exact case. "
        "Adam means decoupled weight decay, as in DeepSpeed, unless params.adam_w_mode is false",
        required=True,
    ),
    Key(
        "optimizer.params",
        Opaque(),
        HONOURED,
        "keyword arguments of the optimizer; see the parameters by name below",
        default={},
    ),
    Key("optimizer.legacy_fusion", Bool(), NO_EFFECT, "there is one fused update", default=False, origin=Origin.LEGACY),
    Key(
        "scheduler",
        Section(),
        HONOURED,
        "stepped once per optimizer step, not on skipped ones; a client scheduler wins over it",
    ),
    Key(
        "scheduler.type",
        Text(),
        HONOURED,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler",
        required=True,
    ),
    Key(
        "scheduler.params",
        Opaque(),
        HONOURED,
        "keyword arguments of the scheduler; see the parameters by name below",
        default={},
    ),
    Key(
        "gradient_clipping",
        Float(low=0),
        HONOURED,
        "largest global L2 norm of the gradient over all parameters; 0 switches it off",
        was="0.0",
    ),
    Key(
        "zero_allow_untested_optimizer",
        Bool(),
        NO_EFFECT,
        "every optimizer that works element by element is sharded; none is called untested",
    ),
    Key("zero_force_ds_cpu_optimizer", Bool(), NO_EFFECT, "any elementwise optimizer can be offloaded"),
)

PRECISION = (
    Key("fp16", Section(), HONOURED, "half-precision parameters with loss scaling and fp32 master weights"),
    Key("fp16.enabled", Bool(), HONOURED, "switches fp16 on"),
    Key(
        "fp16.auto_cast",
        Bool(),
        REFUSED,
        "inputs are not cast to fp16 for you yet",
        instead="Set it to false and cast floating inputs in the model's forward.",
    ),
    Key("fp16.loss_scale", Float(low=0), HONOURED, "a fixed loss scale; 0 means dynamic"),
    Key("fp16.initial_scale_power", Int(0, 126), HONOURED, "a dynamic scale starts at 2 to this power"),
    Key("fp16.loss_scale_window", Int(1, unit="steps"), HONOURED, "good steps before a dynamic scale doubles"),
    Key("fp16.hysteresis", Int(1), HONOURED, "overflows that are tolerated before a dynamic scale halves"),
    Key("fp16.consecutive_hysteresis", Bool(), HONOURED, "a good step refills the hysteresis"),
    Key("fp16.min_loss_scale", Float(above=0), HONOURED, "a dynamic scale does not fall below it"),
    Key(
        "fp16.fp16_master_weights_and_grads",
        Bool(),
        REFUSED,
        _FP32_MASTERS,
        instead="Remove the key.",
    ),
    Key("bf16", Section(), HONOURED, "bfloat16 parameters with fp32 master weights", aliases=("bfloat16",)),
    Key("bf16.enabled", Bool(), HONOURED, "switches bf16 on"),
    Key("bf16.immediate_grad_update", Bool(), NOT_YET, "gradients are always accumulated when they arrive"),
    Key(
        "bf16.check_grad_overflow",
        Bool(),
        HONOURED,
        "a step with a non-finite gradient is skipped on all ranks",
        was="false",
    ),
    Key("bf16.bf16_master_weights_and_grads", Bool(), REFUSED, _FP32_MASTERS, instead="Remove the key."),
    Key("bf16.bf16_optimizer_states", Bool(), REFUSED, "optimizer states are fp32", instead="Remove the key."),
    Key("torch_autocast", Section(), HONOURED, "the forward under torch.autocast, over fp32 parameters"),
    Key(
        "torch_autocast.enabled",
        Bool(),
        HONOURED,
        "engine(...) runs under torch.autocast; a loss outside of it does not",
    ),
    Key(
        "torch_autocast.dtype",
        DType(),
        HONOURED,
        "null means bf16; with fp16 the loss is scaled as the keys of fp16 say",
    ),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        Names(),
        NO_EFFECT,
        "torch.autocast chooses by operation; parameters cross the wire in fp32, gradients in communication_data_type",
    ),
    Key("data_types", Section(), HONOURED, "dtypes beside those of the precision mode"),
    Key(
        "data_types.grad_accum_dtype",
        DType(),
        HONOURED,
        "dtype in which gradients are summed over micro-batches; null means fp32 where masters are fp32",
    ),
    Key(
        "data_types.param_dtype",
        DType(),
        HONOURED,
        "checked: it must be the dtype of the precision mode (fp16, bf16 or fp32)",
    ),
    Key("data_types.buffer_dtype", DType(), HONOURED, "dtype of floating buffers; null means that of the parameters"),
    Key(
        "data_types.keep_in_fp32_modules",
        Names(also=("auto",)),
        REFUSED,
        "all parameters of an engine have one dtype",
        instead="Remove the key.",
    ),
)

GRADIENTS = (
    Key(
        "communication_data_type",
        DType(),
        HONOURED,
        "dtype of gradients on the wire; null means the dtype of the parameters",
    ),
    Key("prescale_gradients", Bool(), HONOURED, "gradients are divided before they are summed, not after"),
    Key(
        "gradient_predivide_factor",
        Float(above=0),
        HONOURED,
        "without prescale_gradients: gradients are divided by it before they are summed, and by the rest after",
    ),
    Key(
        "gradient_allreduce_op",
        Text(("mean", "sum")),
        HONOURED,
        "gradients are averaged or summed over the data-parallel ranks, at every ZeRO stage",
    ),
    Key(
        "managed_gradient_accumulation",
        Bool(),
        HONOURED,
        "false: every engine.step() is an update with all that backward has added since the last one. Pass "
        "scale_wrt_gas=False and average yourself; set_gradient_accumulation_boundary(True) before the last backward "
        "lets its communication overlap",
    ),
    Key(
        "fp32_allreduce",
        Bool(),
        Support.MAPPED,
        "gradients on the wire in fp32",
        default=False,
        becomes="communication_data_type",
        origin=Origin.LEGACY,
    ),
    Key(
        "sparse_gradients",
        Bool(),
        NO_EFFECT,
        "gradients of embeddings are reduced dense",
        default=False,
        origin=Origin.LEGACY,
    ),
    Key("seq_parallel_communication_data_type", DType(), NO_EFFECT, "sequence parallelism does not exist here yet"),
    Key(
        "amp",
        Section(),
        Support.MAPPED,
        "apex: opt_level O1 becomes torch_autocast, O2 and O3 become fp16, O0 is fp32",
        becomes="torch_autocast or fp16",
        origin=Origin.LEGACY,
    ),
    Key("amp.enabled", Bool(), Support.MAPPED, "see amp", default=False, becomes="fp16", origin=Origin.LEGACY),
    Key(
        "amp.opt_level",
        Text(("O0", "O1", "O2", "O3")),
        Support.MAPPED,
        "see amp",
        default="O1",
        becomes="fp16",
        origin=Origin.LEGACY,
    ),
    Key(
        "amp.loss_scale",
        AnyOf((Text(("dynamic",)), Float(low=0))),
        Support.MAPPED,
        "see amp",
        becomes="fp16.loss_scale",
        origin=Origin.LEGACY,
    ),
    Key(
        "amp.min_loss_scale",
        Float(above=0),
        Support.MAPPED,
        "see amp",
        becomes="fp16.min_loss_scale",
        origin=Origin.LEGACY,
    ),
    Key("amp.max_loss_scale", Float(above=0), NO_EFFECT, "a dynamic scale has no upper limit", origin=Origin.LEGACY),
    Key(
        "amp.keep_batchnorm_fp32",
        Opaque(),
        NO_EFFECT,
        "all parameters of an engine have one dtype",
        origin=Origin.LEGACY,
    ),
)

TRAINING = BATCH + OPTIMIZER + PRECISION + GRADIENTS
