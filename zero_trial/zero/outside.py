"""What of a module is in no unit: parameters that nobody here trains or shards, and buffers, which all ranks have alike."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from zero_trial.mesh import AxisComm
from zero_trial.precision.policy import DtypePolicy
from zero_trial.zero import directory
from zero_trial.zero.domains import Domains
from zero_trial.zero.dtypes import living_dtype
from zero_trial.zero.presharded import read_first_values


@torch.no_grad()
def agree_outside(
    module: nn.Module, managed: Collection[int], policy: DtypePolicy, domains: Domains, data: AxisComm
) -> None:
    """Gives parameters whose ids are not in ``managed``, and all buffers, the policy's dtype and rank 0's values. Collective over ``data``."""
    for name, param in module.named_parameters():
        if id(param) not in managed:
            values = read_first_values(param)
            param.data = values.to(living_dtype(values.dtype, policy.param))
            directory.forget([param])
            domains.agree(param, param.data, name)
            data.broadcast(param.data, name)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(policy.buffer or living_dtype(buffer.dtype, policy.param))
        data.broadcast(buffer.data, name)
