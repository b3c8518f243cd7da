"""Ranks that use a model more often than others: generation, and uneven numbers of batches.

If ZeRO stage 3 frees parameters, each use of a block is an all-gather, which every rank must call
equally often. So generation either gathers once for all tokens, or continues on ranks that have
finished; and a rank without batches uses its last one again, with weight 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch

from zero_trial.comm import Mesh
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.errors import DataError, TrialError
from zero_trial.sharding.param_access import GatheredParameters
from zero_trial.sharding.precision import cast_floats, forward_of

_END = object()


def generate(engine: EngineAccessors, args: Sequence[Any], kwargs: Mapping[str, Any], gather: bool | None) -> Any:
    """See :meth:`Engine.generate`."""
    method = getattr(engine.module, "generate", None)
    if method is None:
        raise TrialError(
            "the model has no generate() method", where="engine.generate", got=type(engine.module).__name__
        )
    call = forward_of(method, engine.resolved.autocast, engine.device.type)
    if engine.resolved.policy.param != torch.float32:
        args, kwargs = cast_floats((args, kwargs), engine.resolved.policy.param)
    if not engine.sharded.plan.gathers_parameters:
        return call(*args, **kwargs)
    synced = kwargs.get("synced_gpus")
    whole = gather if gather is not None else not synced and engine.sharded.unsharder.fits_whole
    if whole:
        with GatheredParameters(engine.module):
            return call(*args, **kwargs)
    if synced is None and "synced_gpus" not in inspect.signature(method).parameters:
        raise TrialError(
            "ranks cannot generate independently: parameters are gathered for each token",
            where="engine.generate",
            got=f"{type(engine.module).__name__}.generate without synced_gpus",
            fix="Pass gather=True if the full parameters fit into each rank's memory (max_live_parameters is lower than their number), or add a "
            "synced_gpus argument to the method.",
        )
    return call(*args, **(dict(kwargs) | {"synced_gpus": True}))


def evenly(batches: Iterable[Any], mesh: Mesh) -> Iterator[tuple[Any, float]]:
    """See :meth:`Engine.evenly`."""
    size = len(batches) if isinstance(batches, Sized) else -1
    sizes = [known for (known,) in mesh.data.gather_row([size], "numbers of batches")]
    if 0 in sizes:
        raise _no_batch(
            mesh, ", ".join(f"rank {rank}" for rank, known in zip(mesh.data.ranks, sizes, strict=True) if not known)
        )
    most = max(sizes) if -1 not in sizes else None
    iterator, last, done = iter(batches), _END, 0
    while done != most:
        batch = next(iterator, _END)
        if most is None and not _any_left(mesh, batch is not _END):
            return
        if batch is _END and last is _END:
            error = _no_batch(mesh, f"rank {mesh.rank}")
            mesh.heartbeat.report_error(str(error))  # the other ranks use the model meanwhile
            raise error
        weight, last = (1.0, batch) if batch is not _END else (0.0, last)
        yield last, weight
        done += 1


def _any_left(mesh: Mesh, mine: bool) -> bool:
    """Return whether any rank has another batch. Collective over data."""
    left = torch.full((1,), float(mine), device=mesh.data.control_device)
    mesh.data.all_reduce_small(left, "another batch", "max")
    return bool(left.item())


def _no_batch(mesh: Mesh, ranks: str) -> DataError:
    return DataError(
        "a rank without any batch cannot take part in training",
        where="engine.evenly",
        got=f"no batch on {ranks}",
        expected="at least one on each rank",
        fix="Use a smaller batch, fewer ranks, or more data.",
    )
