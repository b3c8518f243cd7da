"""DeepSpeed's features that zero_trial does not have: what to use instead.

A module stands for all of its submodules. Every other name that is not in the table is refused
with one sentence and the nearest name.
"""

from __future__ import annotations

from zero_trial.compat.finder import Refused

MOE = "experts are not split between ranks here; experts as plain modules train at every stage, as leaf modules at stage 3"
KERNELS = (
    "kernels are built when they are first needed; its optimizers are in deepspeed.ops.adam, lamb, lion and adagrad"
)
_SEQUENCE = "sequences are not split between ranks here; use activation checkpointing and a larger ZeRO stage"
_TENSOR_PARALLEL = (
    "there is no automatic tensor parallelism; give initialize(mpu=...) a model that is cut already, or use mesh.model"
)
_INFERENCE = "there is no inference engine; engine.generate() decodes with the model that is trained"
_CHECKPOINTS = (
    "checkpoints load on any number of ranks and at any stage as they are; `zero-trial ckpt import` reads DeepSpeed's"
)
_INSIDE = "it is a part of DeepSpeed's inside; initialize() builds the engine with all of its parts"

REFUSED_MODULES: dict[str, Refused] = {
    f"deepspeed.{module}": Refused(reason)
    for reason, modules in {
        "`zero-trial tune` is the autotuner: a command over an experiment": ["autotuning"],
        "there is no model compression": ["compression"],
        "models are compiled by engine.compile()": ["compile", "runtime.compiler"],
        _INFERENCE: [
            "inference",
            "init_inference",
            "InferenceEngine",
            "model_implementations",
            "runtime.hybrid_engine",
        ],
        _TENSOR_PARALLEL: ["module_inject", "tp_model_init", "runtime.tensor_parallel", "runtime.domino"],
        "there is no LoRA of its own; PEFT's adapters train at every stage": ["linear"],
        MOE: ["moe.layer", "moe.experts", "moe.sharded_moe", "moe.mappings"],
        "`zero-trial check` measures the path of offload_*.nvme_path": ["nvme"],
        _SEQUENCE: ["sequence", "runtime.sequence_parallel"],
        KERNELS: ["ops.transformer", "ops.fp_quantizer", "ops.quantizer", "ops.sparse_attention", "ops.gds"],
        "there is no curriculum and no token dropping; write a data loader or sampler": ["runtime.data_pipeline"],
        "states are offloaded by zero_optimization.offload_optimizer and offload_param": [
            *("runtime.swap_tensor", "runtime.zenflow", "runtime.superoffload"),
        ],
        _CHECKPOINTS: [
            *("checkpoint.ds_to_universal", "checkpoint.universal_checkpoint", "checkpoint.deepspeed_checkpoint"),
            *("checkpoint.zero_checkpoint", "runtime.checkpoint_engine", "runtime.state_dict_factory"),
        ],
        "torch.distributed is the only backend": ["comm.backend", "comm.ccl", "comm.torch", "runtime.comm"],
        "set fp16 in ds_config; engine.loss_scale is the scale of now": ["runtime.fp16.loss_scaler"],
        "set pipeline.schedule in ds_config to run another schedule": [
            "runtime.pipe.schedule",
            "runtime.pipe.dualpipev",
        ],
        "set wall_clock_breakdown in ds_config": ["utils.timer"],
        "`zero-trial launch --nnodes LEAST:MOST` is elastic": ["elasticity"],
        _INSIDE: ["runtime.zero.parameter_offload", "runtime.zero.partitioned_param_coordinator", "runtime.pipe.p2p"],
    }.items()
    for module in modules
}
"""Module or name -> why it and what is below it are refused, and what to do instead."""
