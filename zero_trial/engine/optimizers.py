"""Optimizers by ds_config's name and params, and their parameter groups over masters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zero_trial.ds_config.keys_training import COMPRESSION, REFUSED_OPTIMIZERS, unknown_parameters
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.ops import native_on
from zero_trial.ops.optimizers.fused import FusedAdagrad, FusedAdam, FusedLion, FusedOptimizer, FusedSGD, Muon
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.util.text import did_you_mean

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
    """Return optimizer groups over the model's trainable parameters, each parameter once."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = [dict(group) for group in optimizer.param_groups]
    else:
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    known = {id(param) for param in model.parameters()}
    strangers = 0
    for group in groups:
        params = group["params"]
        listed = (
            [params]
            if isinstance(params, torch.Tensor)
            else [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        )
        trained = {id(param): param for param in listed if param.requires_grad}
        strangers += len(trained.keys() - known)
        group["params"] = list(trained.values())
    ids = [id(param) for group in groups for param in group["params"]]
    if doubles := len(ids) - len(set(ids)):
        raise ConfigError(
            "a parameter is in two optimizer groups",
            where="model_parameters",
            got=f"{doubles} doubles",
            expected="none",
        )
    if strangers:
        where = "optimizer" if isinstance(optimizer, torch.optim.Optimizer) else "model_parameters"
        raise ConfigError(
            "the optimizer has parameters that do not belong to the model",
            where=where,
            got=f"{strangers} trainable parameters that the model does not have",
            fix="Register their module in the model passed to initialize(); they are then trained with the model.",
        )
    return groups


def groups_over(weights: Sequence[Sequence[nn.Parameter]], groups: Sequence[Mapping[str, Any]]) -> Groups:
    """Return the same groups with the same settings, over pieces of masters, or whole tensors,
    instead of parameters. ``weights``: the tensors of each group."""
    return [
        {key: value for key, value in group.items() if key != "params"} | {"params": list(own)}
        for own, group in zip(weights, groups, strict=True)
    ]


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that calls the model, or accepts no dense gradients."""
    name, step = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters
    required = "closure" in step and step["closure"].default is inspect.Parameter.empty
    twice = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")  # SAM and its variants
    if required or twice or isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "this optimizer calls the model several times per step (a closure), which is impossible after backward",
            where="optimizer",
            got=f"{name}, whose step() needs a closure",
            expected="an optimizer whose step() only needs the existing gradients",
            fix=f"Use AdamW or another first-order optimizer, or train with {name} in plain torch on one process.",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "this optimizer needs sparse gradients, but gradients here are dense",
            where="optimizer",
            got=name,
            fix="Use AdamW, and build the embedding with sparse=False.",
        )


def muon_groups(model: nn.Module, groups: Groups, params: Mapping[str, Any]) -> Groups:
    """Split each group into parameters for Muon and parameters for AdamW, with ds_config's
    ``params`` for each; a group's own settings take precedence.

    A parameter's ``use_muon`` decides; without it, the rule of DeepSpeed 0.19 applies: two or more
    dimensions, and neither ``embed`` nor ``lm_head`` in its name.
    """
    names = {id(param): name.lower() for name, param in model.named_parameters()}

    def by_muon(param: nn.Parameter) -> bool:
        chosen = getattr(param, "use_muon", None)
        if chosen is not None:
            return bool(chosen) and param.dim() >= 2
        return param.dim() >= 2 and not any(word in names[id(param)] for word in ("embed", "lm_head"))

    shared = {key: params[key] for key in ("lr", "weight_decay") if key in params}
    muon = shared | {key: params[key] for key in ("momentum", *_MUON_ONLY) if key in params}
    adam = shared | {key: params[key] for key in ("betas", "eps") if key in params}
    muon |= {"lr": params["muon_lr"]} if "muon_lr" in params else {}
    adam |= {"lr": params["adam_lr"]} if "adam_lr" in params else {}
    found: Groups = []
    for group in groups:
        own = {key: value for key, value in group.items() if key != "params"}
        for use_muon, settings in ((True, muon), (False, adam)):
            chosen = [param for param in group["params"] if by_muon(param) is use_muon]
            if chosen:
                settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
                found.append({**settings, **own, "use_muon": use_muon, "params": chosen})
    return found


# --- from ds_config's optimizer name and params to an optimizer -----------------------------------
#
# DeepSpeed's names are case-insensitive and use DeepSpeed 0.19.8's defaults (weight decay 0, also
# for AdamW); every other name is a class of torch.optim in exact case, with torch's defaults.


WHERE = "optimizer.params"

# Our own fused kernels, if available: the same update and state, closer to float64 and without a
# cast of the gradient.
NATIVE: dict[type[torch.optim.Optimizer], tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    torch.optim.AdamW: (FusedAdam, {"adam_w_mode": True}),
    torch.optim.Adam: (FusedAdam, {"adam_w_mode": False}),
    torch.optim.SGD: (FusedSGD, {}),
    torch.optim.Adagrad: (FusedAdagrad, {}),
}

# Settings that select an implementation or a variant: if any of them is given, the named class
# itself is built.
_VARIANTS = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")

ParamGroups = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerSpec:
    """``optimizer_class`` with cleaned constructor arguments; ``note`` is a log line that reports
    what was mapped.

    ``torch_only``: torch's own implementation was requested. ``states``: how its moments are stored
    (:mod:`zero_trial.ops.plain`).
    """

    name: str
    optimizer_class: type[torch.optim.Optimizer]
    params: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None
    torch_only: bool = False
    states: str = "fp32"

    def build(self, param_groups: ParamGroups) -> torch.optim.Optimizer:
        """Return the optimizer over ``param_groups`` (tensors, or dicts with ``params`` and own
        settings), using our native kernels if the device has them (``ZERO_TRIAL_OPS=reference``
        disables them).

        Raises ConfigError if the optimizer rejects a value.
        """
        groups: list[Any] = list(param_groups)
        factory: Callable[..., torch.optim.Optimizer] = self.optimizer_class
        if self.states != "fp32":
            _check_states(self, [self.params, *(group for group in groups if isinstance(group, Mapping))])
        if self.states != "fp32" and issubclass(self.optimizer_class, FusedOptimizer):
            arguments = {**self.params, "states": self.states}
        elif self.states != "fp32" or self._native(groups):
            factory, own = NATIVE[self.optimizer_class]
            own = {**own, "states": self.states}
            shared = inspect.signature(factory).parameters.keys() - {"params", *own}
            given = {key: value for key, value in self.params.items() if key in shared}
            arguments = {**_defaults(self.optimizer_class, shared), **given, **own}
        else:
            arguments = dict(self.params)
        try:
            return factory(groups, **arguments)
        except ConfigError:
            raise
        except (ValueError, TypeError, RuntimeError) as refusal:
            raise ConfigError(f"{self.name} does not accept its parameters", where=WHERE, got=str(refusal)) from refusal

    def _native(self, groups: list[Any]) -> bool:
        """Return whether our kernels support all requested settings, for all of these tensors."""
        if (
            self.torch_only
            or self.optimizer_class not in NATIVE
            or any(key in self.params for key in ("foreach", "fused"))
        ):
            return False
        settings = [self.params, *(group for group in groups if isinstance(group, Mapping))]
        if any(each.get(key) for each in settings for key in _VARIANTS):
            return False
        if self.optimizer_class is torch.optim.SGD:
            momentum = self.params.get("momentum", 0.0)
            if not all(each.get("momentum", momentum) for each in settings):
                return False  # no state, nothing to fuse: use torch's implementation
        tensors = [tensor for group in groups for tensor in _tensors(group)]
        simple = all(tensor.dtype == torch.float32 for tensor in tensors)
        return bool(tensors) and simple and all(native_on(device) for device in {tensor.device for tensor in tensors})


def wanted_states(settings: DsConfig, optimizer: Any) -> str | None:
    """Return how ds_config wants moments stored; None if it does not say. Raises ConfigError if a
    client's ``optimizer`` owns the moments, since the client decides how they are stored."""
    asked = settings.data_types.optimizer_states
    wanted = asked if asked is not None else "bf16" if settings.bf16.bf16_optimizer_states else None
    if wanted is not None and optimizer is not None:
        raise ConfigError(
            "this key does not apply to an optimizer passed to initialize()",
            where="data_types.optimizer_states" if asked is not None else "bf16.bf16_optimizer_states",
            got=wanted,
            fix=f'Name the optimizer in ds_config, or remove the key and pass FusedAdam(states="{wanted}") or another optimizer of '
            "zero_trial.ops.",
        )
    return wanted


def _check_states(spec: OptimizerSpec, settings: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if the optimizer, or a group, cannot store its moments in bf16."""
    given = {key for each in settings for key in _VARIANTS if each.get(key)} | (
        {"torch_adam"} if spec.torch_only else set()
    )
    no_momentum = spec.optimizer_class is torch.optim.SGD and not spec.params.get("momentum")
    packs = spec.optimizer_class in NATIVE or issubclass(spec.optimizer_class, FusedOptimizer)
    if given or no_momentum or not packs or spec.optimizer_class is Muon:
        variant = " without momentum" if no_momentum else f" with {', '.join(sorted(given))}" if given else ""
        raise ConfigError(
            f"{spec.name}{variant} cannot store its states in bf16",
            where="data_types.optimizer_states",
            got=spec.states,
            expected="Adam, AdamW, Lion, Adagrad, or SGD with momentum, each in its plain variant",
            fix='Use one of these, or remove the key (also bf16.bf16_optimizer_states and "fp32_optimizer_states": false).',
        )


def _defaults(optimizer_class: type[torch.optim.Optimizer], names: Collection[str]) -> dict[str, Any]:
    """Return the class's own defaults: torch's AdamW has weight decay 0.01, ours has 0."""
    parameters = inspect.signature(optimizer_class).parameters
    return {name: parameters[name].default for name in names if name in parameters}


def resolve_optimizer(name: str, params: Mapping[str, Any] | None = None, states: str | None = None) -> OptimizerSpec:
    """Return the optimizer for ``{"type": name, "params": params}``. Raises ConfigError for
    settings that are not supported.

    Args:
        states: how its moments are stored; None: as the params say (DeepSpeed's
            ``fp32_optimizer_states``), otherwise in fp32.
    """
    given = dict(params or {})
    if given.pop("fp32_optimizer_states", True) is False:
        if states not in (None, "bf16"):
            raise ConfigError(
                "contradicts data_types.optimizer_states",
                where=f"{WHERE}.fp32_optimizer_states",
                got="false, which means bf16",
                expected=states,
                fix="Keep only one of the two.",
            )
        states = "bf16"
    if "max_grad_norm" in given:
        raise ConfigError(
            "gradient clipping is not a parameter of the optimizer",
            where=f"{WHERE}.max_grad_norm",
            got=given["max_grad_norm"],
            fix=f'Remove it and set "gradient_clipping": {given["max_grad_norm"]} at the top level of ds_config.',
        )
    rule = _DEEPSPEED.get(name.lower())
    spec = rule(name, given) if rule is not None else _torch_by_name(name, given)
    spec = replace(spec, states=states or "fp32")
    if spec.states != "fp32":
        _check_states(spec, [spec.params])
    return spec


def _adam(name: str, given: dict[str, Any]) -> OptimizerSpec:
    torch_adam = bool(given.pop("torch_adam", False))
    decoupled = bool(given.pop("adam_w_mode", True)) or name.lower() == "adamw"
    corrected = given.pop("bias_correction", True) is not False
    if torch_adam and not corrected:
        _answer(
            {"bias_correction": False}, "bias_correction", True, "torch's Adam always corrects the bias of its moments"
        )
    # no effect: gradients are in buffers that are always zeroed
    given.pop("set_grad_none", None)
    if not torch_adam:
        # default of DeepSpeed's own Adam; torch_adam keeps torch's default (AdamW: 0.01)
        given.setdefault("weight_decay", 0.0)
    note = "Adam means AdamW (decoupled weight decay) unless adam_w_mode is false" if name.lower() == "adam" else None
    # as in DeepSpeed's recipes for BERT; torch has no such variant, but our kernels do
    if not corrected:
        own = {"adam_w_mode": decoupled, "bias_correction": False}
        return _spec(name, FusedAdam, {**given, **own}, note if decoupled else None)
    chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
    return replace(_spec(name, chosen, given, note if decoupled else None), torch_only=torch_adam)


def _lion(name: str, given: dict[str, Any]) -> OptimizerSpec:
    given.pop("set_grad_none", None)
    return _spec(name, FusedLion, given)


def _lamb(name: str, given: dict[str, Any]) -> OptimizerSpec:
    _answer(given, "eps_inside_sqrt", False, "eps is added outside the square root")
    _answer(given, "amsgrad", False, "LAMB has no amsgrad variant")
    return _spec(name, FusedLamb, given, _LAMB_NOTE)


# Muon params that apply only to its matrices, in addition to momentum and muon_lr.
_MUON_ONLY = ("nesterov", "ns_steps", "ns_coefficients")


def _muon(name: str, given: dict[str, Any]) -> OptimizerSpec:
    note = "Muon trains hidden matrices, AdamW trains all other parameters"
    if given.pop("ns_method", "standard") == "gram":
        note += "; ns_method gram uses the standard iteration, which gives the same matrix"
    known = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", *_MUON_ONLY)
    faults = unknown_parameters(name, WHERE, given, (*known, "ns_method"))
    faults += _not_numbers(given, ("lr", "muon_lr", "adam_lr", "eps", "weight_decay", "momentum"))
    if faults:
        raise ConfigError.many(faults)
    return OptimizerSpec(name, Muon, {}, note)  # muon_groups puts the numbers into its groups


_LAMB_NOTE = (
    "LAMB corrects the bias of its moments, as in the paper; DeepSpeed 0.19.8 instead scales the whole step by sqrt(1 - beta2^t) / (1 - "
    "beta1^t), so its early steps are shorter"
)


def _one_bit(base: str, rule: Callable[[str, dict[str, Any]], OptimizerSpec]) -> Callable[[str, dict[str, Any]], Any]:
    """Map a 1-bit optimizer to its base: communication is not compressed here."""

    def resolve(name: str, given: dict[str, Any]) -> OptimizerSpec:
        dropped = [key for key in COMPRESSION if given.pop(key, None) is not None]
        spec = rule(base, given)
        note = f"{name}: gradients are not compressed; {base} is used"
        note += f" without {', '.join(dropped)}" if dropped else ""
        return replace(spec, name=name, note=note)

    return resolve


def _mup(name: str, given: dict[str, Any]) -> OptimizerSpec:
    raise ConfigError(
        "the optimizers of the mup package need its shapes of the model",
        where="optimizer.type",
        got=name,
        fix="Build it with mup and pass it to initialize(optimizer=...).",
    )


_DEEPSPEED: dict[str, Callable[[str, dict[str, Any]], OptimizerSpec]] = {
    "adam": _adam,
    "adamw": _adam,
    "adagrad": lambda name, given: _spec(name, torch.optim.Adagrad, given),
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
    "muadam": _mup,
    "muadamw": _mup,
    "musgd": _mup,
    "onebitadam": _one_bit("AdamW", _adam),
    "zerooneadam": _one_bit("AdamW", _adam),
    "onebitlamb": _one_bit("Lamb", _lamb),
}


_REFUSED_TORCH = {name: REFUSED_OPTIMIZERS[name] for name in ("LBFGS", "SparseAdam")} | {
    "Optimizer": "it is the base class of all optimizers"
}


def torch_optimizer_names() -> list[str]:
    """Return every class of torch.optim that a ds_config can name."""
    found = [name for name, value in vars(torch.optim).items() if _is_optimizer(value)]
    return sorted(name for name in found if name not in _REFUSED_TORCH)


def _torch_by_name(name: str, given: dict[str, Any]) -> OptimizerSpec:
    if name in _REFUSED_TORCH:
        raise ConfigError(f"torch's {name} cannot be used: {_REFUSED_TORCH[name]}", where="optimizer.type", got=name)
    found = getattr(torch.optim, name, None)
    if not _is_optimizer(found):
        known = [*torch_optimizer_names(), "Lion", "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"]
        raise ConfigError(
            "no such optimizer",
            where="optimizer.type",
            got=repr(name),
            expected="one of " + ", ".join(sorted(known)),
            fix=did_you_mean(name, known),
        )
    return _spec(name, found, given)  # type: ignore[arg-type]


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _spec(
    name: str, optimizer_class: type[torch.optim.Optimizer], given: dict[str, Any], note: str | None = None
) -> OptimizerSpec:
    known = [key for key in inspect.signature(optimizer_class.__init__).parameters if key not in ("self", "params")]
    faults = unknown_parameters(name, WHERE, given, known)
    faults += _not_numbers(given, ("lr", "eps", "weight_decay", "momentum"))
    if faults:
        raise ConfigError.many(faults)
    clean = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return OptimizerSpec(name, optimizer_class, clean, note)


def _answer(given: dict[str, Any], key: str, only: bool, reason: str) -> None:
    """Accept a DeepSpeed parameter only if its value is ``only``; refuse any other value."""
    value = given.pop(key, only)
    if value is not only:
        raise ConfigError(reason, where=f"{WHERE}.{key}", got=value, expected=only, fix="Remove it.")


def _is_number(value: object) -> bool:
    if isinstance(value, (list, tuple)):  # Adafactor's eps is a pair
        return all(item is None or _is_number(item) for item in value)
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def _not_numbers(given: Mapping[str, Any], keys: Iterable[str]) -> list[ConfigError]:
    """Return an error for each of ``keys`` whose given value is not a number."""
    expected = "a number, without quotes"
    return [
        ConfigError("not a number", where=f"{WHERE}.{key}", got=repr(given[key]), expected=expected)
        for key in keys
        if key in given and not _is_number(given[key])
    ]


def _tensors(group: Any) -> list[torch.Tensor]:
    if isinstance(group, torch.Tensor):
        return [group]
    params = group["params"]
    return [params] if isinstance(params, torch.Tensor) else list(params)
