"""Which parameters of a model that is parallel itself are parts of a tensor, and which of them every rank of the model axis holds whole.

Such a model says so as Megatron's and DeepSpeed's do: an attribute ``tensor_model_parallel`` or ``model_parallel`` that is true marks a part.
All others are taken for copies of each other, and the first rank's count where something is summed over the model: the gradient norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from zero_trial.zero.partition import Member

MARKS = ("tensor_model_parallel", "model_parallel")


def is_part(param: torch.Tensor) -> bool:
    """Whether the other ranks of the model axis hold other elements of this tensor."""
    return any(bool(getattr(param, mark, False)) for mark in MARKS)


def apart(members: Sequence[Member], params: Mapping[str, nn.Parameter]) -> list[Member]:
    """The same members, so keyed that no unit holds parts and copies."""
    return [replace(member, key=(*member.key, is_part(params[member.name]))) for member in members]
