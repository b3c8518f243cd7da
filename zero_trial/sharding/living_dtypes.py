"""The dtype in which each tensor of a model lives while it trains, and modules that stay fp32 in
16-bit training: those that ds_config's ``data_types.keep_in_fp32_modules`` names, and those that a
model of transformers or diffusers names itself (``_keep_in_fp32_modules_strict``, and with fp16
``_keep_in_fp32_modules``).

A pattern matches whole components of a dotted name, as in transformers: ``norm`` is
``blocks.0.norm`` and ``blocks.0.norm.weight``, not ``blocks.0.norm1``; ``*`` is any text. The name
may be a parameter's or a buffer's own.

At the border of such a module floating inputs are cast to fp32, and floating outputs to the dtype
of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.sharding.layout import living_dtype
from zero_trial.sharding.precision import DtypePolicy, cast_floats
from zero_trial.sharding.quantized import is_opaque
from zero_trial.util.text import did_you_mean


class LivingDtypes:
    """The dtypes of one model under ``policy``.

    ``modules``: those that stay fp32, by name, each outermost.
    ``unmatched``: names in ds_config that the model does not have.
    """

    def __init__(self, model: nn.Module, policy: DtypePolicy) -> None:
        self.policy = policy
        self.modules: dict[str, nn.Module] = {}
        self._kept: set[int] = set()  # ids of parameters and buffers
        patterns = [(pattern, _matcher("", pattern)) for pattern in policy.fp32_modules if pattern != "auto"]
        known = [name for name, _ in _tensors(model)] + [name for name, _ in model.named_modules()]
        self._known = {part for name in known for part in (name, *name.split("."))}
        self.unmatched = [pattern for pattern, matches in patterns if not any(map(matches, known))]
        matchers = [matches for _, matches in patterns] + list(_of_model(model, policy.param))
        if not matchers or policy.param == torch.float32:
            return

        def chosen(name: str) -> bool:
            return any(matches(name) for matches in matchers)

        self._kept = {id(tensor) for name, tensor in _tensors(model) if chosen(name)}
        for name, module in model.named_modules(remove_duplicate=False):
            own = {**module._parameters, **module._buffers}
            # a module whose weight is tied to one that stays computes with it
            tied = any(id(each) in self._kept and not chosen(_join(name, key)) for key, each in own.items())
            calls = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if calls and (chosen(name) or tied) and not any(_inside(name, outer) for outer in self.modules):
                self.modules[name] = module
                self._kept.update(id(tensor) for _, tensor in _tensors(module))

    def of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter or buffer of the model lives: see
        :func:`living_dtype`."""
        if is_opaque(tensor):
            return tensor.dtype
        if self.keeps(tensor):
            return torch.promote_types(tensor.dtype, torch.float32)
        return living_dtype(tensor.dtype, self.policy.param)

    def of_buffer(self, buffer: torch.Tensor) -> torch.dtype:
        """Return the dtype of a floating buffer that may be cast."""
        return (not self.keeps(buffer) and self.policy.buffer) or self.of(buffer)

    def of_stored(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which values of a file are read first: the tensor's own, except for
        tensors that stay fp32, which are not rounded."""
        return self.of(tensor) if self.keeps(tensor) else tensor.dtype

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor stays fp32."""
        return id(tensor) in self._kept and tensor.is_floating_point()

    def require_matches(self, unmatched: list[str] | None = None) -> None:
        """Raise ConfigError for a name of ds_config that matches nothing. ``unmatched``: on all
        pipeline stages."""
        for pattern in self.unmatched if unmatched is None else unmatched:
            raise ConfigError(
                "the model has no module, parameter or buffer of this name",
                where="data_types.keep_in_fp32_modules",
                got=f'"{pattern}"',
                expected="whole components of a dotted name, in which * is any text",
                fix=did_you_mean(pattern, self._known) or "model.named_modules() lists the names.",
            )

    def cast_at_borders(self) -> list[Any]:
        """Register the casts of inputs and outputs of modules that stay fp32; return handles."""
        handles: list[Any] = []
        for module in self.modules.values():
            handles.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_leave, self.policy.param)))
        return handles


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cast_floats((args, kwargs), torch.float32)


def _leave(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_floats(output, dtype)


def _of_model(model: nn.Module, dtype: torch.dtype) -> Iterator[Callable[[str], Any]]:
    """Yield matchers of the names that modules list themselves, below their own names."""
    lists = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype == torch.float16)
    for name, module in model.named_modules():
        for patterns in (getattr(module, each, None) for each in lists):
            for pattern in sorted(patterns) if isinstance(patterns, (list, tuple, set, frozenset)) else ():
                yield _matcher(name, str(pattern))


def _matcher(prefix: str, pattern: str) -> Callable[[str], Any]:
    text = ".*".join(map(re.escape, pattern.split("*")))
    below = rf"^{re.escape(prefix)}\.(?:.*\.)?" if prefix else r"(?:^|\.)"
    return re.compile(rf"{below}{text}(?:$|\.)").search


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
