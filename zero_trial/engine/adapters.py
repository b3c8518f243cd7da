"""LoRA adapters (PEFT's) of a model, as if they were merged into its weights: the names and values
of the plain model, for programs that know no adapters."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

from zero_trial.errors import TrialError
from zero_trial.sharding.quantized import is_opaque


class MergedAdapters:
    """The names and values that the parameters of ``module`` have in the plain model. PEFT's own
    ``merge`` computes them, so variants such as DoRA are supported; weights and adapters of the
    model stay bit-identical. Without adapters, names and values are the model's own.

    Raises TrialError for adapters that are not LoRA's, and for weights that cannot be merged.
    """

    def __init__(self, module: nn.Module, where: str) -> None:
        self._module = module
        # PEFT's wrapper classes, each with the path of the plain model's module inside it
        self._wrappers: tuple[tuple[type, str], ...] = ()
        self._saved: tuple[Any, ...] = ()
        self._layers: dict[int, list[Any]] = {}  # by parameter
        if "peft" not in sys.modules:
            return
        lora, peft, tuners = (import_module(f"peft{name}") for name in (".tuners.lora", "", ".tuners.tuners_utils"))
        other = import_module("peft.utils.other")
        self._saved = (other.ModulesToSaveWrapper,)
        places = ("base_model.model", "base_layer", "original_module")
        self._wrappers = tuple(zip((peft.PeftModel, lora.LoraLayer, *self._saved), places, strict=True))
        for name, part in module.named_modules():
            prompts = isinstance(part, peft.PeftModel) and not isinstance(part.base_model, tuners.BaseTuner)
            adapts = isinstance(part, (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper))
            if prompts or (adapts and not isinstance(part, (lora.LoraLayer, *self._saved))):
                raise _refused(where, "only LoRA adapters can be merged", f"{name}: {type(part).__name__}")
            if isinstance(part, lora.LoraLayer):
                for inner, param in part.get_base_layer().named_parameters():
                    if not inner.endswith("bias") or any(part.lora_bias.values()):
                        self._layers.setdefault(id(param), []).append(part)
        first = dict(module.named_parameters())
        for name, param in module.named_parameters(remove_duplicate=False):
            if self._layers.get(id(param)) and self.name(name) is not None:
                if is_opaque(param) or not param.is_floating_point():
                    raise _refused(where, "an adapter on a quantized weight cannot be merged", f"{name}: {param.dtype}")
                if name not in first:
                    raise _refused(where, "an adapter on one name of a tied weight cannot be merged", name)

    def name(self, name: str) -> str | None:
        """Return a parameter's name in the plain model; None if that model does not have it."""
        module: Any = self._module
        kept, rest = list[str](), name
        while module is not None:
            inner = next((place for kind, place in self._wrappers if isinstance(module, kind)), None)
            if inner is None:
                first, _, rest = rest.partition(".")
                kept.append(first)
                module = module._modules.get(first) if rest else None
                continue
            if isinstance(module, self._saved) and module.active_adapters:
                inner = f"modules_to_save.{module.active_adapters[0]}"
            if not rest.startswith(f"{inner}."):
                return None
            module, rest = module.get_submodule(inner), rest.removeprefix(f"{inner}.")
        return ".".join([*kept, rest] if rest else kept)

    def needs(self, param: torch.Tensor) -> list[nn.Parameter]:
        """List the parameters that are needed to compute the merged value of ``param``."""
        return [each for layer in self._layers.get(id(param), ()) for each in layer.parameters()]

    @torch.no_grad()
    def value(self, param: torch.Tensor) -> torch.Tensor:
        """Return the merged value of ``param``, or its own value if there is nothing to merge. The
        parameters that :meth:`needs` lists must be whole."""
        layers = self._layers.get(id(param), ())
        before = [(each, each.data) for each in self.needs(param)]
        merged = [each for layer in layers for each in layer.modules() if hasattr(each, "merged_adapters")]
        counts = [len(each.merged_adapters) for each in merged]
        try:
            for layer in layers:
                layer.merge(safe_merge=True)  # replaces the weights by copies
            return param.detach()
        finally:
            for each, own in before:
                if each.data_ptr() != own.data_ptr():
                    each.data = own
            for each, count in zip(merged, counts, strict=True):
                del each.merged_adapters[count:]


def _refused(where: str, why: str, got: str) -> TrialError:
    return TrialError(
        f"{why}, so that the plain model's weights are unknown",
        where=where,
        got=got,
        expected="LoRA adapters on weights that are neither quantized nor tied",
        fix="Send the adapters alone (merge_lora=False) to a server that loads adapters, or merge with PEFT after training.",
    )
