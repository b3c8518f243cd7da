"""Training steps of one rank, played through with the engine's own code on an imagined mesh, and what they held in memory.

The second step counts: from then on the optimizer has its state and the order of reductions is known. Nothing is computed twice here: layouts,
buckets, landings and flights are those of the engine, because it is the engine that runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from zero_trial.config.sections import (
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    DsConfig,
    FlopsProfilerSection,
    OffloadOptimizerSection,
    TensorBoardSection,
    WandbSection,
)
from zero_trial.engine import Engine
from zero_trial.engine.initialize import build_engine
from zero_trial.engine.wiring import mesh_shape
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.imagined_mesh import Exchange, Segments, imagined_mesh
from zero_trial.planning.imagined_shelf import IMAGINED
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.plan import Figures

STEPS = 2
MOST_ACCUMULATION = 2  # a third micro-batch of a step needs what the second needs
SMALL_WORK = 1_000_000_000  # parameters times elements of the batch: below, real numbers are faster than imagined ones


@dataclass(frozen=True)
class Role:
    """One engine to be: what it is built from, and its ds_config with all batch sizes solved."""

    blueprint: Blueprint
    settings: DsConfig


@dataclass(frozen=True)
class World:
    """The imagined ranks: how many, how they exchange, and what that costs in shared segments."""

    ranks: int
    exchange: Exchange
    segments: Segments


# Runs one micro-batch out of the given ones: forward, backward and step of every engine.
Micro = Callable[[Sequence[Engine], Sequence[Any]], None]


def rehearse(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    batches: Sequence[Any] = (),
    *,
    calls: int = 1,
    imagined: bool = True,
    exchange: Exchange = Exchange.SHARED,
) -> Figures:
    """Bytes on rank 0 of ``ranks``. ``micro(engines, batches)`` is called ``calls`` times per step; without it the states alone are measured.

    ``imagined``: tensors without values, which cost neither memory nor time to compute; else real ones on this machine's CPU, in as much
    memory as the rank itself would need. torch's random state is left as it was.
    """
    first = roles[0].blueprint
    live, segments = LiveBytes(first.device.type), Segments()
    given = [first.batch(batch, imagined=imagined) for batch in batches]
    live.hold(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
    cast = [role.blueprint.options(imagined=imagined) for role in roles]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), first.without_values(imagined=imagined), live:
        warnings.simplefilter("ignore")  # imagined tensors have no addresses, and torch warns who asks for one
        engines = [
            _engine(role, options, World(ranks, exchange, segments), live)
            for role, options in zip(roles, cast, strict=True)
        ]
        cast.clear()
        live.follow(lambda: [buffer for engine in engines for buffer in engine.sharded.buffers()])
        if micro is None:
            for engine in engines:
                _empty_step(engine)
        for _ in range(STEPS if micro is not None else 0):
            live.restart()
            for _ in range(calls):
                with live.saving():
                    _call(micro, engines, given)
    if any(engine.skipped_steps for engine in engines):
        raise TrialError(
            "the gradients of the rehearsed step are not finite, so the optimizer made no state", where="plan"
        )
    states = [engine.persistent_bytes() for engine in engines]
    parameters, gradients, optimizer = (
        sum(state[kind] for state in states) for kind in ("parameters", "gradients", "optimizer")
    )
    known = Figures(parameters, gradients, optimizer, exchange=segments.total)
    return known if micro is None else replace(known, activations=live.saved_peak, peak=live.peak)


class Way(Enum):
    """How a micro-batch is rehearsed, as a plan says it."""

    IMAGINED = "imagined"  # tensors without values, on the device of the training
    IMAGINED_ON_CPU = "imagined on the CPU"  # the same, where this torch cannot imagine that device: kernels may save other things there
    TRACED = "traced"  # real numbers on the CPU


def ways(device: torch.device, *, work: int, scaled: bool) -> list[Way]:
    """The ways to try, best first. Half precision with a loss scale (``scaled``) may overflow on the numbers of a rehearsal."""
    if device.type != "cpu":
        return [Way.IMAGINED, Way.IMAGINED_ON_CPU, Way.TRACED]
    return [Way.TRACED, Way.IMAGINED] if work <= SMALL_WORK and not scaled else [Way.IMAGINED, Way.TRACED]


def rehearse_either(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    batches: Sequence[Any] = (),
    *,
    calls: int = 1,
    one_host: bool = True,
) -> tuple[Figures, str]:
    """As :func:`rehearse`, in the way that suits, or in the next one if that fails; and which it was.

    Little work (parameters times batch elements) is traced first, because that is faster. A model that reads values out of its tensors can only
    be traced.
    """
    device = roles[0].blueprint.device
    exchange = Exchange.NATIVE if device.type != "cpu" else Exchange.SHARED if one_host else Exchange.DIRECT
    if micro is None:
        return rehearse(roles, ranks, None, exchange=exchange), "none"
    work = sum(role.blueprint.parameters for role in roles) * largest(batches)
    scaled = any(role.settings.fp16.enabled for role in roles)
    faults: list[Exception] = []
    for way in ways(device, work=work, scaled=scaled):
        place = device if way is Way.IMAGINED else torch.device("cpu")
        try:
            with ExitStack() as stack:
                for role in roles:
                    stack.enter_context(role.blueprint.on(place))
                imagined = way is not Way.TRACED
                return rehearse(
                    roles, ranks, micro, batches, calls=calls, imagined=imagined, exchange=exchange
                ), way.value
        except TrialError as error:
            faults.append(error)
        except ZeroTrialError:
            raise  # a config that cannot be used, in any way
        except Exception as error:
            faults.append(error)
    last = faults[-1]  # of the traced one, or the only one: the user's own fault looks the same in all
    raise TrialError(f"a micro-batch cannot be rehearsed: {last}", where="plan", got=type(last).__name__) from last


def variant(settings: DsConfig, *, stage: int, micro_batch: int, accumulation: int) -> DsConfig:
    """``settings`` at another ZeRO stage and batch, without monitors and profilers."""
    return replace(
        settings,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        zero_optimization=replace(settings.zero_optimization, stage=stage),
        **_SILENT,
    )


def with_state_at(settings: DsConfig, place: OffloadOptimizerSection | None) -> DsConfig:
    """``settings`` with optimizer state somewhere else."""
    return replace(settings, zero_optimization=replace(settings.zero_optimization, offload_optimizer=place))


_SILENT: dict[str, Any] = {
    "tensorboard": TensorBoardSection(),
    "csv_monitor": CsvMonitorSection(),
    "wandb": WandbSection(),
    "comet": CometSection(),
    "flops_profiler": FlopsProfilerSection(),
    "comms_logger": CommsLoggerSection(),
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "disable_python_gc": False,
}


def _engine(role: Role, options: dict[str, Any], world: World, live: LiveBytes) -> Engine:
    model = options.pop("model")
    live.hold([*model.parameters(), *model.buffers()])
    mesh = imagined_mesh(mesh_shape(role.settings, world.ranks), world.exchange, world.segments)
    return build_engine(model, role.settings, mesh, role.blueprint.device, places=IMAGINED, **options)


def _call(micro: Micro | None, engines: Sequence[Engine], batches: Sequence[Any]) -> None:
    if micro is not None:
        micro(engines, batches)


def _empty_step(engine: Engine) -> None:
    """A step on gradients of zero: all that it leaves is the optimizer's state."""
    if engine.optimizer is not None:
        engine.set_gradient_accumulation_boundary(True)
        engine.sharded.reducer.ensure_reduced()  # what has not come counts as zeros
        engine.step()


def largest(batch: Any) -> int:
    """Elements of the batch's largest tensor."""
    return max((leaf.numel() for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)), default=0)
