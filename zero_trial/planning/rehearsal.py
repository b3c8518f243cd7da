"""Training steps of one rank, played through with the engine's own code on an imagined mesh, and what they held in memory.

The second step counts: from then on the optimizer has its state and the order of reductions is known. Nothing is computed twice here: layouts,
buckets, landings and flights are those of the engine, because it is the engine that runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_trial.config import DsConfig
from zero_trial.config.sections import (
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    FlopsProfilerSection,
    TensorBoardSection,
    WandbSection,
)
from zero_trial.engine import Engine
from zero_trial.engine.initialize import build_engine
from zero_trial.engine.wiring import mesh_shape
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.imagined_mesh import Exchange, Segments, imagined_mesh
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


# Runs one micro-batch: forward, backward and step of every engine, on the given kind of tensors.
Micro = Callable[[Sequence[Engine], bool], None]


def rehearse(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    *,
    calls: int = 1,
    imagined: bool = True,
    exchange: Exchange = Exchange.SHARED,
) -> Figures:
    """Bytes on rank 0 of ``ranks``. ``micro(engines, imagined)`` is called ``calls`` times per step; without it the states alone are measured.

    ``imagined``: tensors without values, which cost neither memory nor time to compute; else real ones on this machine's CPU, in as much
    memory as the rank itself would need. torch's random state is left as it was.
    """
    live, segments = LiveBytes(), Segments()
    first = roles[0].blueprint
    cast = [role.blueprint.options(imagined=imagined) for role in roles]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), first.without_values(imagined=imagined), live:
        warnings.simplefilter("ignore")  # imagined tensors have no addresses, and torch warns who asks for one
        engines = [
            _engine(role, options, World(ranks, exchange, segments), live, imagined)
            for role, options in zip(roles, cast, strict=True)
        ]
        cast.clear()
        live.follow(
            [unit.full for e in engines for unit in e.sharded.units]
            + [land.full for e in engines for land in e.sharded.landings]
        )
        if micro is None:
            for engine in engines:
                _empty_step(engine)
        for _ in range(STEPS if micro is not None else 0):
            live.restart()
            for _ in range(calls):
                with live.saving():
                    _call(micro, engines, imagined)
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


def rehearse_either(
    roles: Sequence[Role], ranks: int, micro: Micro | None, *, calls: int = 1, work: int = 0, one_host: bool = True
) -> tuple[Figures, str]:
    """As :func:`rehearse`, on the kind of tensors that suits, or on the other one if that fails; and which it was.

    ``work``: parameters times batch elements. A model that reads values out of its tensors cannot be imagined; one for another device, in
    half precision with a loss scale, or with much work is not traced first.
    """
    on_cpu = all(role.blueprint.device.type == "cpu" for role in roles)
    exchange = Exchange.NATIVE if not on_cpu else Exchange.SHARED if one_host else Exchange.DIRECT
    if micro is None:
        return rehearse(roles, ranks, None, exchange=exchange), "none"
    scaled = any(role.settings.fp16.enabled for role in roles)
    order = [False, True] if on_cpu and not scaled and work <= SMALL_WORK else [True, False] if on_cpu else [True]
    faults: list[Exception] = []
    for imagined in order:
        try:
            return rehearse(
                roles, ranks, micro, calls=calls, imagined=imagined, exchange=exchange
            ), "imagined" if imagined else "traced"
        except TrialError as error:
            faults.append(error)
        except ZeroTrialError:
            raise  # a config that cannot be used, in either way
        except Exception as error:
            faults.append(error)
    raise TrialError(
        f"a micro-batch cannot be rehearsed: {faults[0]}", where="plan", got=type(faults[0]).__name__
    ) from faults[0]


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


def _engine(role: Role, options: dict[str, Any], world: World, live: LiveBytes, imagined: bool) -> Engine:
    model = options.pop("model")
    live.hold([*model.parameters(), *model.buffers()])
    device = role.blueprint.device if imagined else torch.device("cpu")
    mesh = imagined_mesh(mesh_shape(role.settings, world.ranks), world.exchange, world.segments)
    return build_engine(model, role.settings, mesh, device, **options)


def _call(micro: Micro | None, engines: Sequence[Engine], imagined: bool) -> None:
    if micro is not None:
        micro(engines, imagined)


def _empty_step(engine: Engine) -> None:
    """A step on gradients of zero: all that it leaves is the optimizer's state."""
    if engine.optimizer is not None:
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
