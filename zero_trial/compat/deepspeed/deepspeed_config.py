"""Names of DeepSpeed's configuration: enums, the classes of its sections, and the builders of its
ops."""

from __future__ import annotations

import sys
from enum import Enum, IntEnum
from typing import Any

from zero_trial.compat.deepspeed.deepspeed_refused import KERNELS
from zero_trial.ds_config.keys_zero import OffloadOptimizerSection, OffloadParamSection, ZeroSection
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError


class ZeroStageEnum(IntEnum):
    """ZeRO's stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where state may be kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that an engine holds."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


# --- sections -------------------------------------------------------------------------------------


class _SectionClass(type):
    """The class of a ds_config section by DeepSpeed's name: a call reads the section from its keys,
    and the sections of a ``DsConfig`` are instances.

    DeepSpeed's classes are pydantic models. In a program that has imported pydantic, a wrong value
    therefore raises pydantic's ValidationError; in others ConfigError.
    """

    path: tuple[str, ...]
    section: type

    def __call__(cls, **keys: Any) -> Any:
        found: Any = keys
        for name in reversed(cls.path):
            found = {name: found}
        try:
            found = read_ds_config(found)
        except ConfigError as fault:
            raise _as_pydantic(cls.__name__, fault) from fault
        for name in cls.path:
            found = getattr(found, name)
        return found

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.section)


def _as_pydantic(section: str, fault: ConfigError) -> Exception:
    core = sys.modules.get("pydantic_core")
    if core is None:
        return fault
    detail = core.PydanticCustomError("ds_config", "{fault}", {"fault": str(fault)})
    error: Exception = core.ValidationError.from_exception_data(section, [{"type": detail, "input": fault.got}])
    return error


def _section(section: type, *path: str) -> Any:
    return _SectionClass(section.__name__, (), {"section": section, "path": path})


DeepSpeedZeroConfig = _section(ZeroSection, "zero_optimization")
DeepSpeedZeroOffloadParamConfig = _section(OffloadParamSection, "zero_optimization", "offload_param")
DeepSpeedZeroOffloadOptimizerConfig = _section(OffloadOptimizerSection, "zero_optimization", "offload_optimizer")
# --- kernels --------------------------------------------------------------------------------------


class OpBuilder:
    """Answers whether an op of DeepSpeed's exists: zero_trial has each of ``COMPATIBLE_OPS``,
    compiled or in plain torch."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = True) -> None:
        """Raise ConfigError."""
        raise ConfigError("there is no extension to load", where=f"{type(self).__name__}.load", fix=KERNELS)


_OPS = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
}
BUILDERS: dict[str, type[OpBuilder]] = {name: type(name, (OpBuilder,), {"NAME": op}) for name, op in _OPS.items()}
COMPATIBLE_OPS = dict.fromkeys(_OPS.values(), True)


def __getattr__(name: str) -> type[OpBuilder]:
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
