"""What rank 0 says of a model before it trains, where that is not simply what ds_config says."""

from __future__ import annotations

import logging

import torch
from torch import nn

from zero_trial.engine.wiring import Wiring
from zero_trial.mesh import Mesh
from zero_trial.zero.dtypes import describe_dtypes
from zero_trial.zero.model_parallel import is_part

log = logging.getLogger("zero_trial")


def say_dtypes(model: nn.Module, asked: torch.dtype, mesh: Mesh) -> None:
    """A line for each way in which parameters are not what ds_config asks for."""
    trained = ((name, param.dtype) for name, param in model.named_parameters() if param.requires_grad)
    for line in describe_dtypes(trained, asked) if mesh.rank == 0 else ():
        log.warning(line)


def say_parts(model: nn.Module, mesh: Mesh, wiring: Wiring) -> None:
    """A line where parts of a model decide for themselves what concerns them all, or do not say what they have in common."""
    parts = mesh.model_part[1]
    if parts == 1 or mesh.rank != 0:
        return
    if mesh.model.size == 1 and (wiring.clip > 0 or wiring.policy.param == torch.float16):
        what = "clips by its own gradient norm" if wiring.clip > 0 else "skips steps and scales its loss by itself"
        log.warning(
            "%d parallel parts of the model and no get_model_parallel_group() of the mpu: each %s, "
            "so that weights which all parts hold can drift apart",
            parts,
            what,
        )
    elif mesh.model.size > 1 and not any(is_part(param) for param in model.parameters()):
        log.warning(
            "%d parallel parts of the model, and no parameter has tensor_model_parallel or model_parallel = True: "
            "all are taken for copies of each other, and those of the first part alone make the gradient norm",
            parts,
        )
