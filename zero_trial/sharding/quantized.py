"""Frozen weights in 4 bits (bitsandbytes' Linear4bit, as QLoRA uses them): packed bytes, and the
quantization state that turns them into numbers.

Both are opaque: they are sharded, gathered, moved and saved like other frozen parameters, in their
own dtype, and never cast. bitsandbytes keeps the state (scales of 64 weights each, and their own
scales) in an object of the weight. :class:`PackedWeights` makes the scales parameters of the
weight's module, under the names that they have in its state dict:

    q_proj.weight                  packed bytes, two weights in each
    q_proj.weight.absmax           scales; 8 bits each with double quantization
    q_proj.weight.nested_absmax    scales of the scales

The mean of the scales, one number, is a buffer. The table of the 16 values, and that of the
scales' 256 values, are the same for every weight: all weights share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.sharding.guards.freed import FreedParameter, plain_class

_OFFSET = "weight.nested_offset"


class OpaqueParameter(nn.Parameter):
    """Numbers of a quantization state, which keep their dtype."""


def is_opaque(param: torch.Tensor) -> bool:
    """Return whether a tensor's dtype is only for storage, not the dtype that it computes with."""
    return issubclass(plain_class(type(param)), OpaqueParameter) or getattr(param, "quant_state", None) is not None


def opaque_buffers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of ``module`` itself that belong to a quantization state."""
    if (offset := module._buffers.get(_OFFSET)) is not None:
        yield f"{prefix}.{_OFFSET}" if prefix else _OFFSET, offset


def value_tables(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tables of values that 4-bit weights of ``model`` share."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        for part in _holders(state).values() if state is not None else ():
            yield part.code


def _holders(state: Any) -> dict[str, Any]:
    """Return the objects that hold scales, by the names of the parameters that these become."""
    return {"weight.absmax": state} | ({"weight.nested_absmax": state.state2} if state.nested else {})


class PackedWeights:
    """The 4-bit weights of ``model``, whose quantization states become parameters of their modules
    until :meth:`release`. A second object for the same model finds these parameters.

    A CPU with AVX512-BF16 permanently repacks such a weight at its first use in evaluation; a
    repacked weight passes no gradient to adapters below it. Until release, repacking is off.

    Raises ConfigError for quantized weights that training does not support. ``device``: where the
    model will be (None: where it is).
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._packers: list[nn.Module] = []
        self._modules: list[nn.Module] = []
        self._tables: dict[tuple[str, str], torch.Tensor] = {}
        for name, module in model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                _require_usable(f"{name}.weight" if name else "weight", weight)
                self._take(module, weight, device)

    def _take(self, module: nn.Module, weight: nn.Parameter, device: torch.device | None) -> None:
        if (state := getattr(weight, "quant_state", None)) is None:
            return
        self._modules.append(module)
        # names with a dot, as they are in state dicts; register_parameter() refuses those
        module._parameters.update(scales_of(weight))
        if state.nested:
            module._buffers[_OFFSET] = state.offset
            module._non_persistent_buffers_set.add(_OFFSET)  # bitsandbytes puts it elsewhere in state dicts
        for name, part in _holders(state).items():
            code = part.code if device is None else part.code.to(device)
            part.code = self._tables.setdefault((name, state.quant_type), code)
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            self._packers.append(module)

    def release(self) -> None:
        """Make quantization states ordinary tensors again, except those without values. Local."""
        for module in self._packers:
            module.support_avx512bf16_for_cpu = True  # type: ignore[assignment]
        for module in self._modules:
            state = getattr(module._parameters.get("weight"), "quant_state", None)
            if state is None:
                continue
            for name, place in _holders(state).items():
                if not isinstance(place.absmax, FreedParameter):
                    place.absmax = place.absmax.detach()
                    module._parameters.pop(name, None)
            if module._buffers.pop(_OFFSET, None) is not None:
                module._non_persistent_buffers_set.discard(_OFFSET)


def scales_of(param: torch.Tensor) -> dict[str, OpaqueParameter]:
    """Turn the scales in a weight's quantization state into parameters, and return them by their
    names in the weight's module; for any other parameter, return none."""
    state, found = getattr(param, "quant_state", None), {}
    for name, place in _holders(state).items() if state is not None else ():
        if not isinstance(place.absmax, OpaqueParameter):
            place.absmax = OpaqueParameter(place.absmax.detach(), requires_grad=False)
        found[name] = place.absmax
    return found


def _require_usable(name: str, weight: nn.Parameter) -> None:
    """Raise ConfigError for a 4-bit ``weight`` on which adapters cannot be trained."""
    state = getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            "bitsandbytes has packed this weight for inference on the CPU: adapters below it would get no gradient",
            where=f"initialize(model): {name}",
            got="a model that was evaluated on a CPU with AVX512-BF16",
            expected="a model that was not used yet",
            fix="Load the model again, and evaluate it after initialize().",
        )
    if state is None and hasattr(weight, "bnb_quantized") and not weight.is_meta and not weight.bnb_quantized:
        raise ConfigError(
            "bitsandbytes has not quantized this weight yet",
            where=f"initialize(model): {name}",
            got=f"{type(weight).__name__} of {weight.dtype}",
            fix="Quantize first: model.to(device), or from_pretrained(quantization_config=BitsAndBytesConfig(load_in_4bit=True)).",
        )


def require_freeable(model: nn.Module) -> None:
    """Raise ConfigError for quantized weights whose numbers are not in the parameter itself:
    bitsandbytes' 8-bit weights, and classes that consist of several tensors, such as torchao's."""
    for name, param in model.named_parameters():
        if hasattr(param, "CB") or hasattr(param, "__tensor_flatten__"):
            raise ConfigError(
                "quantized weights of this kind cannot be freed: they store their numbers outside of the parameter",
                where=f"initialize(model): {name}",
                got=type(param).__name__,
                expected="bitsandbytes' 4-bit weights; or stage 0, 1 or 2 without offload_param",
                fix="Load with BitsAndBytesConfig(load_in_4bit=True).",
            )
