"""Run training steps of one rank on a fake mesh with the engine's own code, and measure the memory
they hold.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine
from zero_trial.engine.build import build_engine
from zero_trial.engine.resolved_config import mesh_shape
from zero_trial.errors import TrialError, ZeroTrialError
from zero_trial.preflight.fake_comm import FAKE_SWAP, Exchange, Segments, fake_mesh
from zero_trial.preflight.live_bytes import LiveBytes
from zero_trial.preflight.plan import ON_CPU, Figures


class NotCopyable(ZeroTrialError):
    """The model cannot be copied, so there is no dry run with it."""


class Blueprint:
    """Copy ``model`` and ``options`` (optimizer, model_parameters, lr_scheduler) without values, so
    that the copy needs no memory.

    The copy is made at once: what happens to the model later (an engine that shards it) does not
    matter. ``device`` is where the training will be. Tensors that are neither parameters nor
    buffers are copied as they are. Raises NotCopyable.
    """

    def __init__(
        self, model: nn.Module, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        place = torch.device(device)
        # With its number, as in ``tensor.device``.
        self.device = torch.device(f"{place.type}:0") if place.type != "cpu" and str(place) == place.type else place
        given = {"model": model, **(options or {})}
        parameters = given.get("model_parameters")
        if isinstance(parameters, Iterator):
            raise NotCopyable("model_parameters can be read only once", fix="Give a list.")
        self.parameters = sum(param.numel() for param in model.parameters())
        self._given = _copied(given, lambda tensor: torch.empty_like(tensor, device="meta"))

    @cached_property
    def mode(self) -> FakeTensorMode:
        """Return the mode, made when first needed: torch loads some 800 modules for it, which takes
        a second.
        """
        return FakeTensorMode(allow_non_fake_inputs=True)

    def options(self, *, fake: bool) -> dict[str, Any]:
        """Return a new copy.

        ``fake``: without values, for use inside :meth:`without_values`; else real tensors on the
        CPU.
        """
        if fake:
            with self.mode:
                return _copied(
                    self._given, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                )
        return _copied(self._given, lambda tensor: _filled(tensor.shape, tensor.dtype))

    @contextmanager
    def without_values(self, *, fake: bool) -> Iterator[None]:
        """Compute shapes, dtypes and lifetimes of tensors inside, and no values, where ``fake``."""
        if not fake:
            yield
            return
        with self.mode:
            yield

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make copies and batches on another device inside than that of the training."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def batch(self, value: Any, *, fake: bool) -> Any:
        """Return a batch of the same nested form; its tensors have no values where ``fake``."""
        if not fake:
            return value
        memo: dict[int, Any] = {}
        return torch.utils._pytree.tree_map(
            lambda leaf: self._fake(leaf, memo) if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _fake(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            with self.mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _copied(given: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return a deep copy with ``like(tensor)`` in place of every parameter and buffer; what was
    shared stays shared.
    """
    model: nn.Module = given["model"]
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if id(tensor) in memo:
            continue
        made = like(tensor.detach())
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    try:
        return dict(copy.deepcopy(dict(given), memo))
    except (TypeError, RuntimeError, AttributeError) as error:
        raise NotCopyable(f"the model cannot be copied: {error}", where=type(model).__name__) from error


def _filled(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return small numbers that no layer turns into nan."""
    return torch.full(shape, 0.01, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


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


@dataclass(frozen=True)
class _FakeWorld:
    """The fake ranks: their number, how they exchange tensors, and the shared segments that this
    takes.
    """

    ranks: int
    exchange: Exchange
    segments: Segments


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
    first = roles[0].blueprint
    live, segments = LiveBytes(first.device.type), Segments()
    given = [first.batch(batch, fake=fake) for batch in batches]
    live.hold(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
    copies = [role.blueprint.options(fake=fake) for role in roles]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), first.without_values(fake=fake), live:
        # fake tensors have no addresses, and torch warns who asks for one
        warnings.simplefilter("ignore")
        engines = [
            _engine(role, options, _FakeWorld(ranks, exchange, segments), live)
            for role, options in zip(roles, copies, strict=True)
        ]
        copies.clear()
        live.hold(buffer for engine in engines for buffer in engine.sharded.buffers())
        if micro is None:
            for engine in engines:
                _empty_step(engine)
        for _ in range(STEPS if micro is not None else 0):
            live.restart()
            for _ in range(calls):
                with live.saving():
                    _call(micro, engines, given)
    if any(engine.skipped_steps for engine in engines):
        raise TrialError("the gradients of the dry run are not finite, so the optimizer made no state", where="plan")
    states = [engine.persistent_bytes() for engine in engines]
    parameters, gradients, optimizer = (
        sum(state[kind] for state in states) for kind in ("parameters", "gradients", "optimizer")
    )
    known = Figures(parameters, gradients, optimizer, exchange=segments.total)
    return known if micro is None else replace(known, activations=live.saved_peak, peak=live.peak)


class Way(Enum):
    """What tensors a dry run has, as a plan prints it."""

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
    return [Way.FAKE_ON_CPU, Way.REAL] if small else [Way.FAKE_ON_CPU]


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
) -> tuple[Figures, str]:
    """Run :func:`dry_run` in the best way, or in the next one if that fails; return the figures and
    the way.

    Real tensors come first for little work (parameters times batch elements), because that is
    faster. A model that reads values of its tensors needs them.
    """
    device = roles[0].blueprint.device
    exchange = Exchange.NATIVE if device.type != "cpu" else Exchange.SHARED if one_host else Exchange.DIRECT
    if micro is None:
        with _on(roles, device if is_here(device) else torch.device("cpu")):
            return dry_run(roles, ranks, None, exchange=exchange), "none"
    work = sum(role.blueprint.parameters for role in roles) * largest(batches)
    scaled = any(role.settings.fp16.enabled for role in roles)
    faults: list[Exception] = []
    for way in ways(device, work=work, scaled=scaled, is_here=is_here(device)):
        place = device if way is Way.FAKE else torch.device("cpu")
        try:
            with _on(roles, place):
                fake = way is not Way.REAL
                return dry_run(roles, ranks, micro, batches, calls=calls, fake=fake, exchange=exchange), way.value
        except TrialError as error:
            faults.append(error)
        except ZeroTrialError:
            raise  # a config that cannot be used, in any way
        except Exception as error:
            faults.append(error)
    last = faults[-1]  # of the last way: a fault of the user's code is the same in all
    raise TrialError(f"a micro-batch cannot be run: {last}", where="plan", got=type(last).__name__) from last


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


def _engine(role: Role, options: dict[str, Any], world: _FakeWorld, live: LiveBytes) -> Engine:
    model = options.pop("model")
    live.hold([*model.parameters(), *model.buffers()])
    mesh = fake_mesh(mesh_shape(role.settings, world.ranks), world.exchange, world.segments)
    zero = replace(role.settings.zero_optimization, ignore_unused_parameters=True)  # bytes are all that is asked
    return build_engine(
        model, replace(role.settings, zero_optimization=zero), mesh, role.blueprint.device, places=FAKE_SWAP, **options
    )


def _call(micro: Micro | None, engines: Sequence[Engine], batches: Sequence[Any]) -> None:
    if micro is not None:
        micro(engines, batches)


def _empty_step(engine: Engine) -> None:
    """Take a step on gradients of zero: it leaves the optimizer's state and nothing else."""
    if engine.optimizer is not None:
        engine.set_gradient_accumulation_boundary(True)
        engine.sharded.reducer.reduce_missing()  # gradients that have not come count as zeros
        engine.step()


def largest(batch: Any) -> int:
    """Return the elements of the batch's largest tensor."""
    return max((leaf.numel() for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)), default=0)


Loss = Callable[[Any, Any], torch.Tensor]


class Subject(Protocol):
    """What a plan is made for: a model with its batch, or a trial."""

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters, each counted once."""

    def dry_run(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        """Return the figures with ``settings`` (all batch sizes solved) on ``ranks`` ranks, all on
        one host or not, and the way of the dry run.
        """


class ModelSubject:
    """A model alone.

    ``batch``: what its forward takes (a tuple of arguments, a dict of keyword arguments, or one
    tensor); None: states only.

    ``loss(engine, batch)`` gives the scalar to differentiate; without it the model is called, and
    its own loss taken, or one made of its outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        loss: Loss | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._set(Blueprint(model, options, device), batch, loss)

    @classmethod
    def of(cls, blueprint: Blueprint, batch: Any, loss: Loss) -> ModelSubject:
        """Make the subject from an existing blueprint."""
        made = cls.__new__(cls)
        made._set(blueprint, batch, loss)
        return made

    def _set(self, blueprint: Blueprint, batch: Any, loss: Loss | None) -> None:
        self._blueprint = blueprint
        self._batch = batch
        self._loss = loss if loss is not None else _call_and_reduce
        self._rows = rows_of(batch)

    @property
    def parameters(self) -> int:
        return self._blueprint.parameters

    def dry_run(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        batch = self._batch if self._rows is None else first_rows(self._batch, self._rows, micro_batch)

        def micro(engines: Sequence[Engine], batches: Sequence[Any]) -> None:
            engines[0].backward(self._loss(engines[0], batches[0]))
            engines[0].step()

        calls = settings.gradient_accumulation_steps or 1
        known = micro if self._batch is not None else None
        return dry_run_any([Role(self._blueprint, settings)], ranks, known, [batch], calls=calls, one_host=one_host)


def _call_and_reduce(engine: Any, batch: Any) -> torch.Tensor:
    """Call the model on ``batch`` and return its loss, or one made of its outputs."""
    if isinstance(batch, Mapping):
        return loss_in(engine(**batch))
    return loss_in(engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch))


def loss_in(output: Any) -> torch.Tensor:
    """Return the first scalar that requires grad in a model's output: its loss, as in the outputs
    of Hugging Face's models.

    Where there is none, the loss is made outside of the model and not known here: a log-softmax
    over the last dimension of each floating output stands for it, which holds as much as a cross
    entropy does.
    """
    floats = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    single = next((leaf for leaf in floats if leaf.numel() == 1), None)
    if single is not None:
        return single.reshape(())
    return torch.stack([torch.log_softmax(leaf.float(), -1).mean() for leaf in floats]).sum()


def _leaves(output: Any) -> list[Any]:
    """Return the leaves of nested outputs; objects with attributes, such as dataclasses, count as
    dicts.
    """
    found: list[Any] = []
    for leaf in tree_flatten(output)[0]:
        opens = hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor)
        found += tree_flatten(dict(vars(leaf)))[0] if opens else [leaf]
    return found


def rows_of(batch: Any) -> int | None:
    """Return the samples in a batch: the first dimension of its first tensor that has one; None
    where there is none.
    """
    return next(
        (leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )


def first_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Cut or repeat the batch to ``wanted`` samples: every tensor whose first dimension is
    ``rows``; the rest stays as it is.
    """

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or rows == wanted:
            return leaf
        if wanted < rows:
            return leaf[:wanted].clone()
        return leaf[torch.arange(wanted) % rows]

    return tree_map(fit, batch)
