"""Validation: every rank evaluates its batches, and all ranks get the same metrics.

A rank with fewer batches than others evaluates its last batch again, because the others may need it
in their collectives (ZeRO stage 3, or the user's own); these results do not count.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch

from zero_trial.errors import ConfigError, DataError, TrialError
from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.data import DataLoader, accept_loader, agreed_minimum, batches_by_rank
from zero_trial.trial.metrics import (
    SPEED_METRIC,
    WARM_UP,
    evaluation_reducers,
    over_ranks,
    speed_of,
    validation_metrics,
)
from zero_trial.trial.trial import TrialCallback, ZeroTrial, fitted, overrides

VALIDATION_LOADER = "build_validation_data_loader"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Validator:
    """Validates one trial on one rank; the loader is built once.

    ``most``: maximum number of batches, for a test run.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        callbacks: Sequence[TrialCallback],
        most: int | None = None,
    ) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._full = overrides(trial, "evaluate_full_dataset")
        self._loader: Any = None
        self._batches = self._own = 0
        self._most = most
        self.enabled = self._full or overrides(trial, "evaluate_batch")
        if self.enabled and any(map(_evaluates_averages, context.engines)):
            context.note("validation uses the averages of the weights (ema.evaluate)")
        if self.enabled:
            self._open()

    def stated_metrics(self) -> frozenset[str] | None:
        """Return all metric names that validation can report, from the trial's source and the
        wrapped reducers; None if they cannot be determined."""
        names = reported_metrics(self._trial.evaluate_full_dataset if self._full else self._trial.evaluate_batch)
        reducers = [item.name for item in self._context.reducers.wrapped if item.for_validation]
        if names is None or None in reducers:
            return None
        return names.union(name for name in reducers if name is not None)

    def _open(self) -> None:
        """Collective. Build the loader and agree on the number of batches."""
        mpu, context = self._context.mpu, self._context
        built: Any = self._trial.build_validation_data_loader() if mpu.should_build_data_loader or self._full else None
        if built is not None or mpu.should_build_data_loader:
            built = accept_loader(built, VALIDATION_LOADER, context.check_reproducibility and not self._full)
        if isinstance(built, DataLoader):
            replicas, rank = (1, 0) if self._full else (mpu.data_parallel_world_size, mpu.data_parallel_rank)
            built = built.get_data_loader(False, 0, replicas, rank, context.platform.seed)
            left_out = getattr(built.batch_sampler, "left_out", 0)
            if left_out:
                context.note(
                    f"{VALIDATION_LOADER}: the last {left_out} samples are skipped, so that all ranks have equally many batches"
                )
        self._loader = built
        if self._full:
            return
        mine = _length(built) if mpu.should_build_data_loader else None
        self._batches = self._own = self._agree(mine)
        if context.use_pipeline_parallel:  # each evaluation takes ``accumulation`` micro-batches
            accumulation = context.get_num_micro_batches_per_slot()
            if self._batches < accumulation:
                raise ConfigError(
                    "the validation loader is too short for the pipeline",
                    where=VALIDATION_LOADER,
                    got=f"{self._batches} batches per replica",
                    expected=f"at least gradient_accumulation_steps = {accumulation}",
                )
            if rest := self._batches % accumulation:
                context.note(f"{VALIDATION_LOADER}: the last {rest} batches are skipped")
            self._batches //= accumulation
        elif mine is not None and self._repeats:
            self._own = mine

    @property
    def _repeats(self) -> bool:
        """Whether ranks with fewer batches repeat their last one. False if the trial's reducers, or
        ranks that read no data, would count repetitions."""
        context = self._context
        counts_all = any(item.for_validation for item in context.reducers.wrapped)
        return not (counts_all or context.use_pipeline_parallel) and context.mpu.should_build_data_loader

    def _agree(self, mine: int | None) -> int:
        """Collective. Return how many batches every rank evaluates."""
        distributed, note = self._context.distributed, self._context.note
        if not all(distributed.allgather(self._repeats)):
            return agreed_minimum(distributed, mine, VALIDATION_LOADER, note)
        numbers = batches_by_rank(distributed, mine, VALIDATION_LOADER)
        most = max(number or 0 for number in numbers)
        if any(number != most for number in numbers):
            note(
                f"{VALIDATION_LOADER}: ranks have different numbers of batches {numbers}; ranks with fewer than {most} repeat their last batch, "
                "which does not count in the metrics"
            )
        return most

    @property
    def evaluates_whole(self) -> bool:
        """Whether ``evaluate_full_dataset`` replaces single batches."""
        return self._full

    @property
    def batches(self) -> int:
        """The number of ``evaluate_batch`` calls in a whole validation."""
        return self._batches

    def run(self) -> dict[str, Any]:
        """Collective. Return the metrics, the same on every rank."""
        for callback in self._callbacks:
            callback.on_validation_start()
        engines = self._context.engines
        self._context.reset_reducers(for_training=False)
        for engine in engines:
            engine.eval()
        try:
            with ExitStack() as averages, torch.no_grad():
                for engine in filter(_evaluates_averages, engines):
                    averages.enter_context(engine.ema_weights())
                metrics = self._full_dataset() if self._full else self._batchwise()
        finally:
            for engine in engines:
                engine.train()
        metrics |= self._context.reduce_metrics(for_training=False)
        return metrics

    def _full_dataset(self) -> dict[str, Any]:
        returned = self._trial.evaluate_full_dataset(self._loader)
        if not isinstance(returned, dict):
            raise TrialError("evaluate_full_dataset must return a dictionary of metrics", got=type(returned).__name__)
        values = validation_metrics([returned], {}, "evaluate_full_dataset")
        metrics: dict[str, Any] = self._context.distributed.broadcast(values)
        return metrics

    def _batchwise(self) -> dict[str, Any]:
        for callback in self._callbacks:
            callback.on_validation_epoch_start()
        batches = iter(self._loader) if self._loader is not None else None
        outputs = list(self._outputs(batches))[: self._own]
        for callback in self._callbacks:
            callback.on_validation_epoch_end(outputs)
        counted = outputs if self._context.mpu.should_report_metrics else []
        names = counted[0] if counted and isinstance(counted[0], dict) else ()
        reducers = evaluation_reducers(self._trial.evaluation_reducer(), names)
        where = f"rank {self._context.distributed.rank}, evaluate_batch"
        mine = validation_metrics(counted, reducers, where)
        ranks = self._context.distributed.allgather([mine, len(counted)])
        names = next((part for part, _ in ranks if part), {})
        reducers = evaluation_reducers(self._trial.evaluation_reducer(), names)
        return over_ranks(ranks, reducers)

    def _outputs(self, batches: Iterator[Any] | None) -> Iterator[Any]:
        evaluate = fitted(self._trial.evaluate_batch)
        if batches is not None and self._own < self._batches:
            batches = _then_the_last(batches, self._own)
        for index in range(self._batches if self._most is None else min(self._batches, self._most)):
            try:
                yield evaluate(batches, index)
            except StopIteration:
                raise DataError(
                    "evaluate_batch consumed more batches than exist",
                    where=VALIDATION_LOADER,
                    got=f"batch {index} of {self._batches}",
                    fix="Consume one batch per call.",
                ) from None


class SpeedMeter:
    """Measures a trial's steps per second instead of validating it, for `SPEED_METRIC`."""

    enabled = True

    def __init__(self, context: ZeroTrialContext, clock: Callable[[], float]) -> None:
        self._context = context
        self._clock = clock
        self._times: list[float] = []

    def stated_metrics(self) -> frozenset[str]:
        """Return the names of the metrics."""
        return frozenset((SPEED_METRIC,))

    def step_done(self) -> None:
        """Note that a step is complete on all ranks."""
        self._times.append(self._clock())

    def run(self) -> dict[str, Any]:
        """Collective. Return rank 0's steps per second, excluding steps before ds_config's
        ``autotuning.start_profile_step``. Raises ConfigError if no steps are left."""
        configs = self._context.ds_configs
        warm_up = configs[0].autotuning.start_profile_step - 1 if configs else WARM_UP
        measured, speed = speed_of(self._times, warm_up)
        if not measured:
            raise ConfigError(
                f"no steps are left to measure after {max(warm_up, 1)} warm-up steps",
                where="searcher.max_length, min_validation_period",
                got=f"a report after {len(self._times)} steps",
            )
        return {SPEED_METRIC: self._context.distributed.broadcast(speed)}


def reported_metrics(method: Callable[..., Any]) -> frozenset[str] | None:
    """Return every key that a dict returned by ``method`` can have; None if the source does not
    show all of them.

    Understands dict displays and ``dict(name=...)``, joined by ``|`` or selected by ``if``. A call
    may return fewer keys than listed, but never others.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):
        return None
    return _returned_names(tree.body[0]) if tree.body else None


def _returned_names(function: ast.AST) -> frozenset[str] | None:
    # torch's decorators (torch.no_grad() ...) return the dict unchanged
    if not isinstance(function, _Function) or not all(
        ast.unparse(item).startswith("torch.") for item in function.decorator_list
    ):
        return None
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return None
    found = [_names(node.value) for node in own if isinstance(node, ast.Return) and node.value is not None]
    known = [names for names in found if names is not None]
    return frozenset().union(*known) if found and len(known) == len(found) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those of nested functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _names(value: ast.expr) -> frozenset[str] | None:
    """Return the keys of a dict; None if the source does not show them."""
    match value:
        case ast.Dict(keys=keys):
            names: list[object] = [key.value if isinstance(key, ast.Constant) else None for key in keys]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            names = [keyword.arg for keyword in keywords]
        case ast.IfExp(body=left, orelse=right) | ast.BinOp(left=left, op=ast.BitOr(), right=right):
            first, second = _names(left), _names(right)
            return None if first is None or second is None else first | second
        case _:
            return None
    texts = [name for name in names if isinstance(name, str)]
    return frozenset(texts) if len(texts) == len(names) else None


def _evaluates_averages(engine: Any) -> bool:
    ema = getattr(getattr(engine, "config", None), "ema", None)
    return ema is not None and bool(ema.evaluate)


def _then_the_last(batches: Iterator[Any], own: int) -> Iterator[Any]:
    """Yield ``own`` batches, then repeat the last batch forever."""
    last: Any = None
    for last in islice(batches, own):
        yield last
    while last is not None:
        yield last


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        fix = "Return zero_trial.trial.DataLoader, or give the loader a __len__."
        raise DataError(
            f"{VALIDATION_LOADER} returned a loader without a length", got=type(loader).__name__, fix=fix
        ) from None
