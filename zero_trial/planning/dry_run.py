"""Run training steps of one rank on a fake mesh with the engine's own code, and measure the memory
they hold.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from zero_trial.comm import Mesh
from zero_trial.ds_config.keys_running import CheckpointWriterSection
from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine, saving
from zero_trial.engine.build import build_engine
from zero_trial.engine.resolved_config import mesh_shape, resolve_config
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.planning.blueprint import FEW, META, Blueprint, Stack, extrapolate, within_slack
from zero_trial.planning.fake_comm import Exchange, Segments, fake_mesh
from zero_trial.planning.live_bytes import AbsentDevice, LiveBytes
from zero_trial.planning.memory_plan import ON_CPU, Figures, Moved
from zero_trial.sharding.plan import Home, Lifetime, Reshard

# the second is measured: from then on the optimizer has its state and the order of reductions is
# known
STEPS = 2
MOST_ACCUMULATION = 2  # a third micro-batch of a step needs what the second needs
# parameters times elements of the batch: below, real numbers are faster than fake ones
SMALL_WORK = 1_000_000_000


@dataclass(frozen=True)
class Role:
    """What one engine is built from, and its ds_config with all batch sizes solved."""

    blueprint: Blueprint
    settings: DsConfig


Micro = Callable[[Sequence[Engine], Sequence[Any]], None]
"""Runs one micro-batch out of the given ones: forward, backward and step of every engine."""


def dry_run(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    batches: Sequence[Any] = (),
    *,
    calls: int = 1,
    fake: bool = True,
    exchange: Exchange = Exchange.SHARED,
) -> Figures:
    """Return the bytes on rank 0 of ``ranks``.

    ``micro(engines, batches)`` is called ``calls`` times per step; None measures the states.

    ``fake``: tensors without values, which cost neither memory nor time to compute; else real ones
    on this machine's CPU, in as much memory as the rank itself would need. torch's random state is
    left as it was.
    """
    found = _measure(roles, ranks, micro, batches, calls=calls, fake=fake, exchange=exchange)
    return _figures(found, roles[0].blueprint.device)


def _measure(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    batches: Sequence[Any],
    *,
    calls: int,
    fake: bool,
    exchange: Exchange,
) -> dict[str, int]:
    """Return the sums of a dry run by name: the bytes of :class:`Figures`; as ``last calls
    KIND/AXIS`` the traffic of a step's last call of ``micro``, and as ``further bytes KIND/AXIS``
    that of each one before it."""
    first = roles[0].blueprint
    live, segments = AbsentDevice() if first.device == META else LiveBytes(first.device.type), Segments()
    given = [first.batch(batch, fake=fake) for batch in batches]
    live.hold(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
    copies = [role.blueprint.options(fake=fake) for role in roles]
    found: dict[str, int] = {}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), first.without_values(fake=fake), live:
        # fake tensors have no addresses, and torch warns who asks for one
        warnings.simplefilter("ignore")
        engines = [
            _engine(role, options, fake_mesh(mesh_shape(role.settings, ranks), exchange, segments), segments, live)
            for role, options in zip(roles, copies, strict=True)
        ]
        copies.clear()
        live.hold(buffer for engine in engines for buffer in engine.sharded.buffers())
        if micro is None:
            for engine in engines:
                _empty_step(engine)
        else:
            for _ in range(STEPS):
                live.restart()
                before = live.flops
                found = {"calls": calls}  # nothing of the step before
                for call in range(calls):
                    for engine in engines:
                        engine.mesh.counters.reset()
                    with live.saving():
                        micro(engines, given)
                    if call == 0 or call == calls - 1:
                        found |= _traffic("last" if call == calls - 1 else "further", engines)
                found["flops"] = (live.flops - before) // calls
    if any(engine.skipped_steps for engine in engines):
        raise TrialError("the gradients of the dry run are not finite, so the optimizer made no state", where="plan")
    for kind in _STATES:
        found[kind] = sum(engine.persistent_bytes()[kind] for engine in engines)
    writers = [engine for role, engine in zip(roles, engines, strict=True) if role.settings.checkpoint.writer.decoupled]
    found["snapshot"] = sum(saving.snapshot_bytes(engine) for engine in writers)
    for place, engine in enumerate(engines):
        found[f"frees {place}"] = int(engine.sharded.plan.frees_parameters)
        found[f"files {place}"] = int(engine.sharded.plan.home is Home.NVME)
        for always in (True, False):
            groups = [each for each in engine.sharded.groups if (each.plan.params is Lifetime.ALWAYS) is always]
            found[f"{'kept' if always else 'freed'} elements {place}"] = sum(
                slot.numel for each in groups for slot in each.layout.slots
            )
    found |= {"exchange": segments.total, "disk": segments.disk, "host": max(live.host, live.host_peak)}
    optimizers = [engine.optimizer for engine in engines if engine.optimizer is not None]
    found["whole tensors"] = sum(len(each.whole.tensors) for each in optimizers if each.whole is not None)
    if micro is not None:
        found |= {"activations": live.saved_peak}
        found |= {"backward_peak": live.backward_peak, "step_peak": live.step_peak}
    return found


_STATES = ("parameters", "gradients", "optimizer")
_OUTLIVES = (*_STATES, "disk", "snapshot")  # a step


def _traffic(when: str, engines: Sequence[Engine]) -> dict[str, int]:
    """Return calls and bytes of the engines' collectives over tensors, by kind and axis."""
    found: dict[str, int] = {}
    for engine in engines:
        for name, entry in engine.mesh.counters.table().items():
            for what in ("calls", "bytes"):
                key = f"{when} {what} {name}"
                found[key] = found.get(key, 0) + entry[what]
    return found


def _figures(found: Mapping[str, int], device: torch.device) -> Figures:
    """Return the figures of what :func:`_measure` has found, for training on ``device``."""
    kinds = (*_STATES, "exchange", "disk", "activations")
    on_cpu = device.type == "cpu"
    of_rank = found["snapshot"] if on_cpu else 0
    peak = max(found["backward_peak"], found["step_peak"]) if "step_peak" in found else None
    return Figures(
        **{kind: found[kind] for kind in kinds if kind in found},
        host=found["host"] + found["snapshot"] - of_rank,
        snapshot=of_rank,
        peak=peak,
        flops=found.get("flops") or None,
        calls=found.get("calls", 0),
        last=_moved("last", found),
        further=_moved("further", found),
    )


def _moved(when: str, found: Mapping[str, int]) -> tuple[Moved, ...]:
    calls = {
        key.removeprefix(f"{when} calls "): value for key, value in found.items() if key.startswith(f"{when} calls ")
    }
    found_here = []
    for name, count in sorted(calls.items()):
        kind, _, axis = name.partition("/")
        found_here.append(Moved(kind, axis, count, found[f"{when} bytes {name}"]))
    return tuple(found_here)


class Way(Enum):
    """What tensors a dry run has, as a plan prints it."""

    # tensors of a GPU that is not in this machine
    META = "meta tensors"
    FAKE = "fake tensors"  # tensors without values, on the device of the training
    # where this torch has no fake tensors for that device: kernels may save other things there
    FAKE_ON_CPU = ON_CPU
    REAL = "real tensors"  # real numbers on the CPU


def ways(device: torch.device, *, work: int, scaled: bool, is_here: bool = True) -> list[Way]:
    """Return the ways to try, best first.

    Half precision with a loss scale (``scaled``) may overflow on the numbers of a dry run. Where
    the device is not in this machine (not ``is_here``), autograd has no fake tensors of it, and a
    model for it may be too large for real ones.
    """
    small = work <= SMALL_WORK
    if device.type == "cpu":
        return [Way.REAL, Way.FAKE] if small and not scaled else [Way.FAKE, Way.REAL]
    if is_here:
        return [Way.FAKE, Way.FAKE_ON_CPU, Way.REAL]
    return [Way.META, Way.FAKE_ON_CPU, Way.REAL] if small else [Way.META, Way.FAKE_ON_CPU]


def is_here(device: torch.device) -> bool:
    """Return whether this machine has such a device."""
    return device.type != "cuda" or torch.cuda.is_available()


def dry_run_any(
    roles: Sequence[Role],
    ranks: int,
    micro: Micro | None,
    batches: Sequence[Any] = (),
    *,
    calls: int = 1,
    one_host: bool = True,
    one_of_many: bool = False,
) -> tuple[Figures, str]:
    """Run :func:`dry_run` in the best way, or in the next one if that fails; return the figures and
    the way.

    Real tensors come first for little work (parameters times batch elements), because that is
    faster, unless it is ``one_of_many`` plans: torch takes a second to load its fake tensors, once.
    A model that reads values of its tensors needs real ones.
    """
    device = roles[0].blueprint.device
    exchange = Exchange.NATIVE if device.type != "cpu" else Exchange.SHARED if one_host else Exchange.DIRECT
    if micro is None:
        with _on(roles, device if is_here(device) else META):
            return dry_run(roles, ranks, None, exchange=exchange), "none"
    work = sum(role.blueprint.parameters for role in roles) * largest(batches) * (100 if one_of_many else 1)
    scaled = any(role.settings.fp16.enabled for role in roles)
    faults: list[Exception] = []
    for way in ways(device, work=work, scaled=scaled, is_here=is_here(device)):
        place = device if way is Way.FAKE else META if way is Way.META else torch.device("cpu")
        try:
            with _on(roles, place):
                run = partial(
                    _measure, ranks=ranks, batches=batches, calls=calls, fake=way is not Way.REAL, exchange=exchange
                )
                found = _by_few_layers(roles, run, micro, ranks) if way is not Way.REAL else None
                return _figures(found if found is not None else run(roles, micro=micro), device), way.value
        except TrialError as error:
            faults.append(error)
        except ZeroTrialError:
            raise  # a config that cannot be used, in any way
        except Exception as error:
            faults.append(error)
    last = faults[-1]  # of the last way: a fault of the user's code is the same in all
    raise TrialError(f"a micro-batch cannot be run: {last}", where="plan", got=type(last).__name__) from last


def _by_few_layers(
    roles: Sequence[Role], run: Callable[..., dict[str, int]], micro: Micro, ranks: int
) -> dict[str, int] | None:
    """Return what ``run`` gives for ``roles``, from runs with few of the layers that are alike.

    What outlives a step is exact. None: there are no such layers, or all are needed.
    """
    stacks = _stacks(roles)
    few: int | None = FEW if stacks else None
    while few is not None:
        runs: list[dict[str, int]] = []  # the first has the fewest layers, the next ones one more of each stack
        known = _extrapolated(roles, partial(run, micro=micro), few, [0] * len(roles), runs)
        wanted = _layers_wanted(roles, ranks, few, runs[: len(stacks) + 1], known)
        if known is not None and wanted == few:
            return _with_states(roles, run, few, runs, *known)
        few = wanted if wanted is not None and wanted * _WORTH <= min(stack.count for stack in stacks) else None
    return None


_WORTH = 6  # where more than so many times few layers are all, runs with few are worth their time


def _layers_wanted(
    roles: Sequence[Role],
    ranks: int,
    few: int,
    runs: Sequence[Mapping[str, int]],
    known: tuple[dict[str, int], frozenset[str]] | None,
) -> int | None:
    """Return how many layers may tell what all need, ``few`` where they do; None for none."""
    if len(runs) < 2:
        return None  # the model does not run with few layers
    if known is None:  # what is under way at one time may be more than few layers
        return 2 * FEW if few == FEW else None
    wanted = [_layers_that_decide(role, place, ranks, few, runs, known[0]) for place, role in enumerate(roles)]
    return None if None in wanted else max(each for each in wanted if each is not None)


def _with_states(
    roles: Sequence[Role],
    run: Callable[..., dict[str, int]],
    few: int,
    runs: Sequence[Mapping[str, int]],
    found: dict[str, int],
    exact: frozenset[str],
) -> dict[str, int]:
    """Return ``found`` with what outlives a step to the byte."""
    places = range(len(roles))
    # small parameters that always live share buckets
    shared = any(
        found[f"frees {place}"] and found[f"kept elements {place}"] != runs[0][f"kept elements {place}"]
        for place in places
    )
    # a layer may be cut into parts when there are few, and who owns a tensor depends on all
    alone = not any(role.blueprint.has_inner_lists for role in roles) and not found["whole tensors"]
    if alone and not shared and exact.issuperset(_OUTLIVES):
        return found
    states = None
    if alone and all(found[f"frees {place}"] for place in places):
        small = [role.settings.zero_optimization.param_persistence_threshold for role in roles]
        known = _extrapolated(roles, partial(run, micro=None), few, small, [])
        states = known[0] if known is not None and known[1].issuperset(_OUTLIVES) else None
    states = states or run(roles, micro=None)
    more = sum(states[kind] - found[kind] for kind in _STATES)
    found |= {kind: states[kind] for kind in _OUTLIVES}
    return found | {peak: found[peak] + more for peak in ("backward_peak", "step_peak")}


def _extrapolated(
    roles: Sequence[Role],
    run: Callable[..., dict[str, int]],
    few: int,
    small: Sequence[int],
    runs: list[dict[str, int]],
) -> tuple[dict[str, int], frozenset[str]] | None:
    """Return what :func:`extrapolate` makes of ``runs``, which it adds; None where the model's own
    elements would come out wrong, and where the user's code fails: it may need each layer, and what
    fails with all of them is reported."""

    def measure(counts: Sequence[int]) -> dict[str, int]:
        cut = _cut(roles, counts, small)
        runs.append(run(cut) | _elements(cut))
        return runs[-1]

    with suppress(Exception):
        known = extrapolate(_stacks(roles), measure, few)
        if known is not None and _elements(roles).items() <= known[0].items():
            return known
    return None


def _elements(roles: Sequence[Role]) -> dict[str, int]:
    """Return the elements of each role's model, all and those that are trained."""
    names = ("all elements", "trained elements")
    counted = ((place, zip(names, role.blueprint.elements, strict=True)) for place, role in enumerate(roles))
    return {f"{name} {place}": count for place, counts in counted for name, count in counts}


def _stacks(roles: Sequence[Role]) -> list[Stack]:
    return [stack for role in roles for stack in role.blueprint.stacks]


def _cut(roles: Sequence[Role], counts: Sequence[int], small: Sequence[int]) -> list[Role]:
    """Return the roles with so many layers of each stack, and of the others' parameters with those
    that are ``small``."""
    left = iter(counts)
    cut = (
        role.blueprint.with_layers([next(left) for _ in role.blueprint.stacks], below)
        for role, below in zip(roles, small, strict=True)
    )
    return [replace(role, blueprint=each) for role, each in zip(roles, cut, strict=True)]


def _layers_that_decide(
    role: Role, place: int, ranks: int, few: int, runs: Sequence[Mapping[str, int]], found: Mapping[str, int]
) -> int | None:
    """Return how many layers the limits of ``role`` decide on as on all: either the whole model is
    within a limit, or so many layers are beyond it. ``few`` where they are enough; None where no
    number is.

    Args:
        place: of the role among all.
        few: layers of the first run.
        runs: sums of the run with the fewest layers, and of those with one more of each stack.
        found: sums of the whole model.
    """
    shape, device = mesh_shape(role.settings, ranks), role.blueprint.device.type
    resolved = resolve_config(role.settings, shape.data_parallel_size, device)
    limits, live = resolved.sharding.limits, resolved.sharding.live
    kept, freed = f"kept elements {place}", f"freed elements {place}"
    always = runs[0][kept], found[kept]
    goal = limits.bucket_of(found[kept])
    of_all = goal == limits.bucket_of(runs[0][kept]) or all(
        limits.bucket_of(total) == -(-total // limits.buckets_wanted) for total in always
    )
    # an element in a bucket takes at most 8 bytes: its value and its gradient in fp32
    if not of_all and not within_slack(8 * goal, found["step_peak"]):
        return None
    offload = role.settings.zero_optimization.offload_optimizer
    in_part = offload is not None and offload.device == "nvme" and offload.ratio < 1
    if device == "cpu" and (in_part or (limits.kept_on_host and found[f"files {place}"])):
        return None  # some layers are in files and others are not
    layers = [more for run in runs[1:] if (more := run[freed] - runs[0][freed])]
    if not layers:
        return few
    layer, whole = min(layers), found[freed]
    if layer < limits.smallest_group or found[kept] > limits.model_persistence:
        return None  # blocks of several layers are put together
    # what may live, and how far it is between two uses, which is at most forward and backward; how
    # much is read ahead is for the buffers to decide, too
    reaches = [(live.prefetch, sys.maxsize if role.settings.zero_optimization.offload_param else whole)]
    if resolved.plan.reshard is Reshard.WITHIN_LIMITS:
        reaches += [(live.max_live, whole), (live.max_reuse_distance, 2 * whole)]
    between = [limit for limit, most in reaches if few * layer <= limit < most]
    return few if not between else max(between) // layer + FEW


@contextmanager
def _on(roles: Sequence[Role], place: torch.device) -> Iterator[None]:
    """Make the copies of all roles on ``place`` inside."""
    with ExitStack() as stack:
        for role in roles:
            stack.enter_context(role.blueprint.on(place))
        yield


def variant(settings: DsConfig, *, stage: int, micro_batch: int, accumulation: int) -> DsConfig:
    """Return ``settings`` at another ZeRO stage and batch."""
    return replace(
        settings,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        zero_optimization=replace(settings.zero_optimization, stage=stage),
    )


def with_state_at(settings: DsConfig, place: OffloadOptimizerSection | None) -> DsConfig:
    """Return ``settings`` with optimizer state somewhere else."""
    return replace(settings, zero_optimization=replace(settings.zero_optimization, offload_optimizer=place))


def _engine(role: Role, options: dict[str, Any], mesh: Mesh, segments: Segments, live: LiveBytes) -> Engine:
    model = options.pop("model")
    live.hold([*model.parameters(), *model.buffers()])
    # bytes are all that is asked: those of a copy are counted, and no memory is made for it
    zero = replace(role.settings.zero_optimization, ignore_unused_parameters=True)
    checkpoint = replace(role.settings.checkpoint, writer=CheckpointWriterSection())
    return build_engine(
        model,
        replace(role.settings, zero_optimization=zero, checkpoint=checkpoint),
        mesh,
        role.blueprint.device,
        places=replace(segments.backends, left_out=role.blueprint.left_out),
        **options,
    )


def _empty_step(engine: Engine) -> None:
    """Take a step on gradients of zero: it leaves the optimizer's state and nothing else."""
    for group in engine.sharded.groups:
        if group.offloaded is not None:  # buffers are made when they are first needed
            group.offloaded.start_read()
            group.offloaded.forget()
            break
    if engine.optimizer is not None:
        engine.set_gradient_accumulation_boundary(True)
        engine.sharded.reducer.reduce_missing()  # gradients that have not come count as zeros
        engine.step()


def largest(batch: Any) -> int:
    """Return the elements of the batch's largest tensor."""
    return max((leaf.numel() for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)), default=0)
