"""DeepSpeed's modules and names, and what ``import deepspeed`` gives for them here."""

from __future__ import annotations

import os

from zero_trial.errors import ConfigError
from zero_trial.stand_in.finder import StandIn, StandInFinder, Table, install

VERSION = "0.19.8"
"""The DeepSpeed whose names these are."""

VARIABLE = "ZERO_TRIAL_AS_DEEPSPEED"
"""Environment variable that installs the stand-in: 1, or "replace" where DeepSpeed is installed."""


def _at(place: str, *names: str) -> dict[str, str]:
    """Return names that are called the same in our module ``place``."""
    return {name: f"{place}:{name}" for name in names}


# --- names that stand in several modules ----------------------------------------------------------

_ENGINE = {
    "DeepSpeedEngine": "zero_trial.engine:Engine",
    "PipelineEngine": "zero_trial.engine.pipeline_engine:PipelineEngine",
}
_PIPE = _at("zero_trial.pipeline", "PipelineModule", "LayerSpec", "TiedLayerSpec")
_TOPOLOGY = {
    **_at("zero_trial.pipeline", "ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"),
    **_at("zero_trial.engine.compat", "PipelineParallelGrid"),
}
_ZERO = _at("zero_trial.zero", "Init", "GatheredParameters", "ZeroParamStatus", "register_external_parameter")
_FRAGMENTS = _at(
    "zero_trial.zero",
    *("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"),
    *("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state"),
    *("safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state"),
    *("safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state"),
    "safe_update_full_grad_vectorized",
)
_LEAVES = _at(
    "zero_trial.zero",
    *("set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter"),
    *("set_z3_leaf_module", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"),
)
_INIT = _at("zero_trial.comm", "init_distributed")
_CHECKPOINTING = _at("zero_trial.activation_checkpointing", "checkpoint", "configure", "is_configured", "reset")
_LOADERS = _at("zero_trial.engine", "RepeatingLoader")
_ADAM = {
    "FusedAdam": "zero_trial.ops:FusedAdam",
    "DeepSpeedCPUAdam": "zero_trial.ops:CPUAdam",
}

# --- the table ------------------------------------------------------------------------------------

TABLE: Table = {
    "deepspeed": {
        **_ENGINE,
        **_INIT,
        **_at("zero_trial.engine", "initialize", "add_config_arguments"),
        "__version__": "zero_trial.stand_in.deepspeed_table:VERSION",
        "PipelineModule": "zero_trial.pipeline:PipelineModule",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "zero": "deepspeed.runtime.zero",
    },
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime.engine": {"DeepSpeedEngine": _ENGINE["DeepSpeedEngine"]},
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": _ENGINE["PipelineEngine"]},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": _ZERO,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.dataloader": _LOADERS,
    "deepspeed.comm": _INIT,
    "deepspeed.comm.comm": _INIT,
    "deepspeed.utils": {**_FRAGMENTS, **_LEAVES, **_LOADERS},
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _at(
        "zero_trial.importing.zero_to_fp32",
        *("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"),
        *("convert_zero_checkpoint_to_state_dict", "convert_zero_checkpoint_to_fp32_state_dict"),
    ),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": _ADAM["DeepSpeedCPUAdam"]},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": _ADAM["FusedAdam"]},
    "deepspeed.ops.lamb": _at("zero_trial.ops", "FusedLamb"),
    "deepspeed.ops.lion": {"FusedLion": "zero_trial.ops:FusedLion", "DeepSpeedCPULion": "zero_trial.ops:FusedLion"},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": "zero_trial.ops:FusedAdagrad"},
}


def install_deepspeed() -> StandInFinder:
    """Make ``import deepspeed`` mean zero_trial, and return the finder that does it. Where the
    real deepspeed is installed its first import raises ConfigError, unless the environment says
    "replace"."""
    fix = f"Uninstall deepspeed, or say {VARIABLE}=replace (zero-trial launch --replace-deepspeed)."
    return install(StandIn("deepspeed", VERSION, TABLE, _asked() == "replace", fix))


def _asked() -> str:
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return ""
    if value in ("1", "replace"):
        return value
    raise ConfigError("this is not a value of the variable", where=VARIABLE, got=value, expected="0, 1 or replace")
