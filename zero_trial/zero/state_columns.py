"""Which state an optimizer will keep with one value per element, found out by a step of its twin on a parameter of a few zeros."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_PROBE = 96  # elements: no count or factor of a state is so long
_OWN = ("step", "zero_grad")  # schedulers put wrappers of these on the object, which would step the real one
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class Column:
    """One kind of state with one value per element, such as ``exp_avg``."""

    kind: str
    dtype: torch.dtype


def state_columns(base: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> list[Column]:
    """The columns of all groups of ``base`` for weights in ``dtype``, in the order in which it makes them; ``base`` stays as it is.

    It must be elementwise. The step is a real one also where a rehearsal imagines its tensors: optimizers read their counts of steps.
    """
    with _disable_current_modes():
        return _columns_of_twin(base, dtype)


def _columns_of_twin(base: torch.optim.Optimizer, dtype: torch.dtype) -> list[Column]:
    twin: torch.optim.Optimizer = object.__new__(type(base))
    twin.__dict__.update({key: value for key, value in base.__dict__.items() if key not in _OWN})
    twin.__dict__.update({key: OrderedDict() for key in _HOOKS})
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in base.param_groups:
        weight = nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device="cpu"))
        weight.grad = torch.zeros_like(weight)
        twin.param_groups.append({**group, "params": [weight]})
        if isinstance(base, torch.optim.Adagrad):  # the one that makes its state when it is built
            twin.state[weight] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(weight)}
    if twin.param_groups:
        twin.step()
    found: dict[str, torch.dtype] = {}
    for state in twin.state.values():
        for kind, value in state.items():
            if torch.is_tensor(value) and value.shape == (_PROBE,):
                found.setdefault(kind, value.dtype)
    return [Column(kind, dtype) for kind, dtype in found.items()]
